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

from shardlib.calls.changing import Changing, Place
from shardlib.calls.flat import same_number
from shardlib.calls.kinds import CONTAINERS, PLAIN
from shardlib.calls.leaks import GONE, Leak, forgotten, put, put_back, undo
from shardlib.calls.snapshot import Snapshot
from shardlib.calls.state import LENGTH, NUMBERS, State
from shardlib.errors import ShardingError
from shardlib.scalar import Scalar
from shardlib.tensors.form import Form
from shardlib.tensors.tensor import ShardedTensor
from shardlib.tracing.numbers import Numbers, is_given


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
class Computed:
    """A number, computed from those of the call."""

    scalar: Scalar

    def of(self, leaves: Sequence[Any], out: Sequence[Any]) -> Any:
        return self.scalar.value(leaves)


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
    parts: tuple[Result | Own | Computed | Rest, ...]


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

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self.look = look
        self.before = look()
        self.numbers: set[Place] = set()  # that the function changes; and the containers in which it changes a value
        self.containers: dict[int, Any] = {}
        self._leaf: dict[Place, int] = {}

    def give(self, numbers: Numbers, first: int) -> None:
        """While the function is traced, the numbers that it changes are inputs: leaves from `first` on."""
        for i, (place, (value, at)) in enumerate(self.before.numbers.items(), first):
            self._leaf[place] = i
            put(self.before.owners[place[0]], place[1], numbers.give(i, self.before.name(at), value))

    def take_back(self) -> None:
        """Give the holders of such numbers what they had."""
        for place in self.before.numbers:
            put_back(self.before.owners[place[0]], place, self.before)

    def undo(self) -> list[Leak]:
        """Take values of the trace away from whoever holds one; returns those that nobody may have kept."""
        self.take_back()
        return forgotten(self.before, self.look())

    def restore(self) -> None:
        """Give every place back what it had, as if the function had not run."""
        self.undo()
        before, after = self.before, self.look()
        for place in before.values | after.values:
            had, has = before.values.get(place, GONE), after.values.get(place, GONE)
            if place[0] in before.owners and place[0] in after.owners and not _is_same(had, has):
                undo(before.owners[place[0]], place, before)

    def learn(self, changing: Changing) -> bool:
        """Note what the function changes; whether that was known: otherwise it is to be traced again, as numbers that
        it changes are inputs."""
        if is_new := not self.numbers <= changing.numbers:
            self.restore()
        changing.add(self.look().changed(self.before), self.numbers, self.containers)
        return not is_new

    def is_moved(self, name: str, before: State, after: State) -> bool:
        """Whether the function leaves the tensors that a call finds in another order.

        Refuses one that takes some of them away, or adds some, in a way that no call can repeat.
        """
        was, now = ({id(x): at for x, at in zip(s.tensors, s.names, strict=True)} for s in (before, after))
        if was.keys() != now.keys():
            self.restore()
            raise ShardingError(
                f"{name} moves tensors that it finds in objects or containers",
                [f"{at} is gone" for i, at in was.items() if i not in now]
                + [f"{at} is new" for i, at in now.items() if i not in was],
                rule="a jitted function runs once, and is then a program of the tensors that it found",
                remedy="change attributes and items of dicts (x.h = None), not the length of lists of tensors; or pass "
                "them as arguments",
            )
        return list(was) != list(now)

    def rebound(
        self, own: Mapping[int, int], results: list[Any], names: list[str], is_traced: Callable[[Any], bool]
    ) -> list[Rebound]:
        """The places that hold other tensors or plain values now; they get back what they had.

        New tensors join `results`; `own` are the leaves of the call's tensors by their ids.
        """
        after = self.look()
        self.numbers, self.containers = set(), {}
        known: dict[tuple[int, bool], int] = {(id(x), False): i for i, x in enumerate(results)}
        found = []

        def part(x: Any, old: Any, place: Place) -> Result | Own | Computed | Rest:
            if is_given(x):
                return Computed(x.scalar)
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

        for place in self.before.values | after.values:
            owner, old = self.before.owners.get(place[0]), self.before.values.get(place, GONE)
            value = after.values.get(place, GONE)
            if value is old or not all(place[0] in world.owners for world in (self.before, after)):
                continue
            if (changed_ := self._plain(owner, place, value, old)) is not None:
                found.append(changed_)
                continue
            if not _may_hold(owner, place[1]):
                continue
            leaves, tree = pytree.tree_flatten(value)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if not all(id(x) in own or (is_traced(x) and not _is_new_leaf(x)) for x in tensors):
                continue
            if not tensors and not any(map(is_given, leaves)):
                continue
            olds, was = pytree.tree_flatten(old)
            olds = olds if was == tree else [None] * len(leaves)
            parts = tuple(part(x, o, place) for x, o in zip(leaves, olds, strict=True))
            found.append(self._rebound(owner, place, tree, parts))
        self.take_back()
        return found

    def _plain(self, owner: Any, place: Place, value: Any, old: Any) -> Rebound | None:
        """A place that holds another plain value now: every call changes it, from what is part of the call's key.

        Of containers, those that stay as long as they were; what is appended stays there, as the trace left it.
        """
        was_one, is_one = (type(x) in PLAIN or x is GONE for x in (old, value))
        if not (was_one or isinstance(old, Tensor)) or not (is_one or is_given(value)) or place[1] == LENGTH:
            return None
        if isinstance(owner, CONTAINERS + (Tensor,)):
            if not isinstance(owner, dict) and not (isinstance(owner, list) and old is not GONE and value is not GONE):
                return None
            if not (isinstance(owner, dict) and "__builtins__" in owner):
                self.containers[id(owner)] = owner
        if is_given(value):
            if value.scalar.op is None and value.scalar.leaf == self._leaf.get(place):
                return None
            part: Computed | Rest = Computed(value.scalar)
        elif _is_same(value, old):
            return None
        else:
            part = Rest(value)
        if type(old) in NUMBERS and type(value) in NUMBERS:
            self.numbers.add(place)
        return self._rebound(owner, place, _LEAF, (part,))

    def _rebound(self, owner: Any, place: Place, tree: Any, parts: tuple[Any, ...]) -> Rebound:
        put_back(owner, place, self.before)
        refer = weakref.ref(owner) if owner is self.before.own else functools.partial(_self, owner)
        return Rebound(refer, place[1], tree, parts)


def _may_hold(owner: Any, key: Any) -> bool:
    """Whether a holder is the same in each call of a program; what a container holds is known by its place alone."""
    if isinstance(owner, dict):
        return isinstance(key, tuple) and "__builtins__" in owner  # variables of a module
    return not isinstance(owner, CONTAINERS + (Tensor,))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) in PLAIN and same_number(a, b))


def _is_new_leaf(x: Tensor) -> bool:
    """Whether autograd begins at a tensor: whoever it is put to expects a leaf of its own."""
    return x.requires_grad and x.is_leaf


def _self(x: Any) -> Any:
    return x


_LEAF = pytree.tree_structure(0)
