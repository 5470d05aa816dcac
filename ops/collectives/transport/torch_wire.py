"""Messages between the members of a group, over torch, beneath the collectives that move pieces of tensors.

A message is a flat, contiguous tensor; what travels are its bytes, so every dtype does, on every backend. Pieces have
sizes of their own, empty ones too; nothing is padded here but an uneven all-gather on NCCL.

There are two orders: that of the group's members, in which everything is said here, and that of the process group's
ranks, in which torch sends and stores. `group.by_rank` holds members in the second order; None where it is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.core.torch_private import c10d_functional

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Handle(Generic[T]):
    """A collective under way. `finish` waits for it; until then it holds every buffer that is read or written."""

    finish: Callable[[], T]


@dataclass(slots=True, frozen=True)
class Flight:
    """Pieces on their way here, one from every member.

    * `buffer`: where they come to lie, as bytes, in the order of ranks; with `finish`, in that of members.
    * `counts`, `slots`: by member, the elements of a piece and the room that it takes in the buffer.
    * `sent`: what must stay alive until they are here.
    * `own`: the piece from oneself, where it was not sent.
    * `finish`: waits for them; None: torch does.
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
        """The pieces one after the other, by member; a copy only when they are not stored so."""
        if self._order is None and self.own is None and list(self.counts) == list(self.slots):
            return self._arrived()
        return torch.cat(self.pieces())

    def pieces(self) -> list[Tensor]:
        """The pieces by member; views."""
        stored = _by_member(self._order, self._arrived().split_with_sizes(_by_rank(self._order, self.slots)))
        pieces = [piece if len(piece) == n else piece[:n] for piece, n in zip(stored, self.counts, strict=True)]
        if self.own is not None:
            pieces[self.group.position] = self.own
        return pieces

    @property
    def _order(self) -> tuple[int, ...] | None:
        return self.group.by_rank if self.finish is None else None

    def _arrived(self) -> Tensor:
        return (wait(self.buffer) if self.finish is None else self.finish()).view(self.dtype)


def wait(tensor: Tensor) -> Tensor:
    """Block until the collective that fills `tensor` is done. Raises `CollectiveError`."""
    try:
        return c10d_functional.wait_tensor(tensor)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


def exchange(message: Tensor, send: Sequence[int], receive: Sequence[int], group: GroupHandle) -> Flight:
    """Start an all-to-all: `send[i]` elements of `message` go to member i, `receive[i]` come from it."""
    sent = message
    if group.by_rank is not None:
        sent = torch.cat(_by_rank(group.by_rank, message.split_with_sizes(send)))
    return Flight(_all_to_all(sent, send, receive, group), receive, receive, message.dtype, group, sent)


def gather(message: Tensor, counts: Sequence[int], group: GroupHandle, way: str, *, own: bool = True) -> Flight:
    """Start sending `message` to all; `counts[i]` elements come from member i.

    The way is "exchange" (all at once), "native" (the backend's all-gather; counts must be equal) or "padded" (that,
    with all messages made equal in size). With `own=False` an exchange leaves out the message to oneself.
    """
    n, dtype = group.size, message.dtype
    if way == "exchange":
        others = n if own else n - 1
        sent = message if others == 1 else message.repeat(others)
        send, receive = [len(message)] * n, list(counts)
        if not own:
            send[group.position] = receive[group.position] = 0
        buffer = _all_to_all(sent, send, receive, group)
        return Flight(buffer, counts, receive, dtype, group, sent, None if own else message)
    slot, sent = max(counts), message
    if len(message) < slot:
        sent = message.new_empty(slot)
        sent[: len(message)] = message
    buffer = c10d_functional.all_gather_into_tensor(sent.view(torch.uint8), n, group.name)
    return Flight(buffer, counts, [slot] * n, dtype, group, sent)


def _all_to_all(sent: Tensor, send: Sequence[int], receive: Sequence[int], group: GroupHandle) -> Tensor:
    """`sent` lies in the order of ranks; its sizes, and those of what comes, are by member."""
    to, come = ([n * sent.itemsize for n in _by_rank(group.by_rank, sizes)] for sizes in (send, receive))
    return c10d_functional.all_to_all_single(sent.view(torch.uint8), come, to, group.name)  # type: ignore[no-any-return]


def _by_rank(order: tuple[int, ...] | None, of_members: Sequence[T]) -> list[T]:
    return list(of_members) if order is None else [of_members[member] for member in order]


def _by_member(order: tuple[int, ...] | None, of_ranks: Sequence[T]) -> list[T]:
    return list(of_ranks) if order is None else [of_ranks[order.index(member)] for member in range(len(order))]
