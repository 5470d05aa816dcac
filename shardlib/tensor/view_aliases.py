"""Tracks which ShardedTensors share memory, so that all of them see a write through one, as on one device.

Devices and tensors may share shards, since a write computes new shards instead of changing shared ones. So a tensor
with views has a `Memory`: the shards of the owner, and all tensors that show the memory, each with the path of views
that leads to it from the owner. A write through any of them gives the owner new shards. The other tensors drop their
shards, and restore them from the owner's when they are next read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.aten.op_traits import has_trait
from shardlib.tensor.host_offload import OFFLOAD_LOCK, OFFLOADED, copy_to_device, stored_shards
from shardlib.tensor.tensor_meta import Form

if TYPE_CHECKING:
    from shardlib.tensor.sharded_tensor import ShardedTensor

ViewStep = tuple[
    Any, tuple[Any, ...], tuple[tuple[str, Any], ...], int | None
]  # op, args after the first, kwargs, item
ViewPath = tuple[ViewStep, ...]


class Memory:
    """The memory that a tensor, its aliases and its views share; `away` if the shards are in the host's memory."""

    __slots__ = ("_shards", "away", "form", "limit", "members")

    def __init__(self, form: Form, locals_: tuple[torch.Tensor, ...], *, away: bool = False) -> None:
        self.form, self._shards, self.away = form, locals_, away
        self.members: list[weakref.ref[ShardedTensor]] = []
        self.limit = 16

    @property
    def locals(self) -> tuple[torch.Tensor, ...]:
        """The owner's shards; brings them back to the devices."""
        with OFFLOAD_LOCK:
            if self.away:
                self._shards, self.away = copy_to_device(self._shards), False
            return self._shards

    def join(self, x: ShardedTensor, path: ViewPath) -> None:
        """Adds a tensor that shows the view of the owner at `path`."""
        if len(self.members) >= self.limit:
            self.members = [m for m in self.members if m() is not None]
            self.limit = 2 * len(self.members) + 16
        self.members.append(weakref.ref(x))
        attributes = x.__dict__
        attributes["_memory"], attributes["_path"] = self, path

    def write(self, locals_: tuple[torch.Tensor, ...], origin: int) -> None:
        """Sets the owner's new shards, of this origin; all members drop theirs."""
        self._shards, self.away = locals_, False
        for x in self.forget():
            x._origin = origin

    def forget(self, but: ShardedTensor | None = None) -> list[ShardedTensor]:
        """Makes all members, except `but`, restore their shards when they are next read; returns these members."""
        members = [x for member in self.members if (x := member()) is not None and x is not but]
        members = [x for x in members if x.__dict__.get("_memory") is self]
        for x in members:
            x.__dict__.pop("_locals", None)
            x.__dict__.pop(OFFLOADED, None)
        return members


def memory_of(x: ShardedTensor) -> Memory:
    """Returns the memory that `x` shows, a new one for a tensor without views."""
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is None:
        memory = Memory(x._form, stored_shards(x), away="_locals" not in x.__dict__)
        memory.join(x, ())
    return memory


def pending_marks(x: torch.Tensor) -> set[Any]:
    """Returns the bits that torch would set on `x`, as the ops that flip them: `_conj`, `_neg_view`.

    A ShardedTensor has no bits; its view path holds these ops.
    """
    marks: set[Any] = set()
    for op, *_ in x.__dict__.get("_path", ()):
        if has_trait(op, "sets_lazy_bit"):
            marks ^= {op}
    return marks


_AS_IS = nullcontext()


def match_inference_mode(x: torch.Tensor) -> AbstractContextManager[object]:
    """Returns a context for a view of `x`: under `inference_mode`, a view of a normal tensor is normal, too."""
    if torch.is_inference_mode_enabled() and not x.is_inference():
        return torch.inference_mode(False)
    return _AS_IS


def note_view(x: ShardedTensor, out: ShardedTensor, path: ViewPath) -> None:
    """Records that `out` is the result of the views of `path` on `x`."""
    memory_of(x).join(out, x.__dict__["_path"] + path)


def have_separate_memory(written: Sequence[ShardedTensor], read: Sequence[ShardedTensor] = ()) -> bool:
    """True if each written tensor owns its memory, and no other tensor in the arguments shares it."""
    owners = {id(x.__dict__.get("_memory") or x) for x in written}
    if len(owners) < len(written) or any(x.__dict__.get("_path") for x in written):
        return False
    return owners.isdisjoint([id(x.__dict__.get("_memory") or x) for x in read])


def assign_shards(
    x: ShardedTensor, value: tuple[torch.Tensor, ...], shown: tuple[torch.Tensor, ...], origin: int = 0
) -> None:
    """Writes through `x`: its memory's owner gets the shards `value`, of this origin, and `x` itself `shown`."""
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        memory.write(value, origin)
    x._locals, x._origin = shown, origin


def relocate(x: ShardedTensor, form: Form, shards: tuple[torch.Tensor, ...], origin: int) -> None:
    """Gives the owner of a memory another layout of the same shape, and its shards there.

    Its aliases follow; its views restore their shards.
    """
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        memory.form = form
        memory.write(shards, origin)
        memory.members = [m for m in memory.members if m() is not None]
        for member in memory.members:
            alias = member()
            if alias is not None and alias.__dict__.get("_memory") is memory and not alias.__dict__["_path"]:
                alias._form = form
    x._form, x._locals, x._origin = form, shards, origin
