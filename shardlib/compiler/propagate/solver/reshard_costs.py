"""Prices the reshards of a value: from the layout of its producer to every distinct layout of its readers.

A partial sum is reduced once, and so are sums that only meet in an addition. The seconds from one layout to another are
computed once for all values of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from shardlib.compiler.propagate.solver.bucket_elimination import Costs, Numbers, round_costs
from shardlib.compiler.propagate.solver.value_records import UnitClass, ValueEnd, ValueRecord
from shardlib.sharding import reshard
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.reshard import DEFAULT_PRICES, Axes, FactorAxes, FactorSizes, Prices

HOLDING = 1.25  # near a tie, activations move: they are freed soon, but a gathered parameter stays for half a step

State = tuple[FactorAxes, tuple[Axis, ...]]  # the axes on every dim factor, and those over which it is a partial sum
_LARGEST, _DIMS = 1 << 18, 20  # the most entries and dims of an array of costs


class LayoutCosts:
    """Prices the reshards between the layouts, here numbered *states*, of all values of one shape.

    The best steps at `prices` are charged at the prices `paid`. `returned` are the axes that the factors of a result
    without a pin request. `priced` counts the computed pairs.
    """

    def __init__(
        self,
        sizes: FactorSizes,
        itemsize: int,
        returned: Sequence[Axes] | None = None,
        prices: Prices = DEFAULT_PRICES,
        paid: Prices | None = None,
    ) -> None:
        self.sizes, self.itemsize, self.returned = sizes, itemsize, returned
        self.prices, self.paid, self.priced = prices, paid or prices, 0
        self.flat = tuple(n for dim in sizes for n in dim)
        self._number: dict[object, int] = {}
        self._states: list[State] = []
        self._is_partial = np.empty(0, np.bool_)
        # From every state to -2, -1 and every state: seconds (nan: not computed), and the state afterwards.
        self._ways: tuple[Costs, Numbers] = np.empty((0, 2)), np.empty((0, 2), np.int64)
        # For states in factors of their own: the dims that these replace, the factors, and their axes.
        self._into: dict[int, tuple[FactorSizes, FactorSizes, FactorAxes]] = {}

    def number(self, state: State) -> int:
        """Returns the number of a state."""
        if (number := self._number.get(state)) is None:
            number = self._number[state] = len(self._states)
            self._states.append(state)
        return number

    def fixed(self, end: ValueEnd) -> int:
        """Returns the number of the state of a pinned end; a pin in factors of its own has a state of its own."""
        if end.into is None:
            return self.number((end.axes, ()))
        key = end.axes, end.dims or self.sizes, end.into
        if (number := self._number.get(key)) is None:
            number = self._number[key] = len(self._states)
            self._into[number] = end.dims or self.sizes, *end.into
            self._states.append((end.axes, ()))
        return number

    def pairs(self, make: Callable[[int, int], int], a: Numbers, b: Numbers) -> Numbers:
        """Returns `make` of every two states, broadcast."""
        if a.size == b.size == 1:
            return np.full(np.broadcast_shapes(a.shape, b.shape), make(int(a.item()), int(b.item())))
        n = len(self._states)
        pairs, at = np.unique(a * n + b, return_inverse=True)
        values = np.array([make(*divmod(pair, n)) for pair in pairs.tolist()], np.int64)
        return values[at].reshape(np.broadcast_shapes(a.shape, b.shape))

    def partial_in(self, source: int, target: int) -> int:
        """Returns the source's state in the layout of `target`, still a partial sum over the axes not used there."""
        axes, partial = self._states[target][0], self._states[source][1]
        return self.number((axes, tuple(a for a in partial if not any(a in own for own in axes))))

    def summed(self, source: int, _: int) -> int:
        """Returns the state of a source after its reduction in place."""
        return self.number((self._states[source][0], ()))

    def clashes(self, state: int, source: int) -> int:
        """Returns 1 if a state shards over an axis over which the source is a partial sum."""
        partial = self._states[source][1]
        return int(any(a in partial for axes in self._states[state][0] for a in axes))

    def has_partial(self, states: Numbers) -> NDArray[np.bool_]:
        if len(self._is_partial) <= len(self._states):  # the last entry is for state -1, no reader
            self._is_partial = np.array([bool(partial) for _, partial in self._states] + [False])
        return self._is_partial[states]

    def seconds(self, sources: Numbers, targets: Numbers) -> tuple[Costs, Numbers]:
        """Returns the seconds from states to others, and the states of the values afterwards.

        Target -1 is no reader, and -2 the place of a result without a pin.
        """
        at = sources, targets + 2
        seconds, then = self._tables()
        if (gaps := np.isnan(seconds[at])).any():
            n = seconds.shape[1]
            missing = np.unique((at[0] * n + at[1])[gaps]).tolist()
            ways = {(place // n, place % n): self._way(place // n, place % n - 2) for place in missing}
            self.priced += len(ways)
            seconds, then = self._tables()
            for place, way in ways.items():
                seconds[place], then[place] = way
        return seconds[at], then[at]

    def _tables(self) -> tuple[Costs, Numbers]:
        """Returns the tables, with room for all states."""
        seconds, then = self._ways
        if (n := len(self._states)) > len(seconds):
            shape = 2 * n + 8, 2 * n + 10
            before, (seconds, then) = (seconds, then), (np.full(shape, np.nan), np.zeros(shape, np.int64))
            old = tuple(map(slice, before[0].shape))
            seconds[old], then[old] = before
            self._ways = seconds, then
        return seconds, then

    def _way(self, source: int, target: int) -> tuple[float, int]:
        if target == -1:
            return 0.0, source
        (axes, partial), into, source_factors = self._states[source], self._into.get(target), self._into.get(source)
        if target < 0:
            factors = zip(self.returned or (), self.flat, strict=True)
            goal: State = place_returned_sum(axes, partial, list(factors)), ()
        else:
            goal = self._states[target]
        to, seconds = goal[0], self._routed(source, goal)
        then = self.number((to, tuple(a for a in partial if a in goal[1])))  # partial sums that both states have
        if source_factors is not None:
            return self._from(source_factors[1:], axes, to, seconds), then
        exchange = reshard.plan_refactor_exchanges(into[0], self.itemsize, to, axes, *into[1:]) if into else None
        if exchange is not None:
            via, steps = exchange
            crossed = self._routed(source, (via, ())) + reshard.refactor_seconds(steps, self.paid)
            if crossed < seconds:
                return crossed, self.number((via, ()))
        return seconds, then

    def _from(
        self, source: tuple[FactorSizes, FactorAxes], axes: FactorAxes, to: FactorAxes, gather_seconds: float
    ) -> float:
        """Returns the seconds from axes on other factors to axes on these.

        The cheaper of an exchange of overlapping ranges, and a gather of dims, after which `gather_seconds` pass.
        """
        factors, src = source
        theirs, mine, gathered, near = iter(src), iter(zip(axes, to, strict=True)), list[Axes](), list[Axes]()
        for a, b in zip(factors, self.sizes, strict=True):
            ends, _ = [next(mine) for _ in b], [next(theirs) for _ in a]
            gathered += [x for x, _ in ends] if a == b else [()] * len(a)
            near += [x for _, x in ends] if a == b else [()] * len(a)
        gather_seconds += self._route_seconds(factors, src, tuple(gathered), ())
        exchange = reshard.plan_refactor_exchanges(factors, self.itemsize, tuple(near), src, self.sizes, to)
        if exchange is None:
            return gather_seconds
        via, steps = exchange
        before = self._route_seconds(factors, src, via, ())
        return min(gather_seconds, before + reshard.refactor_seconds(steps, self.paid))

    def _routed(self, source: int, goal: State) -> float:
        axes, partial = self._states[source]
        return self._route_seconds(self.sizes, axes, goal[0], tuple(a for a in partial if a not in goal[1]))

    def _route_seconds(self, sizes: FactorSizes, source: FactorAxes, target: FactorAxes, summed: Axes) -> float:
        route = reshard.plan_route(sizes, self.itemsize, source, target, summed, prices=self.prices)
        return reshard.estimate_seconds(route, self.paid)


class ValueReshards:
    """Prices the reshards of `count` values with one record, by the layouts of their ends.

    Each unit class at some ends (`unit_classes`) has numbered layout *classes*: the `states` of these ends.
    """

    def __init__(self, record: ValueRecord, count: int, layouts: LayoutCosts) -> None:
        self.record, self.count, self.layouts = record, count, layouts
        self.ends = (*record.sources, *record.readers, *record.through, *record.joins)
        self.still = {p: layouts.fixed(e) for p, e in enumerate(self.ends) if e.unit_class is None}
        self.unit_classes = record.unit_classes
        self.places = {k: tuple(p for p, e in enumerate(self.ends) if e.unit_class == k) for k in record.unit_classes}
        self._classes: dict[UnitClass, dict[tuple[int, ...], int]] = {k: {} for k in record.unit_classes}
        self.states: dict[UnitClass, list[tuple[int, ...]]] = {k: [] for k in record.unit_classes}
        self._costs = np.full((0,) * min(len(record.unit_classes), _DIMS + 1), np.nan)  # nan: not computed
        self._large: dict[object, Costs] = {}  # computed costs, where an array of all would be too large
        self.evaluations = 0

    def number(self, unit_class: UnitClass, slots: Sequence[Axes]) -> int:
        """Returns the layout class of a unit class with these axes on its slots."""
        states = tuple([self.layouts.number(_resolved(self.ends[p], slots)) for p in self.places[unit_class]])
        classes = self._classes[unit_class]
        if (number := classes.get(states)) is None:
            number = classes[states] = len(classes)
            self.states[unit_class].append(states)
        return number

    def at(self, classes: tuple[int, ...]) -> float:
        """Returns the seconds of all reshards, with a layout class for every unit class."""
        inside = len(classes) <= _DIMS and all(n < size for n, size in zip(classes, self._costs.shape, strict=True))
        seconds = float(self._costs[classes]) if inside else math.nan
        return float(self.costs([np.array(n) for n in classes]).item()) if math.isnan(seconds) else seconds

    @property
    def _is_large(self) -> bool:
        """Returns whether an array of all costs would have too many entries or dims."""
        return math.prod(map(len, self.states.values())) > _LARGEST or len(self.unit_classes) > _DIMS

    def costs(self, classes: Sequence[Numbers]) -> Costs:
        """Returns the seconds for arrays of layout classes, broadcast."""
        if self._is_large:
            key = tuple(map(_key, classes))
            if (costs := self._large.get(key)) is None:
                costs = self._large[key] = self._compute(np.broadcast_arrays(*classes))
            return costs
        index = tuple(classes)
        if any(len(states) > size for states, size in zip(self.states.values(), self._costs.shape, strict=True)):
            self._grow()
        costs = self._costs[index]
        if (gaps := np.isnan(costs)).any():
            missing = tuple([np.broadcast_to(n, costs.shape)[gaps] for n in index])
            self._costs[missing] = self._compute(missing)
            costs = self._costs[index]
        return np.asarray(costs)

    def _grow(self) -> None:
        before = self._costs
        self._costs = np.full([len(states) for states in self.states.values()], np.nan)
        self._costs[tuple(map(slice, before.shape))] = before

    def _compute(self, classes: Sequence[Numbers]) -> Costs:
        """Computes the seconds for arrays of layout classes, one for every unit class."""
        at = [np.array(self.still.get(p, 0)) for p in range(len(self.ends))]
        for unit_class, numbers in zip(self.unit_classes, classes, strict=True):
            states = np.array(self.states[unit_class])[numbers]
            for n, p in enumerate(self.places[unit_class]):
                at[p] = states[..., n]
        seconds = np.broadcast_to(self._seconds(at), np.broadcast_shapes(*(n.shape for n in classes)))
        self.evaluations += seconds.size
        return round_costs(seconds * self.count)

    def _seconds(self, at: list[Numbers]) -> Costs:
        record = self.record
        layouts, counts = self.layouts, map(len, (record.sources, record.readers, record.through, record.joins))
        sources, targets, through, joins = (at[a:b] for a, b in pairwise(accumulate(counts, initial=0)))
        total = np.array(0.0)
        if through:
            came = reduce(lambda later, s: np.where(layouts.has_partial(s), s, later), reversed(through), sources[0])
            # A linear op that shards over the axes of the sum needs the whole sum in front of it.
            early = layouts.pairs(layouts.clashes, sources[0], came).astype(bool)
            reduced = layouts.seconds(came, layouts.pairs(layouts.summed, came, came))[0]
            total, sources = total + np.where(early, reduced, 0.0), [np.where(early, s, came) for s in sources]
        terms = _count_terms((s, 1) for s in sources) if joins else []
        for join in _without_repeats(joins):
            kept = [layouts.pairs(layouts.partial_in, s, join) for s, _ in terms]
            total = total + sum(layouts.seconds(s, to)[0] * n for (s, n), to in zip(terms, kept, strict=True))
            terms = _count_terms((to, n) for (_, n), to in zip(terms, kept, strict=True))
        sources = [s for s, _ in terms] if joins else sources
        new = _first_occurrences(sources)
        if record.late:
            # Readers of own rows take a partial sum; the others read the result of the linear op behind it.
            late = reduce(np.logical_or, map(layouts.has_partial, sources))
            waits = [late & ~layouts.pairs(layouts.clashes, target, sources[0]).astype(bool) for target in targets]
            ends = zip(targets, waits, record.readers, strict=True)
            targets = [target if e.partial else np.where(wait, -1, target) for target, wait, e in ends]
        have = sources
        if len(sources) > 1 and targets:
            # Sums that cannot be added first: each goes to the first reader's layout on its own.
            apart = reduce(np.logical_or, new[1:]) & (targets[0] >= 0)
            paid = [
                np.where(mine & apart, self.layouts.seconds(s, targets[0])[0], 0.0)
                for s, mine in zip(sources, new, strict=False)
                if mine.any()
            ]
            total, have, new = sum(paid, start=total), [np.where(apart, targets[0], sources[0])], new[:1]
        for target in {_key(target): target for target in targets}.values():  # equal targets cost one reshard
            ways = [self.layouts.seconds(s, target) for s in have]
            best, then = ways[0]
            for seconds, state in ways[1:]:
                then, best = np.where(seconds < best, state, then), np.minimum(seconds, best)
            total, have, new = total + best, [*have, then], [*new, np.array(False)]
        if record.returned is not None:
            left = reduce(np.logical_and, map(self.layouts.has_partial, have))
            paid = [np.where(left, self.layouts.seconds(s, np.array(-2))[0], 0.0) for s in have]
            total = total + sum(np.where(mine, seconds, 0.0) for mine, seconds in zip(new, paid, strict=True))
        return total * (HOLDING if record.held else 1.0)


def _key(numbers: Numbers) -> tuple[tuple[int, ...], bytes]:
    """Returns a key that equal arrays share."""
    return numbers.shape, numbers.tobytes()


def _count_terms(terms: Iterable[tuple[Numbers, int]]) -> list[tuple[Numbers, int]]:
    """Returns the distinct terms, with their numbers: most terms of a long sum have one layout."""
    counts: dict[object, tuple[Numbers, int]] = {}
    for s, n in terms:
        key = _key(s)
        counts[key] = s, counts.get(key, (s, 0))[1] + n
    return [*counts.values()]


def _without_repeats(joins: Sequence[Numbers]) -> list[Numbers]:
    """Returns the joins without those that follow one of the same layout."""
    return [next(same) for _, same in groupby(joins, _key)]


def _first_occurrences(sources: Sequence[Numbers]) -> list[NDArray[np.bool_]]:
    """Returns a mask of first occurrences for each source."""
    masks: list[NDArray[np.bool_]] = []
    before: dict[object, Numbers] = {}
    for s in sources:
        key = _key(s)
        if key in before:
            masks.append(np.array(False))
        else:
            masks.append(reduce(np.logical_and, (s != t for t in before.values()), np.array(True)))
            before[key] = s
    return masks


def place_returned_sum(
    axes: FactorAxes, partial: Sequence[Axis], factors: Sequence[tuple[Sequence[Axis], int]]
) -> FactorAxes:
    """Returns the axes of a result after its partial sum is reduced; factors are given as (requested axes, size).

    A factor that requests an axis of the sum takes it. So gradients get the layouts of parameters.
    """
    out = list(axes)
    for axis in partial:
        for j, (requested, size) in enumerate(factors):
            if axis in requested and size >= group_size(out[j]) * axis.size:
                out[j] = (*out[j], axis)
                break
    return tuple(out)


def _resolved(end: ValueEnd, slots: Sequence[Axes]) -> State:
    axes = tuple(() if s is None else slots[s] for s in end.slots)
    # A tensor passed round a ring was reduced on the way.
    return axes, tuple(a for s in end.partial for a in slots[s] if not any(a in own for own in axes))
