"""Schedules: Python code that works out numbers from numbers, run in each call in front of its program.

A schedule decides by how often it was stepped, and calls `math.cos`: each of its steps would be another program. So a
trace steps a copy of the schedule, which knows of its optimizer nothing but settings, and each call does so again with
its own numbers. What comes out are numbers of the call like others.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardlib.core.call_scalar import Scalar, is_same_number
from shardlib.frontend.guards.mutable_places import NUMBERS


@dataclass(frozen=True)
class Hosted:
    """A step of a schedule: `run` on copies, `of` all that it changes.

    `given` are the numbers in these, in order: scalars of the call, or the same in each. Afterwards they are `made`,
    but for those at `free`: these are the call's own, leaves from `first` on.
    """

    run: Callable[[], None]
    of: Any
    given: tuple[Any, ...]
    made: tuple[Any, ...]
    facts: tuple[Any, ...]
    free: tuple[int, ...]
    first: int
    lock: Any = field(default_factory=threading.Lock, compare=False)

    def __call__(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The call's own numbers; None where anything else is not what it was in the trace."""
        with self.lock:
            filled(self.of, iter([x.value(leaves) if isinstance(x, Scalar) else x for x in self.given]))
            self.run()
            found = Contents.of(self.of)
        if found.facts != self.facts:
            return None
        own = set(self.free)
        for i, (a, b) in enumerate(zip(found.numbers, self.made, strict=True)):
            if i not in own and not is_same_number(a, b):
                return None
        return [found.numbers[i] for i in self.free]

    @property
    def sources(self) -> set[int]:
        """The leaves from which it works out its own."""
        return {leaf for x in self.given if isinstance(x, Scalar) for leaf in x.leaves()}


Copies = dict[int, tuple[Any, Any]]  # an object and its copy, by the id of the object


def copied(x: Any, number: Callable[[Any], Any], copies: Copies) -> Any:
    """`x` with copies of what a schedule may change: schedules, settings of optimizers, containers; the rest is shared.

    `number` says what stands for what is none of these.
    """
    if id(x) in copies:
        return copies[id(x)][1]
    if type(x) is tuple:
        return _as_it_is(x, tuple([copied(y, number, copies) for y in x]))
    if (found := inside(x)) is None:
        return number(x)
    new = object.__new__(type(x)) if isinstance(x, _OBJECTS) else copy.copy(x)
    copies[id(x)] = x, new
    if isinstance(x, _OBJECTS):
        new.__dict__.update(vars(x))
    held, keys = found
    for k in keys:
        _space(new)[k] = copied(held[k], number, copies)
    return new


def inside(x: Any) -> tuple[Any, list[Any]] | None:
    """Where an object has what a schedule may change, and under which keys; None for what it does not."""
    if isinstance(x, Optimizer):
        return vars(x), ["param_groups"]
    if isinstance(x, LRScheduler):
        return vars(x), list(vars(x))
    if type(x) is list:
        return x, list(range(len(x)))
    return (x, [k for k in x if k != "params"]) if type(x) in _DICTS else None


def is_of_numbers(x: Any) -> bool:
    """Whether it is a list of numbers, a value that schedules do not change, but replace."""
    return type(x) is list and all(y.__class__ in NUMBERS for y in x)


@dataclass
class Contents:
    """What is in such an object: its numbers, in order, and everything else; `others` are what is of no known kind.

    `own` says of each number whether a schedule has it, itself or in a list, or a list or dict that is none of
    those `known`, by id.
    """

    numbers: list[Any] = field(default_factory=list)
    facts: tuple[Any, ...] = ()
    own: list[bool] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    @staticmethod
    def of(x: Any, known: Mapping[int, Any] | None = None) -> Contents:
        """Gone through once."""
        found, facts, seen = Contents(), list[Any](), dict[int, int]()

        def read(x: Any, own: bool) -> None:
            if x.__class__ in NUMBERS:
                found.numbers.append(x)
                found.own.append(own)
                facts.append(x.__class__)
            elif type(x) is tuple:
                facts.append((tuple, len(x)))
                for y in x:
                    read(y, own)
            elif is_of_numbers(x):
                facts.append((list, len(x)))
                for y in x:
                    read(y, own or (known is not None and id(x) not in known))
            elif type(x) in _PLAIN:
                facts.append(x)
            elif (held := inside(x)) is None:
                found.others.append(x)
                facts.append(id(x))
            elif id(x) in seen:
                facts.append(("again", seen[id(x)]))
            else:
                seen[id(x)] = len(seen)
                facts.append((type(x), tuple(held[1])))
                own = isinstance(x, LRScheduler) or (known is not None and id(x) not in known)
                for k in held[1]:
                    read(held[0][k], own)

        read(x, False)
        found.facts = tuple(facts)
        return found


def filled(x: Any, numbers: Iterator[Any], like: dict[int, Any] | None = None) -> Any:
    """`x` with other numbers, in their order: where it is; or in the objects that `like` has for what is in it, by id.

    A list or dict for which it has none is a new one there. No two places share a list of numbers, which the next step
    replaces: in one of them.
    """
    seen = set[int]()

    def fill(x: Any) -> Any:
        if x.__class__ in NUMBERS:
            return next(numbers)
        if type(x) is tuple:
            return _as_it_is(x, tuple([fill(y) for y in x]))
        if is_of_numbers(x):
            new = [next(numbers) for _ in x]
            if like is None or id(x) in seen or id(x) not in like:
                return new
            seen.add(id(x))
            like[id(x)][:] = new
            return like[id(x)]
        if (found := inside(x)) is None:
            return x
        into = x if like is None else like.setdefault(id(x), x if id(x) in like else copy.copy(x))
        if id(x) not in seen:
            seen.add(id(x))
            held, keys = found
            for k in keys:
                _space(into)[k] = fill(held[k])
        return into

    return fill(x)


def _space(x: Any) -> Any:
    return vars(x) if isinstance(x, _OBJECTS) else x


def _as_it_is(x: tuple[Any, ...], y: tuple[Any, ...]) -> tuple[Any, ...]:
    return x if all(a is b for a, b in zip(x, y, strict=True)) else y


_OBJECTS = (LRScheduler, Optimizer)
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_PLAIN = (bool, str, type(None))
