"""Makes the values that a function binds results of its program; compares the values before and after a trace."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardlib.core.call_scalar import is_same_number
from shardlib.core.torch_internals.torch_private import memory_of
from shardlib.frontend.guards.mutable_places import NUMBERS, SHORT, Item, Place
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.frontend.guards.value_kinds import OPAQUE, PLAIN, numpy_kind
from shardlib.frontend.results import refuse_attributes
from shardlib.frontend.side_effects.leaks import holds_trace
from shardlib.frontend.side_effects.mutation_values import Computed, Own, Part, Rest, Result, Shown
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form


class MutationOutputs:
    """The results of a trace, and the values that join them; the arguments are those of `MutationTracker.rebound`."""

    def __init__(
        self,
        before: Snapshot,
        after: Snapshot,
        own: Mapping[int, int],
        memory: Mapping[int, tuple[int, Any, Tensor]],
        results: list[Any],
        names: list[str],
        is_traced: Callable[[Any], bool],
    ) -> None:
        self._after, self._own, self._memory, self._is_traced = after, own, memory, is_traced
        self._results, self._names = results, names
        self._known: dict[tuple[int, bool], int] = {(id(x), False): i for i, x in enumerate(results)}
        self._mine = {id(x) for x in before.kept} | before.owners.keys()

    def part(self, x: Any, old: Any, place: Place, parameter: Tensor | None) -> Part | None:
        """Returns the value that a call puts in place of x, where `old` was; None if no program can make it again."""
        if is_traced_number(x):
            return Computed(x.scalar)
        if not isinstance(x, Tensor):
            is_own = id(x) in self._mine or numpy_kind(x) == "generic"
            return Rest(x) if is_own or (is_value(x) and not holds_trace(getattr(x, "__func__", x), 1)) else None
        if id(x) in self._own:
            return Own(self._own[id(x)])
        if not self._is_traced(x) or (x.requires_grad and x.is_leaf):  # its holder expects a leaf of its own
            return None
        refuse_attributes([(self._after.text(place), None, x)])
        held = self._memory.get(memory_of(x.untyped_storage()))
        if held is not None and _is_plain_view(x, held[2]):
            return self._shown(x, place, *held)
        device, home = _home(x, old if isinstance(old, Tensor) else parameter)
        if not isinstance(old, Tensor) and parameter is not None and not x.shape:
            device, home = x.device, None  # a counter, as an optimizer makes it
        at, is_new = self._join(x, place, is_plain=device is not None)
        return Result(at, device, home if is_new else None, self._own.get(id(old)))

    def _shown(self, x: Tensor, place: Place, leaf: int, tensor: Any, stand_in: Tensor) -> Shown:
        where = tuple(x.shape), x.stride(), int(x.storage_offset())
        is_piece = type(tensor) is ShardedTensor and where != (tuple(stand_in.shape), stand_in.stride(), 0)
        return Shown(leaf, *where, self._join(x, place)[0] if is_piece else None)

    def _join(self, x: Tensor, place: Place, *, is_plain: bool = False) -> tuple[int, bool]:
        """Returns the position of x among the results, and whether it is new there."""
        count = len(self._results)
        at = self._known.setdefault((id(x), is_plain), count)
        if at == count:
            self._results.append(x)
            self._names.append(f"{self._after.text(place)} (kept)")
        return at, at == count


def _is_plain_view(x: Tensor, whole: Tensor) -> bool:
    """Returns whether sizes and strides describe a view, which has no history."""
    return x.dtype == whole.dtype and not (x.requires_grad or x.is_conj() or x.is_neg())


def _home(x: Tensor, like: Any) -> tuple[torch.device | None, Form | None]:
    """Returns where a result is to live, like another tensor: on a device, or in the form of a ShardedTensor."""
    if isinstance(like, ShardedTensor):
        return None, like._form if like.shape == x.shape else None
    return (like.device if isinstance(like, Tensor) and not x.requires_grad else None), None


def is_value(x: Any) -> bool:
    """Returns whether equal objects can stand for each other: numbers, texts, enums, functions, classes, modules."""
    return type(x) in PLAIN or isinstance(x, (enum.Enum, *OPAQUE))


def changed_numbers(place: Place, old: Any, value: Any) -> Iterator[Place]:
    """Yields the places of the numbers that differ: this one, or those in a tuple or list."""
    if type(old) in NUMBERS and (is_traced_number(value) or type(value) in NUMBERS):
        if not is_same(old, value):
            yield place
    elif type(old) is type(value) and type(old) in (tuple, list) and len(old) == len(value) <= SHORT:
        for i, (x, y) in enumerate(zip(old, value, strict=True)):
            if type(x) in NUMBERS or type(x) is type(old) is tuple:
                yield from changed_numbers((place[0], Item(place[1], i)), x, y)


def is_same(a: Any, b: Any) -> bool:
    """Returns whether two values are one object or equal plain values."""
    return a is b or (type(a) in PLAIN and is_same_number(a, b))
