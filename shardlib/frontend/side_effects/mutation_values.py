"""Describes the values that each call binds, part by part, and binds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.side_effects.containers import put
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import note_view


@dataclass(frozen=True)
class Result:
    """A value that the program computes: output `at`. It is `plain`, on this device, where a plain tensor was.

    In the place of a ShardedTensor it lives in the form `home`, as that did; `was` is the leaf of that tensor.
    """

    at: int
    plain: torch.device | None
    home: Form | None
    was: int | None = None

    def evaluate(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return out[self.at] if self.plain is None else out[self.at]._locals[0].to(self.plain, copy=True)


@dataclass(frozen=True)
class Own:
    """One of the call's own tensors: leaf `at`."""

    at: int

    def evaluate(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return leaves[self.at]


@dataclass(frozen=True)
class Shown:
    """A view of one of the call's own tensors, leaf `at`. A part of a ShardedTensor is output `value`."""

    at: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    value: int | None

    def evaluate(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
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

    def evaluate(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return self.scalar.value(leaves)


@dataclass(frozen=True)
class Rest:
    """Any other value: the same in every call of this program."""

    value: Any

    def evaluate(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return self.value


Part = Result | Own | Shown | Computed | Rest


@dataclass(frozen=True)
class Leaf:
    """In the key of a dict's item by a tensor: one of the call's own, leaf `at`."""

    at: int


@dataclass(frozen=True)
class Mutation:
    """A place that has another value after each call: its holder, the key, and the leaves of the value.

    `among` is the dict of a module that has the key. `same` is the earlier mutation that binds the same object.
    """

    owner: Callable[[], Any]
    key: Any
    among: str
    tree: pytree.TreeSpec
    parts: tuple[Part, ...]
    same: int = -1


def rebind(places: Sequence[Mutation], leaves: Sequence[Any], out: Sequence[Any]) -> None:
    """Binds the values of one call to their places."""
    values_of_parts: dict[Any, Any] = {}  # one tensor stays one, wherever it is put
    values: list[Any] = []
    for place in places:
        for part in place.parts:
            if isinstance(part, Result | Shown) and part not in values_of_parts:
                values_of_parts[part] = part.evaluate(leaves, out)
        flat = [values_of_parts[p] if isinstance(p, Result | Shown) else p.evaluate(leaves, out) for p in place.parts]
        values.append(values[place.same] if place.same >= 0 else pytree.tree_unflatten(flat, place.tree))
    for place, value in zip(places, values, strict=True):
        by = place.key[1] if isinstance(place.key, tuple) else None
        key = (place.key[0], leaves[by.at]) if isinstance(by, Leaf) else place.key
        put(place.owner(), key, value, place.among)


def itself(x: Any) -> Any:
    """Returns its argument: `partial(itself, x)` is called like a weak reference, and keeps the object."""
    return x
