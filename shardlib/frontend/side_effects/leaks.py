"""Values of a trace that a function keeps outside: found, taken away again, refused."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.errors import KeptError, NoProgramError
from shardlib.core.torch_private import FakeTensor
from shardlib.frontend.guards.number_inputs import is_given
from shardlib.frontend.side_effects.containers import put_back, refill
from shardlib.tensor.sharded_tensor import typeof

if TYPE_CHECKING:
    from shardlib.frontend.side_effects.mutable_places import Place
    from shardlib.frontend.side_effects.snapshot import Snapshot


@dataclass(frozen=True)
class Leak:
    """A value of a trace that was found outside: who holds it, where, what that is called, and the value."""

    owner: Any
    place: Place
    name: str
    value: torch.Tensor

    @property
    def remedy(self) -> str:
        """What to do instead."""
        if isinstance(self.owner, list):
            return "bind a new list to an attribute, self.history = self.history + [x]; or write to a tensor, h[i] = x"
        if isinstance(self.owner, dict) and "__builtins__" not in self.owner:
            return "fill the container before the first call; or keep the tensor in an attribute, self.mask = mask"
        if isinstance(self.value, torch.nn.Parameter):
            return "write to the parameter that is there: with torch.no_grad(): p.copy_(new)"
        return "return the tensor, and keep it outside; or register it as a buffer and write to it in place"

    @property
    def is_cached(self) -> bool:
        """Whether its holder computes it again when it is not there."""
        return is_cached(self.owner, self.place[1])


def is_cached(owner: Any, key: Any) -> bool:
    """Whether a holder's attribute is a `cached_property`."""
    return isinstance(key, str) and isinstance(
        inspect.getattr_static(type(owner), key, None), functools.cached_property
    )


def forgotten(before: Snapshot, after: Snapshot) -> list[Leak]:
    """Values of a trace are none of this world: whoever holds one gets back what he had.

    Returns those that nobody may have kept: not in a `functools.cache` or a `cached_property`.
    """
    misses = {id(cache): count for cache, count in before.caches}
    filled = [cache for cache, count in after.caches if misses.get(id(cache)) != count and _holds_trace(cache)]
    for cache in filled:
        cache.cache_clear()  # it counts from 0 again, and may come to what it was
    before.caches = [(cache, count) for cache, count in before.caches if all(cache is not x for x in filled)]
    known = {id(x) for x in before.tensors}
    leaks = [leak for leak in after.leaks if id(leak.value) not in known]
    for leak in leaks:
        if id(leak.owner) in before.copies:
            refill(leak.owner, before.copies[id(leak.owner)])
        else:
            put_back(leak.owner, leak.place, before)
    return [leak for leak in leaks if not leak.is_cached]


def _holds_trace(cache: Any) -> bool:
    """Whether some result that a `functools.cache` keeps is of a trace: a tensor, or a number."""
    held, seen = [cache], 0
    while held and seen < 10_000:
        x = held.pop()
        seen += 1
        if isinstance(x, FakeTensor) or is_given(x):
            return True
        if x is cache or isinstance(x, list | tuple | dict) or type(x).__name__ == "_lru_list_elem":
            held += gc.get_referents(x)
    return seen >= 10_000


def refuse_leaks(name: str, leaks: Sequence[Leak]) -> None:
    """Refuse values of a trace that a function keeps."""
    if leaks:
        raise KeptError(
            f"{name} keeps tensors that it computes while it is traced",
            [f"{leak.name} has become a value of the trace, {typeof(leak.value)}" for leak in leaks],
            rule="a jitted function runs once, on shapes: its tensors have no values, and leave it only as results",
            remedy="; ".join(dict.fromkeys(leak.remedy for leak in leaks)),
        )


def refuse_late(name: str, places: Sequence[str]) -> None:
    """Refuse what a backward pass changes: a program is traced with its call, and may go back often, or never."""
    if places:
        raise NoProgramError(
            f"{name} changes what is no tensor when its results are differentiated, in a hook or a custom gradient",
            places,
            rule="a jitted function runs once, its backward pass with it: what that changes is no result of a call",
            remedy="call backward() inside the jitted function; or, where no gradient is wanted, call it under no_grad",
        )
