"""Steps of learning-rate schedules: Python code on numbers that each call runs before its program.

A schedule branches on its step count and calls `math.cos`, so each step would need a program of its own. Instead, a
trace steps a copy of the schedule, which has nothing of its optimizer but the settings. Each call repeats this with its
own numbers, and the numbers that change become inputs of the program.
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
class HostStep:
    """A step of a schedule: `run` steps the copies in `objects`.

    `inputs` are the numbers in `objects` before the step, in order: scalars of the call, or constants. `results` are
    the numbers after it. Those at the positions `varying` differ between calls: they are leaves from `first` on.
    """

    run: Callable[[], None]
    objects: Any
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]
    facts: tuple[Any, ...]
    varying: tuple[int, ...]
    first: int
    lock: Any = field(default_factory=threading.Lock, compare=False)

    def __call__(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Returns the call's varying numbers; None if anything else differs from the trace."""
        with self.lock:
            fill_numbers(self.objects, iter([x.value(leaves) if isinstance(x, Scalar) else x for x in self.inputs]))
            self.run()
            contents = ScheduleContents.read(self.objects)
        if contents.facts != self.facts:
            return None
        varying = set(self.varying)
        for i, (a, b) in enumerate(zip(contents.numbers, self.results, strict=True)):
            if i not in varying and not is_same_number(a, b):
                return None
        return [contents.numbers[i] for i in self.varying]

    @property
    def sources(self) -> set[int]:
        """Returns the leaves that the step reads."""
        return {leaf for x in self.inputs if isinstance(x, Scalar) for leaf in x.leaves()}


Copies = dict[int, tuple[Any, Any]]  # an object and its copy, by the id of the object


def copy_schedules(x: Any, number: Callable[[Any], Any], copies: Copies) -> Any:
    """Copies the schedules, optimizer settings and containers in `x`; everything else is shared.

    `number` replaces each value that is none of these.
    """
    if id(x) in copies:
        return copies[id(x)][1]
    if type(x) is tuple:
        return _unless_same(x, tuple([copy_schedules(y, number, copies) for y in x]))
    if (content := mutable_content(x)) is None:
        return number(x)
    new = object.__new__(type(x)) if isinstance(x, _OBJECTS) else copy.copy(x)
    copies[id(x)] = x, new
    if isinstance(x, _OBJECTS):
        new.__dict__.update(vars(x))
    held, keys = content
    for k in keys:
        _namespace(new)[k] = copy_schedules(held[k], number, copies)
    return new


def mutable_content(x: Any) -> tuple[Any, list[Any]] | None:
    """Returns the container of the values that a schedule may change in an object, and their keys; None if none."""
    if isinstance(x, Optimizer):
        return vars(x), ["param_groups"]
    if isinstance(x, LRScheduler):
        return vars(x), list(vars(x))
    if type(x) is list:
        return x, list(range(len(x)))
    return (x, [k for k in x if k != "params"]) if type(x) in _DICTS else None


def is_number_list(x: Any) -> bool:
    """Returns whether `x` is a list of numbers: schedules replace such a list, and do not write to it."""
    return type(x) is list and all(y.__class__ in NUMBERS for y in x)


@dataclass
class ScheduleContents:
    """The contents of a schedule: its `numbers` in order, `facts` about everything else, and `others`.

    `others` are values of no known kind. `own` is true for each number that a schedule holds, directly or in a list,
    or that a new list or dict holds.
    """

    numbers: list[Any] = field(default_factory=list)
    facts: tuple[Any, ...] = ()
    own: list[bool] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    @staticmethod
    def read(x: Any, originals: Mapping[int, Any] | None = None) -> ScheduleContents:
        """Reads a schedule; a list or dict is new if its id is not among `originals`."""
        contents, facts, seen = ScheduleContents(), list[Any](), dict[int, int]()

        def visit(x: Any, own: bool) -> None:
            if x.__class__ in NUMBERS:
                contents.numbers.append(x)
                contents.own.append(own)
                facts.append(x.__class__)
            elif type(x) is tuple:
                facts.append((tuple, len(x)))
                for y in x:
                    visit(y, own)
            elif is_number_list(x):
                facts.append((list, len(x)))
                for y in x:
                    visit(y, own or (originals is not None and id(x) not in originals))
            elif type(x) in _PLAIN:
                facts.append(x)
            elif (held := mutable_content(x)) is None:
                contents.others.append(x)
                facts.append(id(x))
            elif id(x) in seen:
                facts.append(("again", seen[id(x)]))
            else:
                seen[id(x)] = len(seen)
                facts.append((type(x), tuple(held[1])))
                own = isinstance(x, LRScheduler) or (originals is not None and id(x) not in originals)
                for k in held[1]:
                    visit(held[0][k], own)

        visit(x, False)
        contents.facts = tuple(facts)
        return contents


def fill_numbers(x: Any, numbers: Iterator[Any], like: dict[int, Any] | None = None) -> Any:
    """Fills new numbers into `x` in their order: in place, or into the counterparts of its objects in `like`, by id.

    A list or dict without a counterpart gets a new one. Two places never share a list of numbers, since the next step
    replaces the list in one place only.
    """
    seen = set[int]()

    def fill(x: Any) -> Any:
        if x.__class__ in NUMBERS:
            return next(numbers)
        if type(x) is tuple:
            return _unless_same(x, tuple([fill(y) for y in x]))
        if is_number_list(x):
            new = [next(numbers) for _ in x]
            if like is None or id(x) in seen or id(x) not in like:
                return new
            seen.add(id(x))
            like[id(x)][:] = new
            return like[id(x)]
        if (content := mutable_content(x)) is None:
            return x
        into = x if like is None else like.setdefault(id(x), x if id(x) in like else copy.copy(x))
        if id(x) not in seen:
            seen.add(id(x))
            held, keys = content
            for k in keys:
                _namespace(into)[k] = fill(held[k])
        return into

    return fill(x)


def _namespace(x: Any) -> Any:
    return vars(x) if isinstance(x, _OBJECTS) else x


def _unless_same(x: tuple[Any, ...], y: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the old tuple if the new one holds the same objects."""
    return x if all(a is b for a, b in zip(x, y, strict=True)) else y


_OBJECTS = (LRScheduler, Optimizer)
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_PLAIN = (bool, str, type(None))
