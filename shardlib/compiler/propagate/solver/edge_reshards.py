"""The reshards of a value: from where it is made to every distinct layout in which it is read.

A pending sum is reduced once; sums that only meet in an addition are added first and then paid once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardlib.compiler.propagate.solver.bucket_elimination import GRAIN, Costs, Numbers
from shardlib.compiler.propagate.solver.edges import End, Kind, Record
from shardlib.sharding import reshard
from shardlib.sharding.mesh.axis import Axis, ways
from shardlib.sharding.reshard import USUAL, Axes, Cut, Leaves, Prices, Rough

# An activation that moves is gone soon, a gathered parameter stays for half a step: near a tie, move activations.
HOLDING = 1.25

State = tuple[Cut, tuple[Axis, ...]]  # how a value is cut, and what it owes


class Moves:
    """The reshards of `count` values that are one record, by the states of their ends; states are numbered.

    A `rough` figure takes each reshard by what its axes do, without looking for its steps. The best steps at some
    `prices` are taken, and charged as `paid` says, or by these; a `share` of them where arithmetic hides the rest.
    """

    def __init__(
        self, record: Record, count: int, prices: Prices = USUAL, paid: Prices | None = None, share: float = 1.0
    ) -> None:
        self.share = (HOLDING if record.held else 1.0) * (share if record.hidden else 1.0)
        self.record, self.count, self.prices, self.paid = record, count, prices, paid or prices
        self.flat = tuple(n for dim in record.sizes for n in dim)
        self.ends = (*record.sources, *record.readers, *record.through)
        self._number: dict[State, int] = {}
        self._states: list[State] = []
        self._owing = np.empty(0, np.bool_)
        self._rough = Rough(self._states, self.flat, record.itemsize, self.paid)
        # Rough or not, from every state to -2, -1 and every state: seconds (nan: nobody asked), and what is there then.
        nowhere = np.empty((0, 2)), np.empty((0, 2), np.int64)
        self._ways: dict[bool, tuple[Costs, Numbers]] = {False: nowhere, True: nowhere}
        # Of states that are reached, or left, in factors of their own: the dims that these are, these, and the cut.
        self._into: dict[int, tuple[Leaves, Leaves, Cut]] = {}
        self.still = {p: self._fixed(e) for p, e in enumerate(self.ends) if e.kind is None}
        self.places = {k: tuple(p for p, e in enumerate(self.ends) if e.kind == k) for k in record.kinds}

    def number(self, state: State) -> int:
        """The number of a state."""
        if (known := self._number.get(state)) is None:
            known = self._number[state] = len(self._states)
            self._states.append(state)
        return known

    def _fixed(self, end: End) -> int:
        """The number of the state of an end that is fixed; of one with factors of its own, another than of its cut."""
        if end.into is None:
            return self.number((end.cut, ()))
        self._into[len(self._states)] = end.dims or self.record.sizes, *end.into
        self._states.append((end.cut, ()))
        return len(self._states) - 1

    def seconds(self, decided: Mapping[Kind, Sequence[Sequence[int]]], *, rough: bool = False) -> Costs:
        """Seconds of all reshards: a dim for each kind that has a choice, along which are the states of its ends,
        choice after choice. A value may have readers of more kinds than an array has dims."""
        along = {k: i for i, k in enumerate(k for k, choices in decided.items() if len(choices) > 1)}
        at = [np.array(self.still.get(p, 0)) for p in range(len(self.ends))]
        for kind, choices in decided.items():
            for p, states in zip(self.places[kind], zip(*choices, strict=True), strict=True):
                at[p] = np.array(states).reshape([-1, *[1] * (len(along) - along[kind] - 1)] if kind in along else [])
        shape = [len(decided[k]) for k in along]
        seconds = np.broadcast_to(self._seconds(at, rough), shape)
        return np.asarray(np.rint(seconds * (self.count / GRAIN)) * GRAIN)

    def _seconds(self, at: list[Numbers], rough: bool) -> Costs:
        record = self.record
        n, m = len(record.sources), len(record.sources) + len(record.readers)
        sources, wants = at[:n], at[n:m]
        if record.through:
            came = reduce(lambda found, s: np.where(self._owes(s), s, found), reversed(at[m:]), np.array(-1))
            sources = [np.where(came < 0, s, came) for s in sources]
        new = _new(sources)
        if record.late:
            # What a reader needs in own rows only it also takes while these are pending: others have what they need.
            late = reduce(np.logical_or, map(self._owes, sources))
            wants = [w if e.pending else np.where(late, -1, w) for w, e in zip(wants, record.readers, strict=True)]
        total, have = np.array(0.0), sources
        if len(sources) > 1 and wants:
            # Sums that cannot be added first: each goes to the first reader's layout on its own.
            apart = reduce(np.logical_or, new[1:]) & (wants[0] >= 0)
            paid = [
                np.where(mine & apart, self._paid(s, wants[0], rough)[0], 0.0)
                for s, mine in zip(sources, new, strict=False)
                if mine.any()
            ]
            total, have, new = sum(paid, total), [np.where(apart, wants[0], sources[0])], new[:1]
        for want in {(w.shape, w.tobytes()): w for w in wants}.values():  # nobody pays for what is there
            ways = [self._paid(s, want, rough) for s in have]
            best, then = ways[0]
            for seconds, state in ways[1:]:
                then, best = np.where(seconds < best, state, then), np.minimum(seconds, best)
            total, have, new = total + best, [*have, then], [*new, np.array(False)]
        if record.returned is not None:
            left = reduce(np.logical_and, map(self._owes, have))
            paid = [np.where(left, self._paid(s, np.array(-2), rough)[0], 0.0) for s in have]
            total = total + sum(np.where(mine, seconds, 0.0) for mine, seconds in zip(new, paid, strict=True))
        return total * self.share

    def _owes(self, states: Numbers) -> NDArray[np.bool_]:
        if len(self._owing) <= len(self._states):  # the last one is nothing's, number -1
            self._owing = np.array([bool(pending) for _, pending in self._states] + [False])
        return self._owing[states]

    def _paid(self, sources: Numbers, wants: Numbers, rough: bool) -> tuple[Costs, Numbers]:
        """Seconds from states to others, to nothing (-1), or to where a result goes whose layout nobody fixed (-2); and
        what is there then."""
        at = sources, wants + 2
        seconds, then = self._known(rough)
        if (gaps := np.isnan(seconds[at])).any():
            n = seconds.shape[1]
            asked = np.divmod(np.unique((at[0] * n + at[1])[gaps]), n)
            found = self._found(asked[0], asked[1] - 2, rough)
            seconds, then = self._known(rough)
            seconds[asked], then[asked] = found
        return seconds[at], then[at]

    def _found(self, sources: Numbers, wants: Numbers, rough: bool) -> tuple[Costs, Numbers]:
        """`_way` of many; roughly, of all at once that are cuts of the value's own factors."""
        seconds, then = np.empty(len(wants)), wants.copy()
        own = (wants >= 0) & ~np.isin(wants, [*self._into]) & ~np.isin(sources, [*self._into]) & rough
        seconds[own] = self._rough.seconds(sources[own], wants[own])
        for i in np.flatnonzero(own & self._owes(wants)):
            then[i] = self._left(int(sources[i]), self._states[wants[i]])
        for i in np.flatnonzero(~own):
            seconds[i], then[i] = self._way(int(sources[i]), int(wants[i]), rough)
        return seconds, then

    def _known(self, rough: bool) -> tuple[Costs, Numbers]:
        """The tables, with room for all states."""
        seconds, then = self._ways[rough]
        if (n := len(self._states)) > len(seconds):
            shape = n + 8, n + 10
            before, (seconds, then) = (seconds, then), (np.full(shape, np.nan), np.zeros(shape, np.int64))
            there = tuple(map(slice, before[0].shape))
            seconds[there], then[there] = before
            self._ways[rough] = seconds, then
        return seconds, then

    def _way(self, source: int, want: int, rough: bool) -> tuple[float, int]:
        if want == -1:
            return 0.0, source
        (cut, pending), into, given = self._states[source], self._into.get(want), self._into.get(source)
        if want < 0:
            leaves = zip(self.record.returned or (), self.flat, strict=True)
            goal: State = settled(cut, pending, list(leaves)), ()
        else:
            goal = self._states[want]
        (to, _), then, seconds = goal, self._left(source, goal), self._routed(source, goal, rough)
        if given is not None:
            return self._from(given[1:], cut, to, seconds), then
        found = reshard.crossings(into[0], self.record.itemsize, to, cut, *into[1:]) if into else None
        if found is not None:
            via, steps = found
            crossed = self._routed(source, (via, ()), rough) + reshard.crossed_seconds(steps, self.paid)
            if crossed < seconds:
                return crossed, self.number((via, ()))
        return seconds, then

    def _from(self, given: tuple[Leaves, Cut], cut: Cut, to: Cut, whole: float) -> float:
        """Seconds from a cut of other factors to one of these: by what ranges have in common, or by making dims whole,
        from where it takes `whole` more."""
        leaves, src = given
        sizes, itemsize = self.record.sizes, self.record.itemsize
        theirs, mine, made, near = iter(src), iter(zip(cut, to, strict=True)), list[Axes](), list[Axes]()
        for a, b in zip(leaves, sizes, strict=True):
            ends, _ = [next(mine) for _ in b], [next(theirs) for _ in a]
            made += [x for x, _ in ends] if a == b else [()] * len(a)
            near += [x for _, x in ends] if a == b else [()] * len(a)
        whole += reshard.seconds(reshard.route(leaves, itemsize, src, tuple(made), (), prices=self.prices), self.paid)
        found = reshard.crossings(leaves, itemsize, tuple(near), src, sizes, to)
        if found is None:
            return whole
        via, steps = found
        before = reshard.seconds(reshard.route(leaves, itemsize, src, via, (), prices=self.prices), self.paid)
        return min(whole, before + reshard.crossed_seconds(steps, self.paid))

    def _left(self, source: int, goal: State) -> int:
        """The number of the state behind a way to a goal where more may be pending than at the source."""
        return self.number((goal[0], tuple(a for a in self._states[source][1] if a in goal[1])))

    def _routed(self, source: int, goal: State, rough: bool) -> float:
        if rough:
            return float(self._rough.seconds(np.array([source]), np.array([self.number(goal)])).item())
        (cut, pending), sizes, itemsize = self._states[source], self.record.sizes, self.record.itemsize
        left = tuple(a for a in pending if a not in goal[1])
        return reshard.seconds(reshard.route(sizes, itemsize, cut, goal[0], left, prices=self.prices), self.paid)


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


def settled(cut: Cut, pending: Sequence[Axis], leaves: Sequence[tuple[Sequence[Axis], int]]) -> Cut:
    """Where a sum goes that is returned while it is pending over axes: to leaves, given as (axes it wants, size).

    So gradients land like parameters.
    """
    out = list(cut)
    for axis in pending:
        for j, (wants, size) in enumerate(leaves):
            if axis in wants and size >= ways(out[j]) * axis.size:
                out[j] = (*out[j], axis)
                break
    return tuple(out)
