"""Finds the minimum of a sum of tables over variables, each named by a unit class (`kind`).

Variables are eliminated one by one: the tables with a variable are added, and the sum is minimized over its choices
(bucket elimination). If the sum would be too large, parts of it are minimized separately, as if the variable could
choose again for each (mini-buckets): that gives a lower bound. Choices that are never better than another one are
removed first; without them most tables are small.

Costs are whole multiples of `GRAIN`, so that sums do not depend on their order, and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardlib.compiler.propagate.solver.value_records import UnitClass

GRAIN = 2.0**-47  # seconds
_AT_ONCE = 1 << 14  # the most differences in one array

LARGEST_TABLE = 1 << 20  # entries

Costs = NDArray[np.float64]
Numbers = NDArray[np.int64]


def round_to_grain(seconds: float) -> float:
    """Returns the nearest multiple of `GRAIN`."""
    return round(seconds / GRAIN) * GRAIN


def round_costs(costs: Costs) -> Costs:
    """Returns the nearest multiples of `GRAIN`."""
    return np.asarray(np.rint(costs / GRAIN) * GRAIN)


@dataclass(frozen=True)
class Table:
    """Costs over some variables: a dim for each variable, an entry for each class of choices with equal costs.

    `classes` has the class of every choice, for each of `kinds`.
    """

    kinds: tuple[UnitClass, ...]
    costs: Costs
    classes: tuple[Numbers, ...]

    def at(self, choice: Mapping[UnitClass, int]) -> tuple[int, ...]:
        """Returns the index of the cost of a choice of every variable."""
        return tuple(int(class_of[choice[k]]) for k, class_of in zip(self.kinds, self.classes, strict=True))

    @property
    def size(self) -> int:
        """Returns the number of entries with one for every choice."""
        return math.prod(map(len, self.classes))

    def whole(self) -> Costs:
        """Returns the costs with an entry for every choice."""
        return reduce(lambda costs, i: costs.take(self.classes[i], axis=i), range(len(self.classes)), self.costs)

    def without(self, kind: UnitClass, kept: Numbers) -> Table:
        """Returns the table of the kept choices of a variable."""
        i = self.kinds.index(kind)
        is_kept = np.zeros(self.costs.shape[i], np.bool_)
        is_kept[self.classes[i][kept]] = True
        which = (np.cumsum(is_kept) - 1)[self.classes[i][kept]]
        classes = (*self.classes[:i], which, *self.classes[i + 1 :])
        return replace(self, costs=self.costs.take(np.flatnonzero(is_kept), axis=i), classes=classes)

    def advantage(self, kind: UnitClass) -> Costs:
        """Returns by how much at least each choice of a variable costs more than each other one."""
        i = self.kinds.index(kind)
        rows = self.costs.swapaxes(0, i).reshape(self.costs.shape[i], -1)  # the order of the others does not matter
        if rows.size * len(rows) <= _AT_ONCE:
            least = (rows[:, None] - rows).min(axis=2)
        else:
            least = np.stack([(row - rows).min(axis=1) for row in rows])
        among: Costs = least.take(self.classes[i], axis=0).take(self.classes[i], axis=1)
        return among


@dataclass(frozen=True)
class DenseTable:
    """Costs over some variables, in order, with an entry for every choice."""

    kinds: tuple[UnitClass, ...]
    costs: Costs

    def chosen(self, kinds: Container[UnitClass]) -> DenseTable:
        """Returns the table without dims of single choices."""
        left = [i for i, k in enumerate(self.kinds) if k in kinds]
        return DenseTable(tuple(self.kinds[i] for i in left), self.costs.reshape([self.costs.shape[i] for i in left]))

    def over(self, kinds: Sequence[UnitClass]) -> Costs:
        """Returns the costs, shaped for a broadcast over more variables."""
        sizes = dict(zip(self.kinds, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(k, 1) for k in kinds])

    def minimized(self, kind: UnitClass) -> DenseTable:
        """Returns the least costs over all choices of a variable."""
        return DenseTable(tuple(k for k in self.kinds if k != kind), self.costs.min(axis=self.kinds.index(kind)))

    def find_least(self, kind: UnitClass) -> Costs:
        """Returns the least cost of every choice of a variable."""
        others = tuple(i for i, k in enumerate(self.kinds) if k != kind)
        return self.costs.min(axis=others) if others else self.costs


@dataclass(frozen=True)
class Least:
    """A lower bound, which the `choices` reach if it is `exact`."""

    seconds: float
    exact: bool
    choices: dict[UnitClass, int]
    last: Costs  # the bound for every choice of the variable eliminated last


def find_least(
    tables: Sequence[Table],
    sizes: Mapping[UnitClass, int],
    largest: int = 1 << 16,
    *,
    written: int = LARGEST_TABLE,
    turns: int = 0,
) -> Least:
    """Returns the least sum of tables, or a lower bound, with sums of at most `largest` entries.

    A table with more than `written` entries counts nothing. A lower bound is raised in some `turns`.
    """
    tables, kept = _pruned(tables, sizes)
    left = {kind: len(some) for kind, some in kept.items()}
    some = [DenseTable(t.kinds, t.whole()) for t in tables if t.size <= written]
    best = _eliminated(some, left, largest)
    if not best.exact and turns:
        best = max(best, _eliminated(_shifted(some, left, turns), left, largest), key=lambda way: way.seconds)
    choices = {kind: int(kept[kind][i]) for kind, i in best.choices.items()}
    return replace(best, exact=best.exact and len(some) == len(tables), choices=choices)


def find_floors(tables: Sequence[Table], sizes: Mapping[UnitClass, int], largest: int) -> dict[UnitClass, Costs]:
    """Returns, for every choice of every variable, a lower bound on sums with this choice."""
    some = [DenseTable(t.kinds, t.whole()) for t in tables if t.size <= LARGEST_TABLE]
    return {kind: _eliminated(some, sizes, largest, kind).last for kind in sizes}


def _pruned(tables: Sequence[Table], sizes: Mapping[UnitClass, int]) -> tuple[list[Table], dict[UnitClass, Numbers]]:
    """Removes choices that are never better than another one; returns the tables and the choices left."""
    tables, kept = list(tables), {kind: np.arange(size) for kind, size in sizes.items()}
    tables_of: dict[UnitClass, list[int]] = {kind: [] for kind in sizes}
    for n, table in enumerate(tables):
        for kind in table.kinds:
            tables_of[kind].append(n)
    to_check = {kind for kind, size in sizes.items() if size > 1}
    while to_check:
        kind = min(to_check)
        to_check.remove(kind)
        more = sum((tables[n].advantage(kind) for n in tables_of[kind]), np.zeros(()))
        better = (more > 0) | ((more == 0) & (np.arange(len(more))[:, None] > np.arange(len(more))))
        left = np.flatnonzero(~better.any(axis=1))
        if len(left) < len(more):
            kept[kind] = kept[kind][left]
            for n in tables_of[kind]:
                tables[n] = tables[n].without(kind, left)
            to_check |= {k for n in tables_of[kind] for k in tables[n].kinds if len(kept[k]) > 1} - {kind}
    return tables, kept


def _eliminated(
    tables: Sequence[DenseTable], sizes: Mapping[UnitClass, int], largest: int, last: UnitClass | None = None
) -> Least:
    """Eliminates all variables, `last` at the end; returns the minimum or a lower bound, and good choices."""
    tables_of: dict[UnitClass, list[DenseTable]] = {kind: [] for kind, size in sizes.items() if size > 1}
    seconds, exact, history = 0.0, True, list[tuple[UnitClass, list[DenseTable]]]()

    def put(table: DenseTable) -> float:
        """Notes a table; returns its cost if it has no variable."""
        for kind in table.kinds:
            tables_of[kind].append(table)
        return 0.0 if table.kinds else float(table.costs)

    ends = np.zeros(1)
    seconds += sum(put(table.chosen(tables_of)) for table in tables)
    joined = {kind: _joined(kind, tables_of[kind], sizes) for kind in tables_of}
    while joined:
        kind = min(joined, key=lambda k: (k == last, joined[k], k))
        del joined[kind]
        mine = tables_of[kind]
        around = {k for t in mine for k in t.kinds} - {kind}
        for k in around:
            tables_of[k] = [t for t in tables_of[k] if kind not in t.kinds]
        groups = _groups(mine, sizes, largest)
        exact &= len(groups) < 2
        ends = sum((t.costs for t in groups), np.zeros(sizes[kind])) + seconds if not joined else ends
        seconds += sum(put(t.minimized(kind)) for t in _balanced(kind, groups))
        joined |= {k: _joined(k, tables_of[k], sizes) for k in around}
        history.append((kind, mine))
    answer = dict.fromkeys(sizes, 0)
    for kind, mine in reversed(history):
        costs = (t.costs[tuple(answer[k] if k != kind else slice(None) for k in t.kinds)] for t in mine)
        answer[kind] = int(np.argmin(sum(costs, np.zeros(sizes[kind]))))
    return Least(seconds, exact, answer, ends if last in tables_of else np.array([seconds]))


def _shifted(tables: Sequence[DenseTable], sizes: Mapping[UnitClass, int], turns: int) -> list[DenseTable]:
    """Returns tables with the same sum, and a higher bound: balances costs, variable by variable."""
    tables = list(tables)
    for _ in range(turns):
        for kind in (k for k, size in sizes.items() if size > 1):
            mine = [t for t in tables if kind in t.kinds]
            tables = [t for t in tables if kind not in t.kinds] + [*_balanced(kind, mine)]
    return tables


def _joined(kind: UnitClass, tables: Sequence[DenseTable], sizes: Mapping[UnitClass, int]) -> int:
    """Returns the number of entries of the sum of a variable's tables."""
    return math.prod(sizes[k] for k in {k for t in tables for k in (kind, *t.kinds)})


def _groups(tables: Sequence[DenseTable], sizes: Mapping[UnitClass, int], largest: int) -> list[DenseTable]:
    """Adds tables, as many as fit into a sum that is not too large."""
    groups: list[list[DenseTable]] = []
    for table in sorted(tables, key=lambda t: -t.costs.size):
        for group in groups:
            if math.prod(sizes[k] for k in {k for t in (*group, table) for k in t.kinds}) <= largest:
                group.append(table)
                break
        else:
            groups.append([table])
    return [_added(group) for group in groups]


def _added(tables: Sequence[DenseTable]) -> DenseTable:
    kinds = tuple(sorted({k for t in tables for k in t.kinds}))
    return DenseTable(kinds, reduce(np.add, (t.over(kinds) for t in tables)))


def _balanced(kind: UnitClass, groups: Sequence[DenseTable]) -> Sequence[DenseTable]:
    """Returns tables with the same sum that agree about the least cost of each choice of a variable."""
    if len(groups) < 2:
        return groups
    least = [t.find_least(kind) for t in groups]
    mean = sum(least) / len(least)
    return [_added([t, DenseTable((kind,), mean - mine)]) for t, mine in zip(groups, least, strict=True)]
