"""The minimum of a sum of costs, each of the choices of some kinds of units.

A kind is minimized out: the costs in which it has a part become one, of the other kinds in them (bucket elimination).
Where that table would be too large, parts of these costs are minimized apart, as if the kind could choose for each of
them anew (mini-buckets): that gives less than the minimum, never more. Choices that are never better than another one
go first; without them most tables are small.

Costs are whole multiples of `GRAIN`, so that sums do not depend on their order, and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardlib.compiler.propagate.solver.edges import Kind

GRAIN = 2.0**-47  # seconds
_AT_ONCE = 1 << 14  # differences that are one array

Costs = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """A cost of the choices of some kinds: one dim for each, an entry for every class of choices that cost the same.

    `classes` has the class of every choice, for each of `kinds`.
    """

    kinds: tuple[Kind, ...]
    costs: Costs
    classes: tuple[Numbers, ...]

    def at(self, choice: Mapping[Kind, int]) -> tuple[int, ...]:
        """Where the cost of a choice of every kind is."""
        return tuple(int(of[choice[k]]) for k, of in zip(self.kinds, self.classes, strict=True))

    @property
    def size(self) -> int:
        """Entries with one for every choice."""
        return math.prod(map(len, self.classes))

    def whole(self) -> Costs:
        """The costs, with an entry for every choice."""
        return reduce(lambda costs, i: costs.take(self.classes[i], axis=i), range(len(self.classes)), self.costs)

    def without(self, kind: Kind, kept: Numbers) -> Table:
        """The table of those choices of a kind that are kept."""
        i = self.kinds.index(kind)
        there = np.zeros(self.costs.shape[i], np.bool_)
        there[self.classes[i][kept]] = True
        which = (np.cumsum(there) - 1)[self.classes[i][kept]]
        classes = (*self.classes[:i], which, *self.classes[i + 1 :])
        return replace(self, costs=self.costs.take(np.flatnonzero(there), axis=i), classes=classes)

    def advantage(self, kind: Kind) -> Costs:
        """By how much at least each choice of a kind costs more than each other one, whatever the others choose."""
        i = self.kinds.index(kind)
        rows = self.costs.swapaxes(0, i).reshape(self.costs.shape[i], -1)  # the order of the others does not matter
        if rows.size * len(rows) <= _AT_ONCE:
            least = (rows[:, None] - rows).min(axis=2)
        else:
            least = np.stack([(row - rows).min(axis=1) for row in rows])
        among: Costs = least.take(self.classes[i], axis=0).take(self.classes[i], axis=1)
        return among


@dataclass(frozen=True)
class Whole:
    """A cost of the choices of some kinds, which are in order: an entry for every choice."""

    kinds: tuple[Kind, ...]
    costs: Costs

    def chosen(self, kinds: Container[Kind]) -> Whole:
        """The table of those of its kinds that have a choice."""
        left = [i for i, k in enumerate(self.kinds) if k in kinds]
        return Whole(tuple(self.kinds[i] for i in left), self.costs.reshape([self.costs.shape[i] for i in left]))

    def over(self, kinds: Sequence[Kind]) -> Costs:
        """The costs, to be broadcast over more kinds."""
        sizes = dict(zip(self.kinds, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(k, 1) for k in kinds])

    def minimized(self, kind: Kind) -> Whole:
        """The least cost, whatever the kind chooses."""
        return Whole(tuple(k for k in self.kinds if k != kind), self.costs.min(axis=self.kinds.index(kind)))

    def least(self, kind: Kind) -> Costs:
        """The least cost of every choice of the kind."""
        others = tuple(i for i, k in enumerate(self.kinds) if k != kind)
        return self.costs.min(axis=others) if others else self.costs


@dataclass(frozen=True)
class Least:
    """At least `seconds`, and `exact` where choices reach it; `choices` are good ones, those then."""

    seconds: float
    exact: bool
    choices: dict[Kind, int]
    last: Costs  # the least for every choice of the kind that was left to the end


def least(
    tables: Sequence[Table],
    sizes: Mapping[Kind, int],
    largest: int = 1 << 16,
    *,
    written: int = 1 << 20,
    turns: int = 0,
) -> Least:
    """The least sum of tables, or less, with sums of at most `largest` entries; what has more than `written` counts
    nothing. Where it is less, it is made more in some `turns`.
    """
    tables, kept = _pruned(tables, sizes)
    left = {kind: len(some) for kind, some in kept.items()}
    some = [Whole(t.kinds, t.whole()) for t in tables if t.size <= written]
    found = _eliminated(some, left, largest)
    if not found.exact and turns:
        found = max(found, _eliminated(_shifted(some, left, turns), left, largest), key=lambda way: way.seconds)
    choices = {kind: int(kept[kind][i]) for kind, i in found.choices.items()}
    return replace(found, exact=found.exact and len(some) == len(tables), choices=choices)


def floors(tables: Sequence[Table], sizes: Mapping[Kind, int], largest: int) -> dict[Kind, Costs]:
    """For every choice of every kind a sum that there is not less than with it."""
    some = [Whole(t.kinds, t.whole()) for t in tables if t.size <= 1 << 20]
    return {kind: _eliminated(some, sizes, largest, kind).last for kind in sizes}


def _pruned(tables: Sequence[Table], sizes: Mapping[Kind, int]) -> tuple[list[Table], dict[Kind, Numbers]]:
    """Tables without choices that another one is never worse than, and the choices that are left of every kind."""
    tables, kept = list(tables), {kind: np.arange(size) for kind, size in sizes.items()}
    of: dict[Kind, list[int]] = {kind: [] for kind in sizes}
    for n, table in enumerate(tables):
        for kind in table.kinds:
            of[kind].append(n)
    asked = {kind for kind, size in sizes.items() if size > 1}
    while asked:
        kind = min(asked)
        asked.remove(kind)
        more = sum((tables[n].advantage(kind) for n in of[kind]), np.zeros(()))
        better = (more > 0) | ((more == 0) & (np.arange(len(more))[:, None] > np.arange(len(more))))
        left = np.flatnonzero(~better.any(axis=1))
        if len(left) < len(more):
            kept[kind] = kept[kind][left]
            for n in of[kind]:
                tables[n] = tables[n].without(kind, left)
            asked |= {k for n in of[kind] for k in tables[n].kinds if len(kept[k]) > 1} - {kind}
    return tables, kept


def _eliminated(tables: Sequence[Whole], sizes: Mapping[Kind, int], largest: int, last: Kind | None = None) -> Least:
    """At least the minimum of the sum of all tables, whether it is that, and a good choice for every kind."""
    of: dict[Kind, list[Whole]] = {kind: [] for kind, size in sizes.items() if size > 1}
    seconds, exact, history = 0.0, True, list[tuple[Kind, list[Whole]]]()

    def put(table: Whole) -> float:
        """Note a table; one of no choices is its cost."""
        for kind in table.kinds:
            of[kind].append(table)
        return 0.0 if table.kinds else float(table.costs)

    ends = np.zeros(1)
    seconds += sum(put(table.chosen(of)) for table in tables)
    joined = {kind: _joined(kind, of[kind], sizes) for kind in of}
    while joined:
        kind = min(joined, key=lambda k: (k == last, joined[k], k))
        del joined[kind]
        mine = of[kind]
        around = {k for t in mine for k in t.kinds} - {kind}
        for k in around:
            of[k] = [t for t in of[k] if kind not in t.kinds]
        groups = _groups(mine, sizes, largest)
        exact &= len(groups) < 2
        ends = sum((t.costs for t in groups), np.zeros(sizes[kind])) + seconds if not joined else ends
        seconds += sum(put(t.minimized(kind)) for t in _balanced(kind, groups))
        joined |= {k: _joined(k, of[k], sizes) for k in around}
        history.append((kind, mine))
    answer = dict.fromkeys(sizes, 0)
    for kind, mine in reversed(history):
        found = (t.costs[tuple(answer[k] if k != kind else slice(None) for k in t.kinds)] for t in mine)
        answer[kind] = int(np.argmin(sum(found, np.zeros(sizes[kind]))))
    return Least(seconds, exact, answer, ends if last in of else np.array([seconds]))


def _shifted(tables: Sequence[Whole], sizes: Mapping[Kind, int], turns: int) -> list[Whole]:
    """The same sum of tables, each of which says more of the whole: costs of a choice are shared out, kind by kind."""
    tables = list(tables)
    for _ in range(turns):
        for kind in (k for k, size in sizes.items() if size > 1):
            mine = [t for t in tables if kind in t.kinds]
            tables = [t for t in tables if kind not in t.kinds] + [*_balanced(kind, mine)]
    return tables


def _joined(kind: Kind, tables: Sequence[Whole], sizes: Mapping[Kind, int]) -> int:
    """Entries of the table of all costs of a kind, which are `tables`."""
    return math.prod(sizes[k] for k in {k for t in tables for k in (kind, *t.kinds)})


def _groups(tables: Sequence[Whole], sizes: Mapping[Kind, int], largest: int) -> list[Whole]:
    """Tables added up: as many in each group as go into one that is not too large."""
    groups: list[list[Whole]] = []
    for table in sorted(tables, key=lambda t: -t.costs.size):
        for group in groups:
            if math.prod(sizes[k] for k in {k for t in (*group, table) for k in t.kinds}) <= largest:
                group.append(table)
                break
        else:
            groups.append([table])
    return [_added(group) for group in groups]


def _added(tables: Sequence[Whole]) -> Whole:
    kinds = tuple(sorted({k for t in tables for k in t.kinds}))
    return Whole(kinds, reduce(np.add, (t.over(kinds) for t in tables)))


def _balanced(kind: Kind, groups: Sequence[Whole]) -> Sequence[Whole]:
    """The same sum of tables, in which each has the same least cost for a choice of the kind: so they part less."""
    if len(groups) < 2:
        return groups
    least = [t.least(kind) for t in groups]
    mean = sum(least) / len(least)
    return [_added([t, Whole((kind,), mean - mine)]) for t, mine in zip(groups, least, strict=True)]
