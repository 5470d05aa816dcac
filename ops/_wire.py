"""Messages between the members of a group, beneath the collectives that move pieces of tensors.

A message is a flat, contiguous tensor; what travels are its bytes, so every dtype does, on every backend. Pieces have
sizes of their own, empty ones too; nothing is padded here but an uneven all-gather on NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from shardlib.errors import CollectiveError
from shardlib.internals import c10d_functional
from shardlib.ops._choice import Choice, unavailable, wanted

if TYPE_CHECKING:
    from shardlib.ops._groups import GroupHandle

NCCL = ("nccl", "cuda")  # transports of GPUs

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Handle(Generic[T]):
    """A collective under way. `finish` waits for it; until then it holds every buffer that is read or written."""

    finish: Callable[[], T]


@dataclass(slots=True, frozen=True)
class Flight:
    """Bytes on their way here: one piece from every member, stored in the process group's order.

    `counts` are the elements of each member's piece, `slots` the room that it takes in `buffer`. `sent` stays alive
    until the bytes are here. With `own`, nothing was sent to oneself and `own` is that piece. What is `ready` needs no
    wait and is stored by member.
    """

    buffer: Tensor
    counts: Sequence[int]
    slots: Sequence[int]
    dtype: torch.dtype
    group: GroupHandle
    sent: Tensor
    own: Tensor | None = None
    ready: bool = False

    def flat(self) -> Tensor:
        """The pieces one after the other, by member; a copy only when they are not stored so."""
        if self._order is None and self.own is None and list(self.counts) == list(self.slots):
            return self._arrived()
        return torch.cat(self.pieces())

    def pieces(self) -> list[Tensor]:
        """The pieces by member; views."""
        order = self._order
        stored = self._arrived().split_with_sizes(_in(order, self.slots))
        pieces = list(stored)
        if order is not None:
            for member, piece in zip(order, stored, strict=True):
                pieces[member] = piece
        pieces = [piece if len(piece) == n else piece[:n] for piece, n in zip(pieces, self.counts, strict=True)]
        if self.own is not None:
            pieces[self.group.position] = self.own
        return pieces

    @property
    def _order(self) -> tuple[int, ...] | None:
        return None if self.ready else self.group.by_rank

    def _arrived(self) -> Tensor:
        return (self.buffer if self.ready else wait(self.buffer)).view(self.dtype)


def pick(op: str, transport: str, why: str, shm: Choice | str, other: Choice, cuda: Choice | str) -> Choice:
    """Shared memory where there is some, unless SHARDLIB_OPS says torch; `other` is torch's way.

    The transport is "shm", "gloo", "nccl", "cuda" (NCCL, and GPUs that reach each other's memory), "virtual" (all
    members in one process), "none" (one member) or "open" (the ranks have not found out yet whether they share memory).
    `why` says why there is no shared memory; `shm` and `cuda`, when they are texts, what these cannot do in this case.
    """
    want = wanted(op)
    if transport in NCCL and want != "shm":
        return _on_gpus(op, transport, want, cuda, other)
    if transport == "open" and want in (None, "shm") and isinstance(shm, Choice):
        return Choice("shm", shm.way, f"{shm.reason}; {other.name} if the ranks find that they share no memory")
    if transport in ("virtual", "none"):
        return Choice("torch", "", "all members are in this process" if transport == "virtual" else "one member")
    if transport == "shm":
        fault = shm if isinstance(shm, str) else ""
    else:
        fault = why or f"the members speak over {'nccl' if transport in NCCL else transport}"
    if want not in (None, "torch") and (want != "shm" or fault):
        raise unavailable(op, want, fault or f"there is no {want} backend of {op} for CPU tensors")
    if want != "torch" and isinstance(shm, Choice) and not fault:
        return shm
    reason = "" if want == "torch" or not fault else f" (no shared memory: {fault})"
    return Choice(other.backend, other.way, other.reason + reason)


def _on_gpus(op: str, transport: str, want: str | None, cuda: Choice | str, other: Choice) -> Choice:
    """NCCL, unless SHARDLIB_OPS asks for the kernels and they do this."""
    if want == "torch" or (want is None and isinstance(cuda, str)):
        return other
    if want is None:
        reason = f"not yet measured on a GPU: SHARDLIB_OPS={op}=cuda takes shardlib's kernels"
    elif isinstance(cuda, str):
        reason = f"not shardlib's kernels: {cuda}"
    elif transport == "cuda":
        return cuda
    else:
        raise unavailable(op, "cuda", "the ranks made this group before SHARDLIB_OPS asked for the kernels")
    return Choice(other.backend, other.way, f"{other.reason} ({reason})")


def settled(xs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with their conjugations and negations done: others read their memory."""
    return [x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x for x in xs]


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
        blocks = message.split_with_sizes(send)
        sent = torch.cat([blocks[i] for i in group.by_rank])
    buffer = _all_to_all(sent, _in(group.by_rank, receive), _in(group.by_rank, send), group)
    return Flight(buffer, receive, receive, message.dtype, group, sent)


def gather(message: Tensor, counts: Sequence[int], group: GroupHandle, way: str, *, own: bool = True) -> Flight:
    """Start sending `message` to all; `counts[i]` elements come from member i.

    The way is "exchange" (all at once), "native" (the backend's all-gather; counts must be equal) or "padded" (that,
    with all messages made equal in size). With `own=False` an exchange leaves out the message to oneself.
    """
    n = group.size
    if way == "exchange":
        others = n if own else n - 1
        sent = message if others == 1 else message.repeat(others)
        send, receive = [len(message)] * n, list(counts)
        if not own:
            send[group.position] = receive[group.position] = 0
        buffer = _all_to_all(sent, _in(group.by_rank, receive), _in(group.by_rank, send), group)
        return Flight(buffer, counts, receive, message.dtype, group, sent, None if own else message)
    slot = max(counts)
    sent = message
    if way == "padded" and len(message) < slot:
        sent = message.new_empty(slot)
        sent[: len(message)] = message
    buffer = c10d_functional.all_gather_into_tensor(sent.view(torch.uint8), n, group.name)
    return Flight(buffer, counts, [slot] * n, message.dtype, group, sent)


def combine(parts: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce tensors of one shape in the order of members, so that every member and every runtime gets the same bits.

    A sum of floats of less than 32 bits is formed in float32 and rounded once. The result never shares memory with the
    parts, unless there is only one.
    """
    first, *rest = parts
    if not rest:
        return first
    if kind == "sum" and first.is_floating_point() and first.itemsize < 4:
        total = first.float()
        for part in rest:
            total += part
        return total.to(first.dtype)
    reduce = _REDUCE[kind]
    total = reduce(first, rest[0])
    for part in rest[1:]:
        reduce(total, part, out=total)
    return total


_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def pack(pieces: Sequence[Tensor]) -> Tensor:
    """One flat message of these tensors of one dtype, each in row-major order; each element is copied once."""
    message = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for room, piece in zip(message.split_with_sizes([piece.numel() for piece in pieces]), pieces, strict=True):
        room.view(piece.shape).copy_(piece)
    return message


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """`shape` with another size along `dim`."""
    new = list(shape)
    new[dim] = size
    return new


def leads(shape: Sequence[int], dim: int) -> bool:
    """Whether pieces along `dim` lie one after the other in memory: all dims before it have size 1."""
    return math.prod(shape[:dim]) == 1


def by_dtype(xs: Sequence[Tensor]) -> list[list[int]]:
    """Positions of tensors that may share a message."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault(x.dtype, []).append(i)
    return list(groups.values())


def _all_to_all(sent: Tensor, receive: Sequence[int], send: Sequence[int], group: GroupHandle) -> Tensor:
    size = sent.itemsize
    return c10d_functional.all_to_all_single(  # type: ignore[no-any-return]
        sent.view(torch.uint8), [n * size for n in receive], [n * size for n in send], group.name
    )


def _in(order: tuple[int, ...] | None, sizes: Sequence[int]) -> list[int]:
    return list(sizes) if order is None else [sizes[i] for i in order]
