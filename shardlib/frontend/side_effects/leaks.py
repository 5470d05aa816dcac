"""Finds values of a trace that a function keeps outside, takes them away, and refuses them."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.errors import NoProgramError, SideEffectError
from shardlib.core.torch_internals.torch_private import FakeTensor
from shardlib.frontend.guards.children import children
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.frontend.guards.value_kinds import BUILTIN, PLAIN
from shardlib.frontend.side_effects.containers import put_back, refill
from shardlib.tensor.sharded_tensor import typeof

if TYPE_CHECKING:
    from shardlib.frontend.guards.mutable_places import Place
    from shardlib.frontend.side_effects.snapshot import Snapshot


@dataclass(frozen=True)
class Leak:
    """A value of a trace outside: its holder, the place, the name of the place, and the value."""

    owner: Any
    place: Place
    name: str
    value: torch.Tensor

    @property
    def remedy(self) -> str:
        """Returns advice for this holder."""
        if isinstance(self.owner, list):
            return "bind a new list to an attribute, self.history = self.history + [x]; or write to a tensor, h[i] = x"
        if isinstance(self.owner, dict) and "__builtins__" not in self.owner:
            return "fill the container before the first call; or keep the tensor in an attribute, self.mask = mask"
        if isinstance(self.value, torch.nn.Parameter):
            return "write to the parameter that is there: with torch.no_grad(): p.copy_(new)"
        return "return the tensor, and keep it outside; or register it as a buffer and write to it in place"

    @property
    def is_cached(self) -> bool:
        """Returns whether a `cached_property` of its holder computes the value again when it is missing."""
        key = self.place[1]
        attribute = inspect.getattr_static(type(self.owner), key, None) if isinstance(key, str) else None
        return isinstance(attribute, functools.cached_property)


def forgotten(before: Snapshot, after: Snapshot) -> list[Leak]:
    """Gives every holder of a value of the trace what it held before.

    Returns the values that may not be kept: all but those in a `functools.cache` or a `cached_property`.
    """
    misses = {id(cache): count for cache, count in before.caches}
    filled = [cache for cache, count in after.caches if misses.get(id(cache)) != count and _keeps_trace(cache)]
    for cache in filled:
        cache.cache_clear()  # it counts from 0 again, and may come to what it was
    before.caches = [(cache, count) for cache, count in before.caches if all(cache is not x for x in filled)]
    own = {id(x) for x in before.tensors}
    leaks = [leak for leak in after.leaks if id(leak.value) not in own]
    for leak in leaks:
        if id(leak.owner) in before.copies:
            refill(leak.owner, before.copies[id(leak.owner)])
        else:
            put_back(leak.owner, leak.place, before)
    return [leak for leak in leaks if not leak.is_cached]


def _keeps_trace(cache: Any) -> bool:
    """Returns whether a `functools.cache` keeps a tensor or a number of a trace."""
    held, seen = [cache], 0
    while held and seen < 10_000:
        x = held.pop()
        seen += 1
        if isinstance(x, FakeTensor) or is_traced_number(x):
            return True
        if x is cache or isinstance(x, list | tuple | dict) or type(x).__name__ == "_lru_list_elem":
            held += gc.get_referents(x)
    return seen >= 10_000


def holds_trace(x: Any, levels: int = 4) -> bool:
    """Returns whether `x` is or holds a value of a trace; containers are no levels."""
    if isinstance(x, torch.Tensor) or is_traced_number(x):
        return isinstance(x, FakeTensor) or is_traced_number(x)
    left = levels - (type(x) not in BUILTIN)
    return left >= 0 and type(x) not in PLAIN and any(holds_trace(y, left) for *_, y in children(x))


def refuse_leaks(name: str, leaks: Sequence[Leak]) -> None:
    """Raises `SideEffectError` for values of a trace that a function keeps."""
    if leaks:
        raise SideEffectError(
            f"{name} keeps tensors that it computes while it is traced",
            [f"{leak.name} has become a value of the trace, {typeof(leak.value)}" for leak in leaks],
            rule="a jitted function runs once, on shapes: its tensors have no values, and leave it only as results",
            remedy="; ".join(dict.fromkeys(leak.remedy for leak in leaks)),
        )


def refuse_late(name: str, places: Sequence[str]) -> None:
    """Raises `NoProgramError` for changes by a backward pass, which may run often or never after one call."""
    if places:
        raise NoProgramError(
            f"{name} changes what is no tensor when its results are differentiated, in a hook or a custom gradient",
            places,
            rule="a jitted function runs once, its backward pass with it: what that changes is no result of a call",
            remedy="call backward() inside the jitted function; or, where no gradient is wanted, call it under no_grad",
        )
