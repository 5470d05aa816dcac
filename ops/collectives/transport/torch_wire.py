"""Messages between the members of a group, over torch.

A message is a flat, contiguous tensor. It travels as bytes, so every dtype works on every backend. Its parts may differ
in size and may be empty. Only an uneven all-gather on NCCL is padded.

Arguments and results are in the order of the group's members. torch sends and stores in the order of the process
group's ranks: `group.by_rank` holds the members in that order, or None where both orders agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.core.torch_internals.torch_private import c10d_functional

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle
T = TypeVar("T")

_REDUCED_DTYPES = {
    "gloo": {torch.float32, torch.float64, torch.int32, torch.int64},
    "nccl": {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int8, torch.uint8, torch.int32, torch.int64},
}


def find_native_fault(dtype: torch.dtype, kind: str, backend: str) -> str | None:
    """Returns why the backend's own reduction is not exact, or None if it is."""
    if dtype not in _REDUCED_DTYPES[backend]:
        return f"{backend} does not reduce {str(dtype).removeprefix('torch.')} exactly"
    if kind != "sum" and dtype.is_floating_point:
        return f"{backend} loses NaNs in a {kind}"
    return None


@dataclass(slots=True, frozen=True)
class Handle(Generic[T]):
    """A running collective. `finish` waits for it; until then it holds every buffer that is read or written."""

    finish: Callable[[], T]


def first_result(many: Handle[list[Tensor]]) -> Handle[Tensor]:
    """Returns the handle of the first of several results."""
    return Handle(lambda: many.finish()[0])


@dataclass(slots=True, frozen=True)
class PendingParts:
    """Parts that are being received, one from every member.

    * `buffer`: receives the parts as bytes, in the order of ranks; with `finish`, in the order of members.
    * `counts`, `slots`: by member, the elements of a part and the elements of its slot in the buffer.
    * `sent`: memory that must stay alive until the parts have arrived.
    * `own`: this member's own part, if it was not sent.
    * `finish`: waits for the parts; None: torch's own wait does.
    """

    buffer: Tensor
    counts: Sequence[int]
    slots: Sequence[int]
    dtype: torch.dtype
    group: GroupHandle
    sent: Tensor
    own: Tensor | None = None
    finish: Callable[[], Tensor] | None = None

    def flat(self) -> Tensor:
        """Returns all parts in one tensor, in the order of members; copies only where the buffer is no such tensor."""
        if self._order is None and self.own is None and list(self.counts) == list(self.slots):
            return self._arrived()
        return torch.cat(self.parts())

    def parts(self) -> list[Tensor]:
        """Returns views of the parts, in the order of members."""
        slots = self._arrived().split_with_sizes(_to_rank_order(self._order, self.slots))
        stored = _to_member_order(self._order, slots)
        parts = [part if len(part) == n else part[:n] for part, n in zip(stored, self.counts, strict=True)]
        if self.own is not None:
            parts[self.group.position] = self.own
        return parts

    @property
    def _order(self) -> tuple[int, ...] | None:
        return self.group.by_rank if self.finish is None else None

    def _arrived(self) -> Tensor:
        return (wait(self.buffer) if self.finish is None else self.finish()).view(self.dtype)


def wait(tensor: Tensor) -> Tensor:
    """Waits for the collective that fills `tensor`. Raises `CollectiveError`."""
    try:
        return c10d_functional.wait_tensor(tensor)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


def exchange(message: Tensor, send: Sequence[int], receive: Sequence[int], group: GroupHandle) -> PendingParts:
    """Start an all-to-all: `send[i]` elements of `message` go to member i, `receive[i]` come from it."""
    sent = message
    if group.by_rank is not None:
        sent = torch.cat(_to_rank_order(group.by_rank, message.split_with_sizes(send)))
    return PendingParts(_all_to_all(sent, send, receive, group), receive, receive, message.dtype, group, sent)


def gather(message: Tensor, counts: Sequence[int], group: GroupHandle, way: str, *, own: bool = True) -> PendingParts:
    """Start sending `message` to all; `counts[i]` elements come from member i.

    The way is "exchange" (all at once), "native" (the backend's all-gather of equal counts) or "padded" (the backend's
    all-gather of messages padded to equal counts). With `own=False` an exchange leaves out the message to oneself.
    """
    n, dtype = group.size, message.dtype
    if way == "exchange":
        others = n if own else n - 1
        sent = message if others == 1 else message.repeat(others)
        send, receive = [len(message)] * n, list(counts)
        if not own:
            send[group.position] = receive[group.position] = 0
        buffer = _all_to_all(sent, send, receive, group)
        return PendingParts(buffer, counts, receive, dtype, group, sent, None if own else message)
    slot, sent = max(counts), message
    if len(message) < slot:
        sent = message.new_empty(slot)
        sent[: len(message)] = message
    buffer = c10d_functional.all_gather_into_tensor(sent.view(torch.uint8), n, group.name)
    return PendingParts(buffer, counts, [slot] * n, dtype, group, sent)


def _all_to_all(sent: Tensor, send: Sequence[int], receive: Sequence[int], group: GroupHandle) -> Tensor:
    """Starts torch's all-to-all of `sent`, which is in the order of ranks; the counts are in the order of members."""
    by_rank = (_to_rank_order(group.by_rank, counts) for counts in (send, receive))
    outgoing, incoming = ([n * sent.itemsize for n in counts] for counts in by_rank)
    return c10d_functional.all_to_all_single(sent.view(torch.uint8), incoming, outgoing, group.name)  # type: ignore[no-any-return]


def _to_rank_order(order: tuple[int, ...] | None, by_member: Sequence[T]) -> list[T]:
    return list(by_member) if order is None else [by_member[member] for member in order]


def _to_member_order(order: tuple[int, ...] | None, by_rank: Sequence[T]) -> list[T]:
    return list(by_rank) if order is None else [by_rank[order.index(member)] for member in range(len(order))]
