"""The reshards of a value: from the layout in which it is made to every distinct layout in which it is read.

A partial sum is reduced once; sums that only meet in an addition are added first and then reduced once. The seconds
from one layout to another are worked out once for all values of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from shardlib.compiler.propagate.solver.bucket_elimination import GRAIN, Costs, Numbers
from shardlib.compiler.propagate.solver.edges import End, Kind, Record
from shardlib.sharding import reshard
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.reshard import DEFAULT_PRICES, Axes, FactorAxes, FactorSizes, Prices

# An activation that moves is gone soon, a gathered parameter stays for half a step: near a tie, move activations.
HOLDING = 1.25

State = tuple[FactorAxes, tuple[Axis, ...]]  # the axes on every leaf, and those over which it is a partial sum
_LARGEST = 1 << 18  # entries of an array of costs
_DIMS = 20  # of one


class LayoutCosts:
    """Seconds between the layouts, here *states*, of all values of one shape; states are numbered.

    The best steps at some `prices` are taken, and charged as `paid` says, or by these. `returned` are the axes
    that the leaves of a result want whose layout nobody fixed. `priced` counts the pairs that were worked out.
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
        self._owing = np.empty(0, np.bool_)
        # From every state to -2, -1 and every state: seconds (nan: nobody asked), and the state in which it is then.
        self._ways: tuple[Costs, Numbers] = np.empty((0, 2)), np.empty((0, 2), np.int64)
        # Of states that are reached, or left, in factors of their own: the dims that these are, these, and the cut.
        self._into: dict[int, tuple[FactorSizes, FactorSizes, FactorAxes]] = {}

    def number(self, state: State) -> int:
        """The number of a state."""
        if (number := self._number.get(state)) is None:
            number = self._number[state] = len(self._states)
            self._states.append(state)
        return number

    def fixed(self, end: End) -> int:
        """The number of the state of an end that is fixed; of one with factors of its own, another than of its cut."""
        if end.into is None:
            return self.number((end.cut, ()))
        key = end.cut, end.dims or self.sizes, end.into
        if (number := self._number.get(key)) is None:
            number = self._number[key] = len(self._states)
            self._into[number] = end.dims or self.sizes, *end.into
            self._states.append((end.cut, ()))
        return number

    def pairs(self, make: Callable[[int, int], int], a: Numbers, b: Numbers) -> Numbers:
        """`make` of every two states, broadcast."""
        if a.size == b.size == 1:
            return np.full(np.broadcast_shapes(a.shape, b.shape), make(int(a.item()), int(b.item())))
        n = len(self._states)
        pairs, at = np.unique(a * n + b, return_inverse=True)
        values = np.array([make(*divmod(pair, n)) for pair in pairs.tolist()], np.int64)
        return values[at].reshape(np.broadcast_shapes(a.shape, b.shape))

    def partial_in(self, source: int, target: int) -> int:
        """The state of a source in the layout of another state, still a partial sum over all axes that this leaves."""
        cut, pending = self._states[target][0], self._states[source][1]
        return self.number((cut, tuple(a for a in pending if not any(a in axes for axes in cut))))

    def summed(self, source: int, _: int) -> int:
        """The state of a source once it is summed up where it is."""
        return self.number((self._states[source][0], ()))

    def clashes(self, state: int, source: int) -> int:
        """1 if a state shards over an axis over which the source is a partial sum."""
        pending = self._states[source][1]
        return int(any(a in pending for axes in self._states[state][0] for a in axes))

    def owes(self, states: Numbers) -> NDArray[np.bool_]:
        if len(self._owing) <= len(self._states):  # the last one is nothing's, number -1
            self._owing = np.array([bool(pending) for _, pending in self._states] + [False])
        return self._owing[states]

    def seconds(self, sources: Numbers, wants: Numbers) -> tuple[Costs, Numbers]:
        """Seconds from states to others, to nothing (-1), or to where a result goes whose layout nobody fixed (-2); and
        the state in which the value is then, too."""
        at = sources, wants + 2
        seconds, then = self._known()
        if (gaps := np.isnan(seconds[at])).any():
            n = seconds.shape[1]
            asked = np.unique((at[0] * n + at[1])[gaps]).tolist()
            ways = {(place // n, place % n): self._way(place // n, place % n - 2) for place in asked}
            self.priced += len(ways)
            seconds, then = self._known()
            for place, way in ways.items():
                seconds[place], then[place] = way
        return seconds[at], then[at]

    def _known(self) -> tuple[Costs, Numbers]:
        """The tables, with room for all states."""
        seconds, then = self._ways
        if (n := len(self._states)) > len(seconds):
            shape = 2 * n + 8, 2 * n + 10
            before, (seconds, then) = (seconds, then), (np.full(shape, np.nan), np.zeros(shape, np.int64))
            there = tuple(map(slice, before[0].shape))
            seconds[there], then[there] = before
            self._ways = seconds, then
        return seconds, then

    def _way(self, source: int, want: int) -> tuple[float, int]:
        if want == -1:
            return 0.0, source
        (cut, pending), into, given = self._states[source], self._into.get(want), self._into.get(source)
        if want < 0:
            leaves = zip(self.returned or (), self.flat, strict=True)
            goal: State = settled(cut, pending, list(leaves)), ()
        else:
            goal = self._states[want]
        (to, _), then, seconds = goal, self._left(source, goal), self._routed(source, goal)
        if given is not None:
            return self._from(given[1:], cut, to, seconds), then
        found = reshard.plan_refactor_exchanges(into[0], self.itemsize, to, cut, *into[1:]) if into else None
        if found is not None:
            via, steps = found
            crossed = self._routed(source, (via, ())) + reshard.refactor_seconds(steps, self.paid)
            if crossed < seconds:
                return crossed, self.number((via, ()))
        return seconds, then

    def _from(self, given: tuple[FactorSizes, FactorAxes], cut: FactorAxes, to: FactorAxes, whole: float) -> float:
        """Seconds from a cut of other factors to one of these: by what ranges have in common, or by making dims whole,
        from where it takes `whole` more."""
        leaves, src = given
        sizes, itemsize = self.sizes, self.itemsize
        theirs, mine, made, near = iter(src), iter(zip(cut, to, strict=True)), list[Axes](), list[Axes]()
        for a, b in zip(leaves, sizes, strict=True):
            ends, _ = [next(mine) for _ in b], [next(theirs) for _ in a]
            made += [x for x, _ in ends] if a == b else [()] * len(a)
            near += [x for _, x in ends] if a == b else [()] * len(a)
        whole += reshard.estimate_seconds(
            reshard.plan_route(leaves, itemsize, src, tuple(made), (), prices=self.prices), self.paid
        )
        found = reshard.plan_refactor_exchanges(leaves, itemsize, tuple(near), src, sizes, to)
        if found is None:
            return whole
        via, steps = found
        before = reshard.estimate_seconds(
            reshard.plan_route(leaves, itemsize, src, via, (), prices=self.prices), self.paid
        )
        return min(whole, before + reshard.refactor_seconds(steps, self.paid))

    def _left(self, source: int, goal: State) -> int:
        """The number of the state behind a way to a goal where more may be pending than at the source."""
        return self.number((goal[0], tuple(a for a in self._states[source][1] if a in goal[1])))

    def _routed(self, source: int, goal: State) -> float:
        (cut, pending), sizes, itemsize = self._states[source], self.sizes, self.itemsize
        left = tuple(a for a in pending if a not in goal[1])
        return reshard.estimate_seconds(
            reshard.plan_route(sizes, itemsize, cut, goal[0], left, prices=self.prices), self.paid
        )


class Moves:
    """The reshards of `count` values that are one record, by the layouts of their ends.

    Each of the `kinds` that decide about ends has numbered *classes*: the states of these ends.
    """

    def __init__(self, record: Record, count: int, layouts: LayoutCosts) -> None:
        self.record, self.count, self.layouts = record, count, layouts
        self.ends = (*record.sources, *record.readers, *record.through, *record.joins)
        self.still = {p: layouts.fixed(e) for p, e in enumerate(self.ends) if e.kind is None}
        self.kinds = record.kinds
        self.places = {k: tuple(p for p, e in enumerate(self.ends) if e.kind == k) for k in record.kinds}
        self._classes: dict[Kind, dict[tuple[int, ...], int]] = {k: {} for k in record.kinds}
        self._states: dict[Kind, list[tuple[int, ...]]] = {k: [] for k in record.kinds}
        self._costs = np.full((0,) * min(len(record.kinds), _DIMS + 1), np.nan)  # nan: nobody asked
        self._large: dict[object, Costs] = {}  # those that were asked, where an array of all would be too large
        self.evaluations = 0

    def number(self, kind: Kind, slots: Sequence[Axes]) -> int:
        """The class of a kind whose slots are sharded over such axes."""
        states = tuple([self.layouts.number(_resolved(self.ends[p], slots)) for p in self.places[kind]])
        classes = self._classes[kind]
        if (number := classes.get(states)) is None:
            number = classes[states] = len(classes)
            self._states[kind].append(states)
        return number

    def at(self, classes: tuple[int, ...]) -> float:
        """Seconds of all reshards, with a class for every kind."""
        inside = len(classes) <= _DIMS and all(n < size for n, size in zip(classes, self._costs.shape, strict=True))
        seconds = float(self._costs[classes]) if inside else math.nan
        return float(self.costs([np.array(n) for n in classes]).item()) if math.isnan(seconds) else seconds

    @property
    def _is_large(self) -> bool:
        """Returns whether an array of all costs would be too large; a value may have readers of more kinds than it has
        dims."""
        return math.prod(map(len, self._states.values())) > _LARGEST or len(self.kinds) > _DIMS

    def costs(self, classes: Sequence[Numbers]) -> Costs:
        """The same of many, broadcast."""
        if self._is_large:
            key = tuple([(n.shape, n.tobytes()) for n in classes])
            if (known := self._large.get(key)) is None:
                known = self._large[key] = self._worked_out(np.broadcast_arrays(*classes))
            return known
        index = tuple(classes)
        if any(len(self._states[kind]) > size for kind, size in zip(self.kinds, self._costs.shape, strict=True)):
            self._grow()
        costs = self._costs[index]
        if (gaps := np.isnan(costs)).any():
            missing = tuple([np.broadcast_to(n, costs.shape)[gaps] for n in index])
            self._costs[missing] = self._worked_out(missing)
            costs = self._costs[index]
        return np.asarray(costs)

    def _grow(self) -> None:
        before = self._costs
        self._costs = np.full([len(self._states[kind]) for kind in self.kinds], np.nan)
        self._costs[tuple(map(slice, before.shape))] = before

    def _worked_out(self, classes: Sequence[Numbers]) -> Costs:
        """Seconds of many, a class of every kind for each."""
        at = [np.array(self.still.get(p, 0)) for p in range(len(self.ends))]
        for kind, numbers in zip(self.kinds, classes, strict=True):
            states = np.array(self._states[kind])[numbers]
            for n, p in enumerate(self.places[kind]):
                at[p] = states[..., n]
        seconds = np.broadcast_to(self._seconds(at), np.broadcast_shapes(*(n.shape for n in classes)))
        self.evaluations += seconds.size
        return np.asarray(np.rint(seconds * (self.count / GRAIN)) * GRAIN)

    def _seconds(self, at: list[Numbers]) -> Costs:
        record = self.record
        layouts, counts = self.layouts, map(len, (record.sources, record.readers, record.through, record.joins))
        sources, wants, through, joins = (at[a:b] for a, b in pairwise(accumulate(counts, initial=0)))
        total = np.array(0.0)
        if through:
            came = reduce(lambda later, s: np.where(layouts.owes(s), s, later), reversed(through), sources[0])
            # A linear op that shards over the axes of the sum needs the whole sum in front of it.
            early = layouts.pairs(layouts.clashes, sources[0], came).astype(bool)
            reduced = layouts.seconds(came, layouts.pairs(layouts.summed, came, came))[0]
            total, sources = total + np.where(early, reduced, 0.0), [np.where(early, s, came) for s in sources]
        terms = _counted((s, 1) for s in sources) if joins else []
        for join in _without_repeats(joins):
            kept = [layouts.pairs(layouts.partial_in, s, join) for s, _ in terms]
            total = total + sum(layouts.seconds(s, to)[0] * n for (s, n), to in zip(terms, kept, strict=True))
            terms = _counted((to, n) for (_, n), to in zip(terms, kept, strict=True))
        sources = [s for s, _ in terms] if joins else sources
        new = _new(sources)
        if record.late:
            # What a reader needs in own rows only it also takes while these are pending: others have what they need.
            late = reduce(np.logical_or, map(layouts.owes, sources))
            waits = [late & ~layouts.pairs(layouts.clashes, w, sources[0]).astype(bool) for w in wants]
            ends = zip(wants, waits, record.readers, strict=True)
            wants = [w if e.pending else np.where(wait, -1, w) for w, wait, e in ends]
        have = sources
        if len(sources) > 1 and wants:
            # Sums that cannot be added first: each goes to the first reader's layout on its own.
            apart = reduce(np.logical_or, new[1:]) & (wants[0] >= 0)
            paid = [
                np.where(mine & apart, self.layouts.seconds(s, wants[0])[0], 0.0)
                for s, mine in zip(sources, new, strict=False)
                if mine.any()
            ]
            total, have, new = sum(paid, start=total), [np.where(apart, wants[0], sources[0])], new[:1]
        for want in {(w.shape, w.tobytes()): w for w in wants}.values():  # nobody pays for what is there
            ways = [self.layouts.seconds(s, want) for s in have]
            best, then = ways[0]
            for seconds, state in ways[1:]:
                then, best = np.where(seconds < best, state, then), np.minimum(seconds, best)
            total, have, new = total + best, [*have, then], [*new, np.array(False)]
        if record.returned is not None:
            left = reduce(np.logical_and, map(self.layouts.owes, have))
            paid = [np.where(left, self.layouts.seconds(s, np.array(-2))[0], 0.0) for s in have]
            total = total + sum(np.where(mine, seconds, 0.0) for mine, seconds in zip(new, paid, strict=True))
        return total * (HOLDING if record.held else 1.0)


def _counted(terms: Iterable[tuple[Numbers, int]]) -> list[tuple[Numbers, int]]:
    """Each of them once, with their number: most terms of a long sum are laid out alike."""
    found: dict[object, tuple[Numbers, int]] = {}
    for s, n in terms:
        found[s.shape, s.tobytes()] = s, found.get((s.shape, s.tobytes()), (s, 0))[1] + n
    return [*found.values()]


def _without_repeats(joins: Sequence[Numbers]) -> list[Numbers]:
    """Without those that follow one of the same layout."""
    return [next(same) for _, same in groupby(joins, lambda s: (s.shape, s.tobytes()))]


def _new(sources: Sequence[Numbers]) -> list[NDArray[np.bool_]]:
    """Where each of them is none of those before it."""
    found: list[NDArray[np.bool_]] = []
    before: dict[object, Numbers] = {}
    for s in sources:
        key = s.shape, s.tobytes()
        if key in before:
            found.append(np.array(False))
        else:
            found.append(reduce(np.logical_and, (s != t for t in before.values()), np.array(True)))
            before[key] = s
    return found


def settled(cut: FactorAxes, pending: Sequence[Axis], leaves: Sequence[tuple[Sequence[Axis], int]]) -> FactorAxes:
    """Where a sum goes that is returned while it is pending over axes: to leaves, given as (axes it wants, size).

    So gradients land like parameters.
    """
    out = list(cut)
    for axis in pending:
        for j, (wants, size) in enumerate(leaves):
            if axis in wants and size >= group_size(out[j]) * axis.size:
                out[j] = (*out[j], axis)
                break
    return tuple(out)


def _resolved(end: End, slots: Sequence[Axes]) -> State:
    cut = tuple(() if s is None else slots[s] for s in end.slots)
    # What went round was reduced on the way.
    return cut, tuple(a for s in end.pending for a in slots[s] if not any(a in axes for axes in cut))
