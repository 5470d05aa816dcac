"""What each call puts where the function left another value: the parts of that value, and the places."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_private import pytree
from shardlib.frontend.side_effects.containers import put
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import note_view


@dataclass(frozen=True)
class Result:
    """A value that the program computes: output `at`. Plain, on this device, where a plain tensor was.

    One that is put where a ShardedTensor was lives as that did, in the form `home`; `was` is that, by its leaf, if it
    is one of the call.
    """

    at: int
    plain: torch.device | None
    home: Form | None
    was: int | None = None

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return out[self.at] if self.plain is None else out[self.at]._locals[0].to(self.plain, copy=True)


@dataclass(frozen=True)
class Own:
    """One of the call's own tensors: leaf `at`."""

    at: int

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return leaves[self.at]


@dataclass(frozen=True)
class Shown:
    """A view of one of the call's own tensors, leaf `at`: where in its memory. Of a ShardedTensor it is output `value`,
    unless it is all of it."""

    at: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    value: int | None

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        whole = leaves[self.at].detach()
        where = self.size, self.stride, self.offset + whole.storage_offset()
        if type(whole) is not ShardedTensor:
            return whole.as_strided(*where)
        if self.value is None:
            return whole
        note_view(whole, out[self.value], ((torch.ops.aten.as_strided.default, where, (), None),))
        return out[self.value]


@dataclass(frozen=True)
class Computed:
    """A number, computed from those of the call."""

    scalar: Scalar

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return self.scalar.value(leaves)


@dataclass(frozen=True)
class Rest:
    """Anything else that is a value: the same in every call of this program."""

    value: Any

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return copy.copy(self.value) if isinstance(self.value, set) else self.value


Part = Result | Own | Shown | Computed | Rest


@dataclass(frozen=True)
class Leaf:
    """In the key of a dict's item by a tensor: one of the call's own, leaf `at`."""

    at: int


@dataclass(frozen=True)
class Mutation:
    """A place that has another value after each call: who holds it, under which key (of a module's dict `among`), and
    the leaves of the value; or the place, by number, whose value is this one, too."""

    owner: Callable[[], Any]
    key: Any
    among: str
    tree: pytree.TreeSpec
    parts: tuple[Part, ...]
    same: int = -1


def rebind(places: Sequence[Mutation], leaves: Sequence[Any], out: Sequence[Any]) -> None:
    """Put the values of one call where they belong."""
    made: dict[Any, Any] = {}  # one tensor stays one, wherever it is put
    values: list[Any] = []
    for place in places:
        for part in place.parts:
            if isinstance(part, Result | Shown) and part not in made:
                made[part] = part.of(leaves, out)
        flat = [made[p] if isinstance(p, Result | Shown) else p.of(leaves, out) for p in place.parts]
        values.append(values[place.same] if place.same >= 0 else pytree.tree_unflatten(flat, place.tree))
    for place, value in zip(places, values, strict=True):
        by = place.key[1] if isinstance(place.key, tuple) else None
        key = (place.key[0], leaves[by.at]) if isinstance(by, Leaf) else place.key
        put(place.owner(), key, value, place.among)


def itself(x: Any) -> Any:
    """What refers to an object, with it: `partial(itself, x)` is as a weak reference, and keeps it."""
    return x
