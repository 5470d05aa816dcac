"""Compares the bits of replicas across ranks: values that drifted apart are named, with the rank that drifted."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.strided_only import as_bytes
from shardlib.distributed.store import format_ranks
from shardlib.distributed.turns import Turn
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import first_replicas
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.rank_checks import gather_rows
from shardlib.tensor.sharded_tensor import ShardedTensor

_WORDS = {"cpu": 1 << 15}  # of 4 bytes that are digested at once: they stay in the cache
_MORE_WORDS = 1 << 22  # on other devices, where small kernels cost more


def check_every(every: int | None) -> int | None:
    """Returns the argument `verify_every`; raises `ShardingError` if it is no whole number of 1 or more."""
    if every is not None and (type(every) is not int or every < 1):
        raise ShardingError(
            f"verify_every={every!r} is no number of calls", remedy="a whole number of 1 or more, or None"
        )
    return every


class Verifier:
    """Counts calls, and compares replicas in every `every`-th of them."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def is_due(self) -> bool:
        """Counts a call; returns whether it compares."""
        self.calls += 1
        return self.calls % self.every == 0

    def compare(self, mesh: Mesh, caller: str, tensors: Mapping[str, Tensor]) -> None:
        """Compares named tensors, by `require_equal_replicas`."""
        require_equal_replicas(mesh, caller, tensors, f" before call {self.calls}")


def require_equal_replicas(mesh: Mesh, caller: str, tensors: Mapping[str, Tensor], when: str = "") -> None:
    """Raises `ShardingError`, on all ranks, for replicas with different bits; one small all_gather.

    The value that most ranks of a replica group have is right. If two values are equally frequent, both are named. A
    plain tensor is a replica on every rank. Virtual devices share the memory of replicas, which cannot drift.
    """
    if mesh.kind != "distributed" or mesh.size == 1:
        return
    groups = {name: _replica_groups(mesh, _layout(x)) for name, x in tensors.items() if x.device.type != "meta"}
    names = [name for name, group in groups.items() if len(set(group)) < mesh.size]
    if not names:
        return
    mine = torch.stack([digest_bits(_local(tensors[name])).to(mesh.device) for name in names])
    rows = gather_rows(mesh, Turn(f"comparing replicas ({caller} on {mesh})", *names), mine)
    wrong = {}
    for i, name in enumerate(names):
        if lines := _find_drift([row[i] for row in rows], groups[name]):
            wrong[name] = lines
    if wrong:
        first, *others = wrong
        more = [f"{len(others)} more of {len(names)} values: {', '.join(others[:3])}{', ...' * (len(others) > 3)}"]
        raise ShardingError(
            f"{caller}: the replicas of {first} are not equal{when}",
            [*wrong[first], *more[: len(others)]],
            rule="a value that is not sharded over an axis has the same bits on all ranks along it",
            remedy="continue from a checkpoint before the drift; look for a write on one rank (x.to_local()), "
            "for ranks with other libraries or kinds of devices, and for faulty memory",
        )


def digest_bits(x: Tensor) -> Tensor:
    """Returns the digest of a plain tensor, int64[] on its device: the sum of its 4-byte words times odd weights.

    Any change of one word changes the digest: an odd number has an inverse modulo 2^64. Weights of different words
    differ in their low bits, so that changes of several words, also of signs only, rarely cancel.

    Example:
        >>> a, b = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
        >>> bool(digest_bits(a) == digest_bits(a.clone())), bool(digest_bits(a) == digest_bits(b))
        (True, False)
    """
    data = as_bytes(x.detach())
    if len(data) % 4 or data.storage_offset() % 4:
        data = torch.cat([data, data.new_zeros(-len(data) % 4)])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    weights, is_cpu = _weights(x.device), x.device.type == "cpu"
    for number, words in enumerate(torch.split(data.view(torch.int32), len(weights))):
        own = weights[: len(words)]
        part = torch.dot(words.long(), own) if is_cpu else (words * own).sum()  # integers have no dot on GPUs
        total += part * (2 * number + 1)
    return total


@functools.lru_cache(4)
def _weights(device: torch.device) -> Tensor:
    """Returns different odd numbers, one for each word."""
    return 2 * torch.arange(_WORDS.get(device.type, _MORE_WORDS), device=device) * 0x2545F4914F6CDD1D + 1


def _layout(x: Tensor) -> Layout:
    return x.sharding if isinstance(x, ShardedTensor) else Layout.replicated(x.shape)


def _local(x: Tensor) -> Tensor:
    return x._locals[0] if isinstance(x, ShardedTensor) else x


def _replica_groups(mesh: Mesh, layout: Layout) -> Sequence[int]:
    """Returns for each rank the first rank with the same shard; addends of a partial sum are no replicas."""
    return first_replicas(mesh.all_coords(), (*layout.axes, *layout.pending_axes))


def _find_drift(digests: Sequence[int], first: Sequence[int]) -> list[str]:
    """Describes the ranks whose digest is not that of most ranks of their group."""
    lines = []
    for group in dict.fromkeys(first):
        holders: dict[int, list[int]] = {}
        for rank, digest in enumerate(digests):
            if first[rank] == group:
                holders.setdefault(digest, []).append(rank)
        right, *others = sorted(holders, key=lambda digest: (-len(holders[digest]), holders[digest][0]))
        for other in others:
            one, two = (
                (format_ranks(holders[d]), "has" if len(holders[d]) == 1 else "have", d) for d in (other, right)
            )
            texts = [f"{ranks} {verb} {digest & _MASK:016x}" for ranks, verb, digest in (one, two)]
            tie = "; as many ranks have the one as the other" if len(holders[other]) == len(holders[right]) else ""
            lines.append(f"{texts[0]}, {texts[1]}{tie}")
    return lines


_MASK = (1 << 64) - 1
