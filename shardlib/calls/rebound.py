"""What a traced function leaves where it was found: other tensors become results of the program, and are put there.

`self.running = 0.9 * self.running + x` gives an attribute another tensor. While it is traced, that is a value of the
trace: it is taken away again when the function ends, and each call of the program puts its own there. The same holds
for an attribute that gets one of the call's own tensors, and for tuples, lists and dicts of such, made in the call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardlib.calls.leaks import Leak, forgotten, put, put_back, undo
from shardlib.calls.state import CONTAINERS, Facts, Place, State, changed
from shardlib.tensors.form import Form
from shardlib.tensors.tensor import ShardedTensor
from shardlib.tracing.numbers import NotExpressionsError, is_given


@dataclass(frozen=True)
class Result:
    """A value that the program computes: output `at`. Plain, on this device, where a plain tensor was.

    One that is put where a ShardedTensor was lives as that did, in the form `home`.
    """

    at: int
    plain: torch.device | None
    home: Form | None

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return out[self.at] if self.plain is None else out[self.at].to_local().to(self.plain, copy=True)


@dataclass(frozen=True)
class Own:
    """One of the call's own tensors: leaf `at`."""

    at: int

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return leaves[self.at]


@dataclass(frozen=True)
class Rest:
    """Anything else: the same in every call of this program."""

    value: Any

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True)
class Rebound:
    """A place that has another value after each call: who holds it, under which key, and the leaves of the value."""

    owner: Callable[[], Any]
    key: Any
    tree: pytree.TreeSpec
    parts: tuple[Result | Own | Rest, ...]


def rebind(places: Sequence[Rebound], leaves: Sequence[Any], out: Sequence[Any]) -> None:
    """Put the values of one call where they belong."""
    made: dict[Any, Any] = {}  # one tensor stays one, wherever it is put
    values = []
    for place in places:
        for part in place.parts:
            if isinstance(part, Result) and part.at not in made:
                made[part.at] = part.of(leaves, out)
        flat = [made[p.at] if isinstance(p, Result) else p.of(leaves, out) for p in place.parts]
        values.append(pytree.tree_unflatten(flat, place.tree))
    for place, value in zip(places, values, strict=True):
        put(place.owner(), place.key, value)


class Watch:
    """Compares what a function holds before and after it is traced; `look` reads all of it."""

    def __init__(self, look: Callable[[], State]) -> None:
        self.look = look
        self.before = look()

    def undo(self) -> list[Leak]:
        """Take values of the trace away from whoever holds one; returns those that nobody may have kept."""
        return forgotten(self.before, self.look())

    def restore(self) -> None:
        """Give every place back what it had."""
        after = self.look()
        for place in changed(self.before.found or {}, after.found or {}):
            undo(after.owners.get(place[0]), place, self.before)

    def changed(self) -> dict[Place, Facts]:
        """The places that the function itself has changed, with what they hold."""
        return changed(self.before.found or {}, self.look().found or {})

    def rebound(
        self, own: Mapping[int, int], results: list[Any], names: list[str], is_traced: Callable[[Any], bool]
    ) -> list[Rebound]:
        """The places that hold other tensors now; they get back what they had, and new values join `results`.

        `own` are the leaves of the call's tensors by their ids.
        """
        after = self.look()
        known: dict[tuple[int, bool], int] = {(id(x), False): i for i, x in enumerate(results)}
        found = []

        def part(x: Any, old: Any, place: Place) -> Result | Own | Rest:
            if not isinstance(x, Tensor):
                return Rest(x)
            if id(x) in own:
                return Own(own[id(x)])
            plain = isinstance(old, Tensor) and not isinstance(old, ShardedTensor) and not x.requires_grad
            home = None
            if (id(x), plain) not in known:
                known[id(x), plain] = len(results)
                results.append(x)
                names.append(f"{after.text(place)} (kept)")
                home = old._form if isinstance(old, ShardedTensor) and old.shape == x.shape else None
            return Result(known[id(x), plain], old.device if plain else None, home)

        for place, value in after.values.items():
            owner, old = after.owners.get(place[0]), self.before.values.get(place)
            if value is old or place[0] not in self.before.owners or not _may_hold(owner, place[1]):
                continue
            leaves, tree = pytree.tree_flatten(value)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if not tensors or not all(id(x) in own or (is_traced(x) and not _is_new_leaf(x)) for x in tensors):
                continue
            if any(map(is_given, leaves)):
                raise NotExpressionsError
            olds, was = pytree.tree_flatten(old)
            olds = olds if was == tree else [None] * len(leaves)
            parts = tuple(part(x, o, place) for x, o in zip(leaves, olds, strict=True))
            refer = weakref.ref(owner) if owner is self.before.own else functools.partial(_self, owner)
            found.append(Rebound(refer, place[1], tree, parts))
            put_back(owner, place, self.before)
        return found


def _may_hold(owner: Any, key: Any) -> bool:
    """Whether a holder is the same in each call of a program; what a container holds is known by its place alone."""
    if isinstance(owner, dict):
        return isinstance(key, tuple) and "__builtins__" in owner  # variables of a module
    return not isinstance(owner, CONTAINERS + (Tensor,))


def _is_new_leaf(x: Tensor) -> bool:
    """Whether autograd begins at a tensor: whoever it is put to expects a leaf of its own."""
    return x.requires_grad and x.is_leaf


def _self(x: Any) -> Any:
    return x
