"""Finds rounds in a stream of calls: two in a row that look the same, and the call at which least is handed on.

Calls look the same that are of one function, from one line, with tensors of the same forms and the same numbers. That
is a guess: whoever follows a round compares everything.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import tensor_uses

_LONGEST = 1 << 9  # calls of a round
_FEWEST = 24  # equal calls in a row, below which a round is not worth tracing it apart

_ALONE = torch.empty(0)  # has one holder

Value = tuple[int, int]  # the call that made it, and its place among the results


class RepeatFinder:
    """The calls until now: `begin` and `end` of each."""

    def __init__(self) -> None:
        self.period = 0
        self._equal = 0  # how many calls in a row look like those a period before
        self._keys: list[int] = []
        self._last: dict[int, int] = {}  # where a key was last
        self._made: dict[int, Value] = {}  # by the id of a tensor
        self._reads: list[list[Value]] = []
        self._results: list[list[weakref.ref[Tensor]]] = []

    def begin(self, func: Any, where: Any, args: Any, kwargs: Any) -> int:
        """Note a call before it runs; returns its number."""
        leaves = [*leaves_of(args), *leaves_of(kwargs)]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        key = hash((func, where, *map(_form, leaves)))
        at, period = len(self._keys), self.period
        if period and at >= period and self._keys[at - period] == key:
            self._equal += 1
        else:
            before = self._last.get(key)
            self.period, self._equal = (0, 0) if before is None else (at - before, 1)
        self._last[key] = at
        self._keys.append(key)
        self._reads.append([self._made[id(x)] for x in tensors if id(x) in self._made])
        return at

    def end(self, out: Any) -> None:
        """Note the results of the call that has begun last."""
        at = len(self._keys) - 1
        results = [x for x in leaves_of(out) if isinstance(x, Tensor)]
        self._made.update((id(x), (at, i)) for i, x in enumerate(results))
        self._results.append(list(map(weakref.ref, results)))

    @property
    def is_repeating(self) -> bool:
        """Returns whether the last two periods look the same."""
        return 0 < self.period <= _LONGEST and self._equal >= max(self.period, _FEWEST)

    def round_start(self) -> int | None:
        """Returns the number of the next call with which to begin a round, where it hands least on to the next one."""
        if not self.is_repeating:
            return None
        end, period = len(self._keys), self.period
        crossing: list[set[Value]] = [set() for _ in range(period)]
        for step in range(end - period, end):
            for maker, i in self._reads[step]:
                if maker < end - 2 * period:
                    continue
                for shift in range(period):
                    if step - maker > (step - end - shift) % period:
                        crossing[shift].add(((maker - end) % period, i))
        return end + min(range(period), key=lambda shift: len(crossing[shift]))

    def handed_on(self, start: int) -> list[Value]:
        """Returns the values of a round, by their call in it, that outlive the next one, which begins at `start`, or
        that it reads."""
        begin = start - self.period
        reads = [x for step in self._reads[start : start + self.period] for x in step]
        least = _holders(weakref.ref(_ALONE))
        results = enumerate(self._results[begin:start], begin)
        kept = [(at, i) for at, refs in results for i, refer in enumerate(refs) if _holders(refer) >= least]
        return [(maker - begin, i) for maker, i in dict.fromkeys([*reads, *kept]) if begin <= maker < start]


def _holders(refer: weakref.ref[Tensor]) -> int:
    """Counts the references to a tensor; those of autograd, which saves it, do not count."""
    x = refer()
    return 0 if x is None else sys.getrefcount(x) - (tensor_uses(x) > 1)


def _form(x: Any) -> Any:
    return (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x if type(x) in _NUMBERS else None


_NUMBERS = frozenset({int, float, bool, str})


def leaves_of(x: Any) -> Iterator[Any]:
    """Yields the items of a nest of lists, tuples, dicts and slices."""
    if isinstance(x, list | tuple):
        for y in x:
            yield from leaves_of(y)
    elif isinstance(x, dict):
        yield from leaves_of(tuple(x.values()))
    elif isinstance(x, slice):
        yield from leaves_of((x.start, x.stop, x.step))
    else:
        yield x
