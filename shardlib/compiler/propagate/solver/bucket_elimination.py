"""Finds the minimum of a sum of tables over variables.

Variables are eliminated one by one: the tables with a variable are added, and the sum is minimized over its choices
(bucket elimination). If the sum would be too large, parts of it are minimized separately, as if the variable could
choose again for each (mini-buckets): that gives a lower bound. Choices that are never better than another one are
removed first; without them most tables are small.

Costs are multiples of `GRAIN`, so that sums do not depend on their order, and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

GRAIN = 2.0**-47  # seconds
_AT_ONCE = 1 << 14  # the most differences in one array

LARGEST_TABLE = 1 << 20  # entries

Costs = NDArray[np.float64]
Numbers = NDArray[np.int64]
VariableId = int


def round_to_grain(seconds: float) -> float:
    """Returns the nearest multiple of `GRAIN`."""
    return round(seconds / GRAIN) * GRAIN


def round_costs(costs: Costs) -> Costs:
    """Returns the nearest multiples of `GRAIN`."""
    return np.asarray(np.rint(costs / GRAIN) * GRAIN)


@dataclass(frozen=True)
class Table:
    """Costs over some variables: a dim for each variable, an entry for each class of choices with equal costs.

    `classes` has the class of every choice, for each of `variables`.
    """

    variables: tuple[VariableId, ...]
    costs: Costs
    classes: tuple[Numbers, ...]

    def at(self, choice: Mapping[VariableId, int]) -> tuple[int, ...]:
        """Returns the index of the cost of a choice of every variable."""
        return tuple(int(class_of[choice[k]]) for k, class_of in zip(self.variables, self.classes, strict=True))

    @property
    def size(self) -> int:
        """Returns the number of entries with one for every choice."""
        return math.prod(map(len, self.classes))

    def dense(self) -> Costs:
        """Returns the costs with an entry for every choice."""
        return reduce(lambda costs, i: costs.take(self.classes[i], axis=i), range(len(self.classes)), self.costs)

    def without(self, variable: VariableId, kept: Numbers) -> Table:
        """Returns the table of the kept choices of a variable."""
        i = self.variables.index(variable)
        is_kept = np.zeros(self.costs.shape[i], np.bool_)
        is_kept[self.classes[i][kept]] = True
        which = (np.cumsum(is_kept) - 1)[self.classes[i][kept]]
        classes = (*self.classes[:i], which, *self.classes[i + 1 :])
        return replace(self, costs=self.costs.take(np.flatnonzero(is_kept), axis=i), classes=classes)

    def advantage(self, variable: VariableId) -> Costs:
        """Returns by how much at least each choice of a variable costs more than each other one."""
        i = self.variables.index(variable)
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

    variables: tuple[VariableId, ...]
    costs: Costs

    def chosen(self, variables: Container[VariableId]) -> DenseTable:
        """Returns the table without dims of single choices."""
        left = [i for i, k in enumerate(self.variables) if k in variables]
        costs = self.costs.reshape([self.costs.shape[i] for i in left])
        return DenseTable(tuple(self.variables[i] for i in left), costs)

    def over(self, variables: Sequence[VariableId]) -> Costs:
        """Returns the costs, shaped for a broadcast over more variables."""
        sizes = dict(zip(self.variables, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(k, 1) for k in variables])

    def minimized(self, variable: VariableId) -> DenseTable:
        """Returns the least costs over all choices of a variable."""
        i = self.variables.index(variable)
        return DenseTable((*self.variables[:i], *self.variables[i + 1 :]), self.costs.min(axis=i))

    def find_least(self, variable: VariableId) -> Costs:
        """Returns the least cost of every choice of a variable."""
        others = tuple(i for i, k in enumerate(self.variables) if k != variable)
        return self.costs.min(axis=others) if others else self.costs


@dataclass(frozen=True)
class Least:
    """A lower bound, which the `choices` reach if it is `exact`."""

    seconds: float
    exact: bool
    choices: dict[VariableId, int]
    last: Costs  # the bound for every choice of the variable eliminated last


def find_least(
    tables: Sequence[Table],
    sizes: Mapping[VariableId, int],
    largest: int = 1 << 16,
    *,
    written: int = LARGEST_TABLE,
    turns: int = 0,
) -> Least:
    """Returns the least sum of tables, or a lower bound, with sums of at most `largest` entries.

    A table with more than `written` entries counts nothing. A lower bound is raised in some `turns`.
    """
    tables, kept = _pruned(tables, sizes)
    left = {variable: len(some) for variable, some in kept.items()}
    some = [DenseTable(t.variables, t.dense()) for t in tables if t.size <= written]
    best = _eliminated(some, left, largest)
    if not best.exact and turns:
        best = max(best, _eliminated(_shifted(some, left, turns), left, largest), key=lambda way: way.seconds)
    choices = {variable: int(kept[variable][i]) for variable, i in best.choices.items()}
    return replace(best, exact=best.exact and len(some) == len(tables), choices=choices)


def find_floors(tables: Sequence[Table], sizes: Mapping[VariableId, int], largest: int) -> dict[VariableId, Costs]:
    """Returns, for every choice of every variable, a lower bound on sums with this choice."""
    some = [DenseTable(t.variables, t.dense()) for t in tables if t.size <= LARGEST_TABLE]
    return {variable: _eliminated(some, sizes, largest, variable).last for variable in sizes}


def _pruned(tables: Sequence[Table], sizes: Mapping[VariableId, int]) -> tuple[list[Table], dict[VariableId, Numbers]]:
    """Removes choices that are never better than another one; returns the tables and the choices left."""
    tables, kept = list(tables), {variable: np.arange(size) for variable, size in sizes.items()}
    tables_of: dict[VariableId, list[int]] = {variable: [] for variable in sizes}
    for n, table in enumerate(tables):
        for variable in table.variables:
            tables_of[variable].append(n)
    to_check = {variable for variable, size in sizes.items() if size > 1}
    while to_check:
        variable = min(to_check)
        to_check.remove(variable)
        more = sum((tables[n].advantage(variable) for n in tables_of[variable]), np.zeros(()))
        better = (more > 0) | ((more == 0) & (np.arange(len(more))[:, None] > np.arange(len(more))))
        left = np.flatnonzero(~better.any(axis=1))
        if len(left) < len(more):
            kept[variable] = kept[variable][left]
            for n in tables_of[variable]:
                tables[n] = tables[n].without(variable, left)
            to_check |= {k for n in tables_of[variable] for k in tables[n].variables if len(kept[k]) > 1} - {variable}
    return tables, kept


def _eliminated(
    tables: Sequence[DenseTable], sizes: Mapping[VariableId, int], largest: int, last: VariableId | None = None
) -> Least:
    """Eliminates all variables, `last` at the end; returns the minimum or a lower bound, and good choices."""
    tables_of: dict[VariableId, list[DenseTable]] = {variable: [] for variable, size in sizes.items() if size > 1}
    seconds, exact, history = 0.0, True, list[tuple[VariableId, list[DenseTable]]]()

    def put(table: DenseTable) -> float:
        """Notes a table; returns its cost if it has no variable."""
        for variable in table.variables:
            tables_of[variable].append(table)
        return 0.0 if table.variables else float(table.costs)

    ends = np.zeros(1)
    seconds += sum(put(table.chosen(tables_of)) for table in tables)
    joined = {variable: _joined(variable, tables_of[variable], sizes) for variable in tables_of}
    while joined:
        variable = min(joined, key=lambda k: (k == last, joined[k], k))
        del joined[variable]
        mine = tables_of[variable]
        around = {k for t in mine for k in t.variables} - {variable}
        for k in around:
            tables_of[k] = [t for t in tables_of[k] if variable not in t.variables]
        groups = _groups(mine, sizes, largest)
        exact &= len(groups) < 2
        ends = sum((t.costs for t in groups), np.zeros(sizes[variable])) + seconds if not joined else ends
        seconds += sum(put(t.minimized(variable)) for t in _balanced(variable, groups))
        joined |= {k: _joined(k, tables_of[k], sizes) for k in around}
        history.append((variable, mine))
    answer = dict.fromkeys(sizes, 0)
    for variable, mine in reversed(history):
        costs = (t.costs[tuple(answer[k] if k != variable else slice(None) for k in t.variables)] for t in mine)
        answer[variable] = int(np.argmin(sum(costs, np.zeros(sizes[variable]))))
    return Least(seconds, exact, answer, ends if last in tables_of else np.array([seconds]))


def _shifted(tables: Sequence[DenseTable], sizes: Mapping[VariableId, int], turns: int) -> list[DenseTable]:
    """Returns tables with the same sum, and a higher bound: balances costs, variable by variable."""
    tables = list(tables)
    for _ in range(turns):
        for variable in (k for k, size in sizes.items() if size > 1):
            mine = [t for t in tables if variable in t.variables]
            tables = [t for t in tables if variable not in t.variables] + [*_balanced(variable, mine)]
    return tables


def _joined(variable: VariableId, tables: Sequence[DenseTable], sizes: Mapping[VariableId, int]) -> int:
    """Returns the number of entries of the sum of a variable's tables."""
    return math.prod(sizes[k] for k in {k for t in tables for k in (variable, *t.variables)})


def _groups(tables: Sequence[DenseTable], sizes: Mapping[VariableId, int], largest: int) -> list[DenseTable]:
    """Adds tables, as many as fit into a sum that is not too large."""
    groups: list[list[DenseTable]] = []
    for table in sorted(tables, key=lambda t: -t.costs.size):
        for group in groups:
            if math.prod(sizes[k] for k in {k for t in (*group, table) for k in t.variables}) <= largest:
                group.append(table)
                break
        else:
            groups.append([table])
    return [_added(group) for group in groups]


def _added(tables: Sequence[DenseTable]) -> DenseTable:
    variables = tuple(sorted({k for t in tables for k in t.variables}))
    return DenseTable(variables, reduce(np.add, (t.over(variables) for t in tables)))


def _balanced(variable: VariableId, groups: Sequence[DenseTable]) -> Sequence[DenseTable]:
    """Returns tables with the same sum that agree about the least cost of each choice of a variable."""
    if len(groups) < 2:
        return groups
    least = [t.find_least(variable) for t in groups]
    mean = sum(least) / len(least)
    return [_added([t, DenseTable((variable,), mean - mine)]) for t, mine in zip(groups, least, strict=True)]
