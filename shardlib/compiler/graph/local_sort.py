"""Marks rows that are sorted by group, processed and put back, as tokens are by their experts.

If the program cannot observe the order, each device may sort its own shard of the rows, and nothing is sent.

    ids.sort() -> x[order // k] -> grouped product, silu, mul ... -> back = empty; back[order] = arange -> y[back]
         |------> how many there are of each id -> cumsum -> ends of groups

That holds if every op that depends on the order is one of these: an op that works row by row; a read or write at the
sort's indices, which puts rows in that order, or back; a sum over all rows; a grouped product whose ends count the
sorted keys that are at most 0, 1, 2 ..., so that they fall between the same keys on every device. These ops are marked
(`Op.ordered`, `Value.counted`), and get rules of their own. Lowering checks the decisions (`check`): unless all ops of
a sort are sharded alike, the marks are removed (`forget_orders`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from shardlib.compiler.graph.ir import Graph, Op, Ordered, Value, is_all, is_zero, viewed
from shardlib.compiler.graph.value_facts import EXACT, has_equal_rows, is_index, is_range, uncast
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.rules.derived_rules import derive_rule
from shardlib.rules.iteration_space import arg
from shardlib.rules.local_forms import local_sort as rules
from shardlib.rules.rule import Labels, Rule
from shardlib.sharding.mesh.axis import Axis

_aten = torch.ops.aten
_SORTS = (_aten.sort.default, _aten.sort.stable)
_READS, _WRITES = (_aten.index.Tensor, _aten.index_select.default), (_aten.index_put.default,)
_FLOORS = (_aten.floor_divide.default, _aten.div.Tensor_mode, _aten.div.Scalar_mode)

Cut = Mapping[int, tuple[Axis, ...]]  # dim factors that are sharded, and over which axes


class Noted(NamedTuple):
    """The sharding in which a value of the sort `name` was lowered; `rows`: of its rows, else of a count of them."""

    name: str
    cut: Cut
    rows: bool


class DisorderError(Exception):
    """The program could observe that devices order their own rows."""


class _Order(NamedTuple):
    """The relation of a value to the sort's order.

    Its rows along `dim` are in that order (None: they are not). Its numbers are indices of sorted rows, `times` of
    which share one row (0: they are no indices), or positions in the order (`back`).
    """

    dim: int | None
    times: int = 0
    back: bool = False
    keys: bool = False  # it holds the sorted keys


_BACK = _Order(None, back=True)


def mark_orders(graph: Graph) -> None:
    """Marks ops and values that each device may order by itself."""
    if any(op.rule is not None and op.rule.accesses.groups is not None for op in graph.ops):
        for op in graph.ops:
            if op.target in _SORTS and op.ordered is None and not (op.constant or op.manual):
                _Region(graph, op).mark_orders()


def forget_orders(graph: Graph) -> None:
    """Removes all marks."""
    for op in graph.ops:
        if op.ordered is not None:
            op.rule, op.ordered = op.ordered.plain, None
        for x in op.results:
            if x is not None:
                x.counted = None


def check(noted: Iterable[Noted]) -> None:
    """Raises `DisorderError` unless all rows of a sort are sharded alike, and its counts over other axes or none."""
    rows: dict[str, Cut] = {}
    counted: list[Noted] = []
    for note in noted:
        if not note.rows:
            counted.append(note)
        elif rows.setdefault(note.name, note.cut) != note.cut:
            raise DisorderError
    for name, cut, _ in counted:
        if name not in rows or not _primes(rows[name]).isdisjoint(_primes(cut)):
            raise DisorderError


def _primes(cut: Cut) -> set[Axis]:
    return {p for axes in cut.values() for a in axes for p in a.primes()}


class _Region:
    """All values that depend on a sort; each method raises `DisorderError` where the order can be observed."""

    def __init__(self, graph: Graph, sort: Op) -> None:
        self.sort, self.graph = sort, graph
        self.orders: dict[Value, _Order] = {}
        self.rules: dict[Op, tuple[tuple[str, ...], Rule]] = {}  # with the factors that are rows
        self.summed: dict[Op, tuple[str, ...]] = {}  # ops whose results have no rows any more
        self.ends: dict[Op, Value] = {}
        self.counted: dict[Value, None] = {}

    def mark_orders(self) -> None:
        try:
            self._follow()
            for ends in self.ends.values():
                if not self._are_ends(ends):
                    raise DisorderError
                self._count(ends)
            self._count_alone()
        except DisorderError:
            return
        for x in self.counted:
            x.counted = self.sort.name
        for op, (rows, rule) in self.rules.items() if self.ends else ():
            op.rule, op.ordered = rule, Ordered(self.sort.name, rows, op.required_rule)

    def _follow(self) -> None:
        """Follows the order from the sort to all values that depend on it."""
        for op in self.graph.ops:
            orders = {i: self.orders[x] for i, x in enumerate(op.operands) if x in self.orders}
            if op is self.sort:
                self._sorted(op, _Order(0, keys=True), _Order(0, times=1))
            elif orders and op.target in _SORTS and [*orders.values()] == [_Order(0, times=1)]:
                self._sorted(op, None, _BACK)
            elif orders:
                if op.rule is None or op.manual or op.constrains or op.ordered is not None:
                    raise DisorderError
                if any(x.times or x.back for x in orders.values()) and op.target in (*_READS, *_WRITES):
                    self._at_places(op, op.rule, orders)
                elif op.rule.accesses.groups is not None:
                    self._in_groups(op, op.rule, orders)
                else:
                    self._by_row(op, op.rule, orders)
        if any(x.is_output for x in self.orders):
            raise DisorderError

    def _sorted(self, op: Op, *orders: _Order | None) -> None:
        if (rule := rules.local_sort_rule(op.call)) is None or arg(op.call, "descending"):
            raise DisorderError
        self.rules[op] = rules.ROW_FACTORS, rule
        self.orders |= {x: k for x, k in zip(op.results, orders, strict=True) if x is not None and k is not None}

    def _at_places(self, op: Op, rule: Rule, orders: Mapping[int, _Order]) -> None:
        """Follows a read or write at indices: either the table's rows or the entries are in the order."""
        looks = rule.accesses.lookup
        if looks is None or len(looks.rows) != 1 or len(looks.indices) != 1 or looks.indices[0] not in orders:
            raise DisorderError
        (table,), (at,) = looks.rows, (orders[i] for i in looks.indices)
        labels, times = rule.operands[looks.indices[0]], max(at.times, 1)
        if len(labels) != 1 or len(labels[0]) != 1 or not (at.times or at.back):
            raise DisorderError
        ((entries,),) = labels
        if table == entries or rule.sizes[table] * times != rule.sizes[entries]:
            raise DisorderError
        (result,) = op.results
        assert result is not None
        replaces = op.target in _WRITES and not arg(op.call, "accumulate")
        row = (entries,) if at.times else (table,)
        if replaces and times > 1:
            raise DisorderError
        if replaces and at.times and self._counts_up(op.operands[-1]):
            self.orders[result] = _BACK
        else:
            self._all_in_order(op, rule, row, {*range(len(op.operands))} - {*looks.indices}, orders)
            if (dim := _alone(rule.results[0], row)) is not None:
                of_keys = op.target in _READS and viewed(op.operands[0]) is viewed(self.sort.operands[0])
                self.orders[result] = _Order(dim, keys=of_keys and at.times == 1)
        lookup = derive_rule(rule, (table, entries), lambda: rules.local_lookup_rule(rule, table, entries))
        self.rules[op] = rules.ROW_FACTORS, lookup

    def _all_in_order(
        self, op: Op, rule: Rule, row: tuple[str, ...], operands: Iterable[int], orders: Mapping[int, _Order]
    ) -> None:
        """Requires that operands with such rows have them in the order, or all equal."""
        for i in operands:
            dim = _alone(rule.operands[i], row)
            if i in orders and (orders[i].back or orders[i].dim != dim):
                raise DisorderError
            if i not in orders and dim is not None and not has_equal_rows(op.operands[i], dim):
                raise DisorderError

    def _counts_up(self, x: Value) -> bool:
        """True if a value is 0, 1, 2 ..., one for each row."""
        return is_range(x) and x.shape == self.sort.operands[0].shape

    def _are_ends(self, x: Value) -> bool:
        """True if a value counts the keys that are at most 0, 1, 2 ..., by comparing or as a cumulative sum."""
        op = uncast(x).op
        if op is None or len(x.shape) != 1:
            return False
        if op.target is _aten.cumsum.default:
            keys = self.sort.operands[0]
            return self._are_counts(uncast(op.operands[0])) and is_index(keys, or_clamped=True)
        return self._are_compared(op, _aten.le.Tensor, _aten.ge.Tensor)

    def _are_counts(self, x: Value) -> bool:
        """True if a value counts the keys that are equal to 0, 1, 2 ..."""
        op = x.op
        if op is None or x.dtype not in EXACT:
            return False
        if op.target is _aten.histc.default:
            bins, low, high = (arg(op.call, name) for name in ("bins", "min", "max"))
            return self._are_keys(op.operands[0]) and (low, high) == (0, bins - 1)
        if op.target in (_aten.scatter_add.default, _aten.index_add.default):
            into, at, ones = op.operands
            weighed = op.target is _aten.index_add.default and arg(op.call, "alpha") != 1
            return is_zero(into) and self._are_keys(at) and is_all(ones, 1) and not weighed
        return self._are_compared(op, _aten.eq.Tensor, _aten.eq.Tensor)

    def _are_compared(self, op: Op, ahead: Any, behind: Any) -> bool:
        """True if an op counts, for each of 0, 1, 2 ..., the keys that compare `ahead` of it, or it `behind` them."""
        comparison = uncast(op.operands[0]).op if op.target is _aten.sum.dim_IntList else None
        if comparison is None or comparison.target not in (ahead, behind) or len(comparison.operands) != 2:
            return False
        shape = uncast(op.operands[0]).shape
        for target, (keys, each) in ((ahead, comparison.operands), (behind, comparison.operands[::-1])):
            along = self.orders.get(keys)
            if comparison.target is target and along is not None and len(shape) == 2:
                one = [1 if d == along.dim else n for d, n in enumerate(shape)]
                column = [n if d == along.dim else 1 for d, n in enumerate(shape)]
                lies = [*keys.shape] == column and [*each.shape] in (one, one[1:] if along.dim == 0 else one)
                if lies and self._are_keys(keys) and is_range(each):
                    return True
        return False

    def _are_keys(self, x: Value) -> bool:
        return x in self.orders and self.orders[x].keys and self._holds(x.dtype)

    def _holds(self, dtype: torch.dtype) -> bool:
        """True if this dtype holds the keys exactly."""
        keys = self.sort.operands[0]
        return dtype in EXACT and (dtype == keys.dtype or dtype != torch.int32 or is_index(keys))

    def _in_groups(self, op: Op, rule: Rule, orders: Mapping[int, _Order]) -> None:
        assert rule.accesses.groups is not None
        along = [dim for dims in rule.operands for dim in dims if rule.accesses.groups.along in dim]
        ends = op.operands[rule.accesses.groups.ends]
        if ends in self.orders or ends.constant:
            raise DisorderError
        self._all_in_order(op, rule, along[0], range(len(op.operands)), orders)
        self.rules[op], self.ends[op] = (along[0], rules.own_groups_rule(rule)), ends
        for x, dims in zip(op.results, rule.results, strict=True):
            if x is not None and (dim := _alone(dims, along[0])) is not None:
                self.orders[x] = _Order(dim)

    def _by_row(self, op: Op, rule: Rule, orders: Mapping[int, _Order]) -> None:
        """Follows any other op, which must work row by row, or reduce rows, so that it works on any shard of rows."""
        (first, *_) = orders.values()
        if first == _BACK:
            result = op.results[0]
            if not op.transparent or result is None or result.shape != op.operands[0].shape:
                raise DisorderError
            self.orders[result] = first
            return
        row = next(rule.operands[i][x.dim] for i, x in orders.items() if x.dim is not None)
        self._all_in_order(op, rule, row, range(len(op.operands)), orders)
        if not row or not _goes_by_row(op, rule, row):
            raise DisorderError
        for x, dims in zip(op.results, rule.results, strict=True):
            if x is not None and (dim := _alone(dims, row)) is not None:
                keys = first.keys and (op.transparent or has_trait(op.target, "copies")) and self._holds(x.dtype)
                self.orders[x] = _Order(dim, _times(op, [*orders.values()]), keys=keys)
            elif x is not None:
                self.summed[op] = row

    def _count(self, x: Value) -> None:
        """Follows the ends of groups back to counts of rows; they may depend on nothing else that differs by row."""
        if x in self.counted:
            return
        op = x.op
        if x in self.orders or x.is_output or op is None or op.rule is None or op.manual or op.constrains:
            raise DisorderError
        self.counted[x] = None
        if op in self.summed:
            if op.rule.accesses.lookup is not None and not is_zero(op.operands[0]):
                raise DisorderError
            self.rules[op] = self.summed[op], rules.local_count_rule(op.rule, self.summed[op])
            return
        varying = [y for y in op.operands if not y.constant]
        if op in self.rules or not varying:
            raise DisorderError
        for y in varying:
            self._count(y)

    def _count_alone(self) -> None:
        """Requires that no other op reads these counts."""
        for x in self.counted:
            for op, i in x.readers:
                is_end = op in self.ends and op.rule is not None and op.rule.accesses.groups is not None
                if not (is_end and op.operands[i] is self.ends[op]) and not {*op.results} <= self.counted.keys():
                    raise DisorderError


def _alone(dims: Labels, row: tuple[str, ...]) -> int | None:
    """Returns the dim that consists of the factors `row`; None if no dim has any of them."""
    having = [d for d, dim in enumerate(dims) if {*dim} & {*row}]
    if not having:
        return None
    if len(having) > 1 or dims[having[0]] != row:
        raise DisorderError
    return having[0]


def _goes_by_row(op: Op, rule: Rule, row: tuple[str, ...]) -> bool:
    """True if an op works on a shard of rows alone, with a reduction over shards where results lack the rows."""
    ties = rule.ties.pairs
    tied = {*rule.whole, *(f for tie in ties for f in tie)}
    kept = all({*row} <= {f for dim in dims for f in dim} for dims in rule.results)
    if rule.accesses.lookup is not None and {*row} & {*rule.accesses.lookup.rows}:
        return False  # it reads rows by their position in the order, and devices have different ones there
    # A view keeps rows of one size. A lookup by indices in the rows reads, or adds, one row after the other.
    looks = rule.accesses.lookup is not None and (kept or all(rule.reduce.get(f) == "sum" for f in row))
    free = looks or (kept and is_view(op.target))
    return (
        torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ())
        and not {*row} & (tied if free else tied | rule.local.factors)
        and (kept or all(rule.reduce.get(f) in ("sum", "max", "min") for f in row))
    )


def _times(op: Op, orders: list[_Order]) -> int:
    """Returns how many results of an op on indices share one row."""
    times = orders[0].times if len(orders) == 1 else 0
    if not times or op.transparent:
        return times
    if has_trait(op.target, "copies"):
        return times if all(x is not None and x.dtype in (torch.int32, torch.int64) for x in op.results) else 0
    floors = op.target is _FLOORS[0] or op.call.kwargs.get("rounding_mode") == "floor"
    by = op.call.args[1] if op.target in _FLOORS and floors and len(op.call.args) > 1 else None
    return times * by if type(by) is int and by > 0 else 0
