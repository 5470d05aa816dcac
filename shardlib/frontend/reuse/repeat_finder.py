"""Finds repeated rounds in a stream of calls, and the call at which fewest values pass from one round to the next.

Two calls look the same if function, line, forms of tensors and numbers agree. This is a guess: `CallReplay` compares
all arguments.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import tensor_uses

_LONGEST = 1 << 9  # calls of a round
_FEWEST = 24  # equal calls in a row before it pays to trace a round separately

_HELD_ONCE = torch.empty(0)  # a tensor with a single reference

Value = tuple[int, int]  # the call that created it, and its position among the results


class RepeatFinder:
    """Records calls, by `begin` and `end`, and detects a period in them."""

    def __init__(self) -> None:
        self.period = 0
        self._equal = 0  # consecutive calls that look like the calls a period before
        self._keys: list[int] = []
        self._last: dict[int, int] = {}  # the last call with a key
        self._makers: dict[int, Value] = {}  # by the id of a tensor
        self._reads: list[list[Value]] = []
        self._results: list[list[weakref.ref[Tensor]]] = []

    def begin(self, func: Any, where: Any, args: Any, kwargs: Any) -> int:
        """Records a call before it runs; returns its number."""
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
        self._reads.append([self._makers[id(x)] for x in tensors if id(x) in self._makers])
        return at

    def end(self, out: Any) -> None:
        """Records the results of the last call."""
        at = len(self._keys) - 1
        results = [x for x in leaves_of(out) if isinstance(x, Tensor)]
        self._makers.update((id(x), (at, i)) for i, x in enumerate(results))
        self._results.append(list(map(weakref.ref, results)))

    @property
    def is_repeating(self) -> bool:
        """Returns whether the last two periods look the same."""
        return 0 < self.period <= _LONGEST and self._equal >= max(self.period, _FEWEST)

    def round_start(self) -> int | None:
        """Returns the next call at which a round should begin: fewest values cross from one round to the next."""
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
        """Returns the values of the round before `start` that the next round reads, or that outlive the next round."""
        begin = start - self.period
        reads = [x for step in self._reads[start : start + self.period] for x in step]
        alive = _count_references(weakref.ref(_HELD_ONCE))
        results = enumerate(self._results[begin:start], begin)
        kept = [(at, i) for at, refs in results for i, refer in enumerate(refs) if _count_references(refer) >= alive]
        return [(maker - begin, i) for maker, i in dict.fromkeys([*reads, *kept]) if begin <= maker < start]


def _count_references(refer: weakref.ref[Tensor]) -> int:
    """Counts the references to a tensor, without autograd's."""
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
