"""The inputs of a program, and the ones that give up their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import memory_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import first_replicas
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.refcounts import Counts, ShardTuples, is_sole_owner, measure_sole_owner
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.view_aliases import Memory


@dataclass(frozen=True)
class Input:
    """One input of a program: its leaf of the call, its layout, and the fate of its memory.

    The memory is `donated`, or `replaced`: the program writes the new value there. `away`: the input is on the host.
    `firsts` pairs the first device of this process with each shard and the number of devices that hold it.
    """

    leaf: int
    name: str
    layout: Layout
    donated: bool
    replaced: bool
    away: bool
    firsts: tuple[tuple[int, int], ...]


def donate(
    inputs: Sequence[Input], leaves: list[Any], pieces: list[tuple[torch.Tensor, ...]], mesh: Mesh
) -> list[ShardedTensor]:
    """Copies shards that would be written over but are referred to elsewhere; returns the tensors that are given up.

    A shard may be a view of a plain tensor, an alias of another shard, or in use by a caller of `to_local`. Only memory
    without other references may be overwritten. A write to a plain tensor shows in all its aliases, as on one device.
    """
    gone: list[ShardedTensor] = []
    base = measure_sole_owner()
    counts = Counter(id(leaves[x.leaf]) for x in inputs)
    for i, x in enumerate(inputs):
        if not x.donated and not x.replaced:
            continue
        leaf = leaves[x.leaf]
        if x.replaced:
            if not _may_overwrite(leaf, pieces, i, x.firsts, base):
                pieces[i] = _copied(pieces[i], x, mesh)
        elif type(leaf) is ShardedTensor and counts[id(leaf)] == 1 and is_sole_owner(pieces, i, x.firsts, 2, base):
            gone.append(leaf)
        else:
            pieces[i] = _copied(pieces[i], x, mesh)
    return gone


def _may_overwrite(
    leaf: torch.Tensor, pieces: ShardTuples, i: int, firsts: tuple[tuple[int, int], ...], base: Counts
) -> bool:
    """True if a write to these shards shows in `leaf`, its views and aliases, and nowhere else."""
    if leaf.is_inference():
        return False
    if type(leaf) is not ShardedTensor:
        return bool(memory_of(pieces[i][0].untyped_storage()) == memory_of(leaf.untyped_storage()))
    memory: Memory | None = leaf.__dict__.get("_memory")
    if memory is not None:
        memory.forget(but=leaf)
    return not leaf.__dict__.get("_path") and is_sole_owner(pieces, i, firsts, 2 + (memory is not None), base)


def _copied(pieces: tuple[torch.Tensor, ...], x: Input, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    first = first_replicas(mesh.own_coords(), x.layout.axes)
    copies = {i: pieces[i].clone(memory_format=torch.contiguous_format) for i in dict.fromkeys(first)}
    return tuple(copies[i] for i in first)


class Gone(tuple[Any, ...]):
    """Replaces the shards of a donated tensor; reading them is an error."""

    name: str

    def __new__(cls, name: str) -> Gone:
        self = super().__new__(cls)
        self.name = name
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise ShardingError(
            f"a tensor is read after it was donated to {self.name}",
            rule="the memory of an argument in donate_argnums may hold other values after the call",
            remedy="read the function's result instead, or leave the argument out of donate_argnums",
        )

    __getitem__ = __iter__ = __len__ = _refuse
