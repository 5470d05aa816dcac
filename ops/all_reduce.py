"""all_reduce: every member gets the sum, maximum or minimum of all members' tensors.

x    [...]    a different addend on every member
out  [...]    the same on all members, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardlib.ops._groups import GroupHandle
from shardlib.ops._wire import Choice, Handle, by_dtype, combine, exchange, gather, pack, wait

_c10d = torch.ops._c10d_functional

# Measured on Gloo over the loop-back device, 2 and 4 processes: an exchange wins while a member sends less than 1 MB
# (1.3 to 2 times faster than the ring), two rounds of one up to 4 MB (1.1 to 1.3 times), the ring above.
_EXCHANGE_BYTES = 1 << 20
_SCATTER_GATHER_BYTES = 1 << 22

_NATIVE = {
    "gloo": {torch.float32, torch.float64, torch.int32, torch.int64},
    "nccl": {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int8, torch.uint8, torch.int32, torch.int64},
}


def wire_bytes(out: int, n: int) -> int:
    """Bytes that each of `n` devices sends, for `out` bytes of result, by a ring.

    An exchange of small messages (see `choose`) sends n / 2 times that, to save the ring's latency.
    """
    return 2 * out * (n - 1) // n


def reference(shards: Sequence[Tensor], kind: str = "sum") -> list[Tensor]:
    """All members at once; they share one result."""
    out = shards[0] if len(shards) == 1 else combine(shards, kind).contiguous()
    return [out] * len(shards)


def natively(dtype: torch.dtype, kind: str, backend: str) -> str | None:
    """Why the backend's own reduction will not do; None when it will."""
    if dtype not in _NATIVE[backend]:
        return f"{backend} does not reduce {str(dtype).removeprefix('torch.')} exactly"
    if kind != "sum" and dtype.is_floating_point:
        return f"{backend} loses NaNs in a {kind}"
    return None


@lru_cache(maxsize=1024)
def choose(nbytes: int, dtype: torch.dtype, kind: str, backend: str, n: int) -> Choice:
    """How `nbytes` are reduced over `n` members.

    Example:
        >>> print(choose(1 << 23, torch.float32, "sum", "gloo", 4))
        native: a large message: the ring copies least
        >>> print(choose(1 << 23, torch.bfloat16, "sum", "gloo", 4))
        scatter_gather: gloo does not reduce bfloat16 exactly
    """
    if backend == "gloo" and n == 2:
        return Choice("exchange", "two members: each sends the other its own, and adds")
    fault = natively(dtype, kind, backend)
    small = nbytes * (n - 1) <= _EXCHANGE_BYTES
    if fault:
        return Choice("exchange" if small else "scatter_gather", fault)
    if backend != "gloo":
        return Choice("native", "the backend reduces this dtype")
    if small:
        return Choice("exchange", "a small message: one round of latency instead of 2 (n - 1)")
    if nbytes <= _SCATTER_GATHER_BYTES:
        return Choice("scatter_gather", "a middling message: two rounds of latency instead of 2 (n - 1)")
    return Choice("native", "a large message: the ring copies least")


def start(x: Tensor, group: GroupHandle, kind: str = "sum") -> Handle[Tensor]:
    """Begin to reduce `x`, of one shape on all members, over the group."""
    if group.size == 1:
        return Handle(lambda: x)
    flat = _start_flat(x.contiguous().view(-1), group, kind, fresh=False).finish
    return Handle(lambda: flat().view(x.shape))


def start_many(xs: Sequence[Tensor], group: GroupHandle, kind: str = "sum") -> Handle[list[Tensor]]:
    """Begin to reduce several tensors in one message (one for every dtype among them)."""
    if group.size == 1:
        return Handle(lambda: list(xs))
    parts = [
        (which, _start_flat(pack([xs[i] for i in which]), group, kind, fresh=True).finish) for which in by_dtype(xs)
    ]

    def land() -> list[Tensor]:
        out = list(xs)
        for which, flat in parts:
            for i, piece in zip(which, flat().split_with_sizes([xs[i].numel() for i in which]), strict=True):
                out[i] = piece.view(xs[i].shape)
        return out

    return Handle(land)


def finish(handle: Handle[Tensor]) -> Tensor:
    """Wait for the result of `start`."""
    return handle.finish()


def _start_flat(message: Tensor, group: GroupHandle, kind: str, *, fresh: bool) -> Handle[Tensor]:
    """Begin to reduce a flat message; a `fresh` one may be overwritten."""
    n, count = group.size, len(message)
    if count == 0:
        return Handle(lambda: message)
    way = choose(message.nbytes, message.dtype, kind, group.backend, n).way
    if way == "native":
        buffer = (_c10d.all_reduce_ if fresh else _c10d.all_reduce)(message, kind, group.name)
        return Handle(lambda: (message, wait(buffer))[1])
    if way == "exchange":
        flight = gather(message, [count] * n, group, "exchange", own=False)
        return Handle(lambda: combine(flight.pieces(), kind))
    # Each member reduces one n-th, then all gather; the second round starts when the first is waited for.
    counts = [(count * (i + 1)) // n - (count * i) // n for i in range(n)]
    scattered = exchange(message, counts, [counts[group.position]] * n, group)

    def land() -> Tensor:
        mine = combine(scattered.pieces(), kind)
        return gather(mine, counts, group, "exchange" if group.backend == "gloo" else "padded").flat()

    return Handle(land)
