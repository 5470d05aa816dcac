"""Rows in an order that nobody sees: sorted by their groups, worked on there, and put back, as tokens are that choose
experts. Where the rows are cut, every device may sort its own, and nothing is sent.

    ids.sort() -> x[order // k] -> grouped product, silu, mul ... -> back = empty; back[order] = arange -> y[back]
         |------> how many there are of each id -> cumsum -> ends of groups

That is right if all that knows of the order is known here: what goes row by row; what reads or writes at the places
that the sort tells, and so puts rows in that order, or back; sums over all rows; and products in groups whose ends are
how many of the sorted keys are at most 0, 1, 2 ..., so that they fall between the same keys on every device. These ops
are marked (`Op.ordered`, `Value.counted`), and have rules of their own. What is decided is looked at as it is written
(`check`): where not all are cut alike, the marks are taken away (`forget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from shardlib.compiler.graph.ir import Graph, Op, Ordered, Value, is_all, is_zero, viewed
from shardlib.compiler.graph.value_facts import EXACT, alike, is_place, is_range, uncast
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.rules.iteration_space import arg
from shardlib.rules.local_forms import local_sort as rules
from shardlib.rules.rule import Labels, Rule
from shardlib.sharding.mesh.axis import Axis

_aten = torch.ops.aten
_SORTS = (_aten.sort.default, _aten.sort.stable)
_READS, _WRITES = (_aten.index.Tensor, _aten.index_select.default), (_aten.index_put.default,)
_FLOORS = (_aten.floor_divide.default, _aten.div.Tensor_mode, _aten.div.Scalar_mode)

Cut = Mapping[int, tuple[Axis, ...]]  # leaves that are cut, and over which axes


class Noted(NamedTuple):
    """How something was written that belongs to the sort called `name`: what cuts it, and whether that are its rows;
    else these are counted, and stay as they are on each device."""

    name: str
    cut: Cut
    rows: bool


class DisorderError(Exception):
    """Devices would have rows in an order that others do not know of."""


class _Known(NamedTuple):
    """What is known of a value: its rows along `dim` are in the order of the sort (None: they are not); its numbers are
    places of what was sorted, of which so many `times` are one (0: they are none), or places in the order (`back`)."""

    dim: int | None
    times: int = 0
    back: bool = False
    keys: bool = False  # it is what was sorted, in that order


_BACK = _Known(None, back=True)


def mark(graph: Graph) -> None:
    """Mark what may be in an order of each device's own."""
    if any(op.rule is not None and op.rule.groups is not None for op in graph.ops):
        for op in graph.ops:
            if op.target in _SORTS and op.ordered is None and not (op.constant or op.manual):
                _Region(graph, op).mark()


def forget(graph: Graph) -> None:
    """Take away all marks."""
    for op in graph.ops:
        if op.ordered is not None:
            op.rule, op.ordered = op.ordered.plain, None
        for x in op.results:
            if x is not None:
                x.counted = None


def check(noted: Iterable[Noted]) -> None:
    """Raise `DisorderError` unless all that belongs to a sort is cut as that is, and what is counted is cut over other
    axes, if at all: else it would be sent."""
    rows: dict[str, Cut] = {}
    counted: list[Noted] = []
    for known in noted:
        if not known.rows:
            counted.append(known)
        elif rows.setdefault(known.name, known.cut) != known.cut:
            raise DisorderError
    for name, cut, _ in counted:
        if name not in rows or not _primes(rows[name]).isdisjoint(_primes(cut)):
            raise DisorderError


def _primes(cut: Cut) -> set[Axis]:
    return {p for axes in cut.values() for a in axes for p in a.primes()}


class _Region:
    """What is made of a sort; each method raises `DisorderError` where somebody may see the order."""

    def __init__(self, graph: Graph, sort: Op) -> None:
        self.sort, self.graph = sort, graph
        self.known: dict[Value, _Known] = {}
        self.rules: dict[Op, tuple[tuple[str, ...], Rule]] = {}  # with the factors that are rows
        self.summed: dict[Op, tuple[str, ...]] = {}  # ops of which results have no rows any more
        self.ends: dict[Op, Value] = {}
        self.counted: dict[Value, None] = {}

    def mark(self) -> None:
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
            assert op.rule is not None
            op.rule, op.ordered = rule, Ordered(self.sort.name, rows, op.rule)

    def _follow(self) -> None:
        """Note what is known of all that is made of the sort."""
        for op in self.graph.ops:
            known = {i: self.known[x] for i, x in enumerate(op.operands) if x in self.known}
            if op is self.sort:
                self._sorted(op, _Known(0, keys=True), _Known(0, times=1))
            elif known and op.target in _SORTS and [*known.values()] == [_Known(0, times=1)]:
                self._sorted(op, None, _BACK)
            elif known:
                if op.rule is None or op.manual or op.constrains or op.ordered is not None:
                    raise DisorderError
                if any(x.times or x.back for x in known.values()) and op.target in (*_READS, *_WRITES):
                    self._at_places(op, op.rule, known)
                elif op.rule.groups is not None:
                    self._in_groups(op, op.rule, known)
                else:
                    self._by_row(op, op.rule, known)
        if any(x.is_output for x in self.known):
            raise DisorderError

    def _sorted(self, op: Op, *known: _Known | None) -> None:
        if (rule := rules.sorts(op.call)) is None or arg(op.call, "descending"):
            raise DisorderError
        self.rules[op] = rules.PLACES, rule
        self.known |= {x: k for x, k in zip(op.results, known, strict=True) if x is not None and k is not None}

    def _at_places(self, op: Op, rule: Rule, known: Mapping[int, _Known]) -> None:
        """Of what reads or writes at places: of what the table counts, and the entries, one is in the order."""
        looks = rule.looks
        if looks is None or len(looks.rows) != 1 or len(looks.indices) != 1 or looks.indices[0] not in known:
            raise DisorderError
        (table,), (at,) = looks.rows, (known[i] for i in looks.indices)
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
            self.known[result] = _BACK
        else:
            self._all_in_order(op, rule, row, {*range(len(op.operands))} - {*looks.indices}, known)
            if (dim := _alone(rule.results[0], row)) is not None:
                of_keys = op.target in _READS and viewed(op.operands[0]) is viewed(self.sort.operands[0])
                self.known[result] = _Known(dim, keys=of_keys and at.times == 1)
        self.rules[op] = rules.PLACES, rules.at_places(rule, table, entries)

    def _all_in_order(
        self, op: Op, rule: Rule, row: tuple[str, ...], operands: Iterable[int], known: Mapping[int, _Known]
    ) -> None:
        """Those that have rows have them in the order, or all alike; no others are known."""
        for i in operands:
            dim = _alone(rule.operands[i], row)
            if i in known and (known[i].back or known[i].dim != dim):
                raise DisorderError
            if i not in known and dim is not None and not alike(op.operands[i], dim):
                raise DisorderError

    def _counts_up(self, x: Value) -> bool:
        """Whether a value is 0, 1, 2 ..., one for each row."""
        return is_range(x) and x.shape == self.sort.operands[0].shape

    def _are_ends(self, x: Value) -> bool:
        """Whether a value says how many keys are at most 0, 1, 2 ...: it counts those up to each, or adds up those that
        are each, of which none is below 0."""
        op = uncast(x).op
        if op is None or len(x.shape) != 1:
            return False
        if op.target is _aten.cumsum.default:
            keys = self.sort.operands[0]
            return self._are_counts(uncast(op.operands[0])) and is_place(keys, or_clamped=True)
        return self._are_compared(op, _aten.le.Tensor, _aten.ge.Tensor)

    def _are_counts(self, x: Value) -> bool:
        """Whether a value says how many keys are 0, 1, 2 ..."""
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
        """Whether an op counts for 0, 1, 2 ... the keys that compare so with it, or it with them."""
        made = uncast(op.operands[0]).op if op.target is _aten.sum.dim_IntList else None
        if made is None or made.target not in (ahead, behind) or len(made.operands) != 2:
            return False
        shape = uncast(op.operands[0]).shape
        for target, (keys, each) in ((ahead, made.operands), (behind, made.operands[::-1])):
            along = self.known.get(keys)
            if made.target is target and along is not None and len(shape) == 2:
                one = [1 if d == along.dim else n for d, n in enumerate(shape)]
                column = [n if d == along.dim else 1 for d, n in enumerate(shape)]
                lies = [*keys.shape] == column and [*each.shape] in (one, one[1:] if along.dim == 0 else one)
                if lies and self._are_keys(keys) and is_range(each):
                    return True
        return False

    def _are_keys(self, x: Value) -> bool:
        return x in self.known and self.known[x].keys and self._holds(x.dtype)

    def _holds(self, dtype: torch.dtype) -> bool:
        """Whether keys that are compared with numbers of groups are the same in this dtype."""
        keys = self.sort.operands[0]
        return dtype in EXACT and (dtype == keys.dtype or dtype != torch.int32 or is_place(keys))

    def _in_groups(self, op: Op, rule: Rule, known: Mapping[int, _Known]) -> None:
        """Of a product in groups."""
        assert rule.groups is not None
        along = [dim for dims in rule.operands for dim in dims if rule.groups.along in dim]
        ends = op.operands[rule.groups.ends]
        if ends in self.known or ends.constant:
            raise DisorderError
        self._all_in_order(op, rule, along[0], range(len(op.operands)), known)
        self.rules[op], self.ends[op] = (along[0], rules.in_own_groups(rule)), ends
        for x, dims in zip(op.results, rule.results, strict=True):
            if x is not None and (dim := _alone(dims, along[0])) is not None:
                self.known[x] = _Known(dim)

    def _by_row(self, op: Op, rule: Rule, known: Mapping[int, _Known]) -> None:
        """Of any other op, which has to go row by row, or to sum up rows: so does each of which any piece of rows may
        be had by itself."""
        (first, *_) = known.values()
        if first == _BACK:
            made = op.results[0]
            if not op.transparent or made is None or made.shape != op.operands[0].shape:
                raise DisorderError
            self.known[made] = first
            return
        row = next(rule.operands[i][x.dim] for i, x in known.items() if x.dim is not None)
        self._all_in_order(op, rule, row, range(len(op.operands)), known)
        if not row or not _goes_by_row(op, rule, row):
            raise DisorderError
        for x, dims in zip(op.results, rule.results, strict=True):
            if x is not None and (dim := _alone(dims, row)) is not None:
                keys = first.keys and (op.transparent or has_trait(op.target, "copies")) and self._holds(x.dtype)
                self.known[x] = _Known(dim, _times(op, [*known.values()]), keys=keys)
            elif x is not None:
                self.summed[op] = row

    def _count(self, x: Value) -> None:
        """Note what ends of groups are made of: counts of rows, and nothing else that differs by row."""
        if x in self.counted:
            return
        op = x.op
        if x in self.known or x.is_output or op is None or op.rule is None or op.manual or op.constrains:
            raise DisorderError
        self.counted[x] = None
        if op in self.summed:
            if op.rule.looks is not None and not is_zero(op.operands[0]):
                raise DisorderError
            self.rules[op] = self.summed[op], rules.counts(op.rule, self.summed[op])
            return
        given = [y for y in op.operands if not y.constant]
        if op in self.rules or not given:
            raise DisorderError
        for y in given:
            self._count(y)

    def _count_alone(self) -> None:
        """Nobody else reads these counts."""
        for x in self.counted:
            for op, i in x.readers:
                is_end = op in self.ends and op.rule is not None and op.rule.groups is not None
                if not (is_end and op.operands[i] is self.ends[op]) and not {*op.results} <= self.counted.keys():
                    raise DisorderError


def _alone(dims: Labels, row: tuple[str, ...]) -> int | None:
    """The dim that is `row`; None where none has any of it."""
    having = [d for d, dim in enumerate(dims) if {*dim} & {*row}]
    if not having:
        return None
    if len(having) > 1 or dims[having[0]] != row:
        raise DisorderError
    return having[0]


def _goes_by_row(op: Op, rule: Rule, row: tuple[str, ...]) -> bool:
    """Whether pieces of rows may be had by themselves, and added up or compared where results lack them."""
    ties = (*rule.rounds.items(), *rule.follows.items(), *rule.lends.items())
    tied = {*rule.whole, *(f for tie in ties for f in tie)}
    kept = all({*row} <= {f for dim in dims for f in dim} for dims in rule.results)
    if rule.looks is not None and {*row} & {*rule.looks.rows}:
        return False  # it reads rows at places in the order; that the device adds these up which has them is no sum
    # A view shows rows of one size as they stand; at places that rows name, others are read, or rows added, one by one.
    looks = rule.looks is not None and (kept or all(rule.reduce.get(f) == "sum" for f in row))
    free = looks or (kept and is_view(op.target))
    return (
        torch.Tag.nondeterministic_seeded not in getattr(op.target, "tags", ())
        and not {*row} & (tied if free else tied | rule.local_factors)
        and (kept or all(rule.reduce.get(f) in ("sum", "max", "min") for f in row))
    )


def _times(op: Op, known: list[_Known]) -> int:
    """Of what an op makes of places, how many are one place."""
    times = known[0].times if len(known) == 1 else 0
    if not times or op.transparent:
        return times
    if has_trait(op.target, "copies"):
        return times if all(x is not None and x.dtype in (torch.int32, torch.int64) for x in op.results) else 0
    floors = op.target is _FLOORS[0] or op.call.kwargs.get("rounding_mode") == "floor"
    by = op.call.args[1] if op.target in _FLOORS and floors and len(op.call.args) > 1 else None
    return times * by if type(by) is int and by > 0 else 0
