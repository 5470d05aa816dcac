"""Which ShardedTensors share memory, so that a write through one of them is seen by all, as on one device.

Pieces are not written to while anybody else holds them, so devices and tensors may share them; no plain tensor does. A
write computes new pieces instead. So a tensor that was viewed has a `Memory`: the value of whoever owns it, and all
tensors that show a part of it, each with the views that lead there from the owner. A write through any of them makes
the owner's new value; the others forget their pieces, and make them again from the owner's when they are next read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.aten.op_traits import has
from shardlib.tensor.host_offload import AWAY, LOCK, at_rest, brought
from shardlib.tensor.tensor_meta import Form

if TYPE_CHECKING:
    from shardlib.tensor.sharded_tensor import ShardedTensor

Step = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...], int | None]  # op, args behind the first, kwargs, item
Path = tuple[Step, ...]


class Memory:
    """What a tensor, its aliases and its views share; `away` while the pieces are in the host's memory."""

    __slots__ = ("_pieces", "away", "form", "limit", "members")

    def __init__(self, form: Form, locals_: tuple[torch.Tensor, ...], *, away: bool = False) -> None:
        self.form, self._pieces, self.away = form, locals_, away
        self.members: list[weakref.ref[ShardedTensor]] = []
        self.limit = 16

    @property
    def locals(self) -> tuple[torch.Tensor, ...]:
        """The pieces, which live on the devices from now on."""
        with LOCK:
            if self.away:
                self._pieces, self.away = brought(self._pieces), False
            return self._pieces

    def join(self, x: ShardedTensor, path: Path) -> None:
        """`x` shows what `path` leads to."""
        if len(self.members) >= self.limit:
            self.members = [m for m in self.members if m() is not None]
            self.limit = 2 * len(self.members) + 16
        self.members.append(weakref.ref(x))
        attributes = x.__dict__
        attributes["_memory"], attributes["_path"] = self, path

    def write(self, locals_: tuple[torch.Tensor, ...], origin: int) -> None:
        """The owner's new value: whoever shows the memory has to look at it again, and comes from there."""
        self._pieces, self.away = locals_, False
        for x in self.forget():
            x._origin = origin

    def forget(self, but: ShardedTensor | None = None) -> list[ShardedTensor]:
        """Whoever shows the memory, one excepted, makes its pieces again when they are next read."""
        found = [x for member in self.members if (x := member()) is not None and x is not but]
        found = [x for x in found if x.__dict__.get("_memory") is self]
        for x in found:
            x.__dict__.pop("_locals", None)
            x.__dict__.pop(AWAY, None)
        return found


def memory_of(x: ShardedTensor) -> Memory:
    """The memory that `x` shows; its own, if it has shared none so far."""
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is None:
        memory = Memory(x._form, at_rest(x), away="_locals" not in x.__dict__)
        memory.join(x, ())
    return memory


def bits(x: torch.Tensor) -> set[Any]:
    """The bits that torch would mark `x` with, as the ops that set and clear them: `_conj`, `_neg_view`.

    A ShardedTensor has none; the views that lead to it say so.
    """
    found: set[Any] = set()
    for op, *_ in x.__dict__.get("_path", ()):
        if has(op, "marks"):
            found ^= {op}
    return found


_AS_IS = nullcontext()


def like(x: torch.Tensor) -> AbstractContextManager[object]:
    """Where a view of `x` is made: under `inference_mode`, that of a normal tensor is a normal tensor, too."""
    if torch.is_inference_mode_enabled() and not x.is_inference():
        return torch.inference_mode(False)
    return _AS_IS


def view(x: ShardedTensor, out: ShardedTensor, path: Path) -> None:
    """Note that `out` is what the views of `path`, one after the other, make of `x`."""
    memory_of(x).join(out, x.__dict__["_path"] + path)


def are_apart(written: Sequence[ShardedTensor], read: Sequence[ShardedTensor] = ()) -> bool:
    """Whether each tensor that is written is all of its memory, and nothing else here shows it."""
    owners = {id(x.__dict__.get("_memory") or x) for x in written}
    if len(owners) < len(written) or any(x.__dict__.get("_path") for x in written):
        return False
    return owners.isdisjoint([id(x.__dict__.get("_memory") or x) for x in read])


def assign(x: ShardedTensor, value: tuple[torch.Tensor, ...], shown: tuple[torch.Tensor, ...], origin: int = 0) -> None:
    """Write through `x`: the owner of its memory has a new value, of this origin, of which `x` shows `shown`."""
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        memory.write(value, origin)
    x._locals, x._origin = shown, origin


def relocate(x: ShardedTensor, form: Form, pieces: tuple[torch.Tensor, ...], origin: int) -> None:
    """Give the owner of a memory another layout of the same shape, and the pieces of its value there.

    Its aliases follow; its views make their pieces again.
    """
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        memory.form = form
        memory.write(pieces, origin)
        memory.members = [m for m in memory.members if m() is not None]
        for member in memory.members:
            alias = member()
            if alias is not None and alias.__dict__.get("_memory") is memory and not alias.__dict__["_path"]:
                alias._form = form
    x._form, x._locals, x._origin = form, pieces, origin
