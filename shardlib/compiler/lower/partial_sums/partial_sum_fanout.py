"""Decides whether a partial sum with several readers stays partial: if reducing the linear results of all readers is
cheaper.

The gradient of `w + a @ b` over a batch is as large as `w`. The gradients of `a` and `b`, one product later, are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shardlib.compiler.graph.ir import Graph, Op, Value, is_zero, viewed
from shardlib.compiler.lower.placement import COMPLETE, Partial, Placement
from shardlib.compiler.lower.value_layouts import Values
from shardlib.compiler.propagate import Decisions
from shardlib.compiler.propagate.decision_units import can_shard
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.compiler.propagate.solver.problem import estimate_work
from shardlib.sharding import reshard
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.reshard import FactorAxes

MOST = 32  # ops that one sum passes

_Passed = tuple[frozenset[int], Assignment, Partial]  # an op's partial operands, its assignment, their partial sum


@dataclass
class _Branches:
    """The values computed from a partial sum: their `forms`, the ops that it passed, and the values to reduce."""

    forms: dict[Value, Placement]
    passed: dict[Op, _Passed] = field(default_factory=dict)
    ends: dict[Value, tuple[Value, FactorAxes]] = field(
        default_factory=dict
    )  # each with the view and the sharding of its first reader


class Branching:
    """Finds partial sums with several readers that stay partial; `passed` maps the readers to these operands."""

    def __init__(self, values: Values, graph: Graph, propagated: Decisions) -> None:
        self.values, self.propagation, self.p = values, values.propagation, propagated
        self.order = {op: i for i, op in enumerate(graph.ops)}
        self.passed: dict[Op, frozenset[int]] = {}
        self._seen: set[Value] = set()

    def consider(self, value: Value) -> None:
        """Decides whether the partial sum behind `value` stays partial for all of its readers."""
        root = viewed(value)
        if root in self._seen:
            return
        self._seen.add(root)
        form = self.values.partial_form(root)
        if form is None or form[1].kind != "sum" or returned(root):
            return
        for op, i in readers(root):
            if not _may_pass(op, i):
                return
        branches = self._branches(root, form)
        if branches is None:
            return
        branches, least = self._least(branches, root, form)
        now = max(self.values.price(op.operands[i], self.decided(op, i)) for op, i in readers(root))
        besides, more = map(sum, zip(*(self.more(op, *way[:2]) for op, way in branches.passed.items()), strict=True))
        if now - least - besides > max(more, 0.0):
            self.passed |= {op: linear for op, (linear, *_) in branches.passed.items()}
            self._seen |= branches.forms.keys() - branches.ends.keys()

    def _least(self, branches: _Branches, root: Value, form: Placement) -> tuple[_Branches, float]:
        """Returns the cheapest branches to reduce, where each may end earlier, and their seconds."""
        stops, least, before = frozenset[Value](), self._price(branches), math.inf
        while least < before:  # a new end may make another end worthwhile
            before, largest = least, max((end.nbytes for end in branches.ends), default=0)
            for value in [x for x in branches.forms if x.nbytes < largest and x is not root][::-1]:
                if value not in branches.forms or value in branches.ends:
                    continue
                other = self._branches(root, form, stops | {value})
                if other is not None and (price := self._price(other)) < least:
                    branches, stops, least = other, stops | {value}, price
        return branches, least

    def _branches(self, root: Value, form: Placement, stops: frozenset[Value] = frozenset()) -> _Branches | None:
        """Follows a sum through linear ops up to `stops`; returns None if an end is as large, or the ops are many."""
        branches, todo, queued = _Branches({root: form}), list[tuple[int, Op]](), set[Op]()
        least = {root: root.nbytes}  # the smallest value on the way to each

        def follow(value: Value) -> None:
            for op, _ in readers(value):
                if op not in queued:
                    queued.add(op)
                    heappush(todo, (self.order[op], op))

        follow(root)
        while todo:
            _, op = heappop(todo)
            roots = [viewed(x) for x in op.operands]
            on = tuple(i for i, x in enumerate(roots) if x in branches.forms and x not in stops)
            # If not all operands may be partial, try those whose smallest ancestor is largest.
            tries = dict.fromkeys(filter(None, (on, _widest(on, roots, least))))
            way = next(filter(None, (self._passed(op, some, branches.forms) for some in tries)), None)
            for i, x in enumerate(roots):
                if x in branches.forms and (way is None or i not in way[0]):
                    if least[x] >= root.nbytes:
                        return None
                    branches.ends.setdefault(x, (op.operands[i], self.decided(op, i)))
            if way is None:
                continue
            branches.passed[op] = way
            if len(branches.passed) > MOST:
                return None
            for k, r in enumerate(op.results):
                if r is not None:
                    branches.forms[r] = self.values.forms.result_form(op, k, *way[1:])
                    least[r] = min(r.nbytes, max(least[roots[i]] for i in way[0]))
                    follow(r)
        for value in branches.forms:
            if returned(value):
                if least[value] >= root.nbytes:
                    return None
                branches.ends.setdefault(value, (value, branches.forms[value][0]))
        return branches

    def _passed(self, op: Op, on: Sequence[int], forms: Mapping[Value, Placement]) -> _Passed | None:
        """Returns how an op runs on partial operands."""
        partial_forms = {i: form for i in on if (form := self.form(op.operands[i], forms)) is not None}
        dtypes = {x.dtype for x in (*(op.operands[i] for i in on), *op.results) if x is not None}
        if len(partial_forms) < len(on) or len({form[1] for form in partial_forms.values()}) != 1 or len(dtypes) > 1:
            return None
        if (
            self._in_groups(op)
            or not linear(op, on)
            or (assignment := fitting(self.values, op, {i: f[0] for i, f in partial_forms.items()})) is None
        ):
            return None
        if not op.required_rule.adds_up(x for (x, _), axes in assignment.items() if axes):
            return None
        return frozenset(on), assignment, partial_forms[on[0]][1]

    def _in_groups(self, op: Op) -> bool:
        """Returns whether the groups of an op are sharded, so that devices have rows of own groups."""
        if op.owns is None or op not in self.p.units.op_slots:
            return False
        slot = self.p.units.op_slots[op].get((op.owns.factor, 0))
        return slot is not None and bool(self.p.unit_axes(self.p.units.unit[op])[slot])

    def form(self, value: Value, forms: Mapping[Value, Placement]) -> Placement | None:
        """Returns the form of a view of a partial sum; None if the view does not allow it."""
        if value in forms:
            return forms[value]
        assert value.op is not None
        if (form := self.form(value.op.operands[0], forms)) is None:
            return None
        assignment = self.values.assign_view(value.op, form[0])
        return None if assignment is None else self.values.forms.result_form(value.op, 0, assignment, form[1])

    def decided(self, op: Op, i: int) -> FactorAxes:
        """Returns the sharding that was decided for an operand."""
        if op.rule is None or op not in self.p.units.unit:
            return ((),) * len(self.propagation.dim_factors(op.operands[i]))
        assignment = self.p.assignment(op)
        return tuple((x and assignment.get(x)) or () for x in self.propagation.value_factors(op, i, operand=True))

    def _price(self, branches: _Branches) -> float:
        """Returns the seconds of all reductions at the ends."""
        seconds = 0.0
        for shown, want in branches.ends.values():
            if (form := self.form(shown, branches.forms)) is not None:
                seconds += self.seconds(shown, form, want)
            else:  # a view that needs the sum
                form = branches.forms[viewed(shown)]
                seconds += self.seconds(viewed(shown), form, form[0])
        return seconds

    def seconds(self, value: Value, form: Placement, want: FactorAxes) -> float:
        """Returns the seconds of a reshard from `form` to `want`."""
        sizes, (sharding, partial) = self.propagation.sizes(value), form
        hops = reshard.plan_route(
            sizes, value.dtype.itemsize, sharding, want, partial.axes, partial.kind, prices=self.values.prices
        )
        return reshard.estimate_seconds(hops, self.values.prices)

    def more(self, op: Op, linear: frozenset[int], assignment: Assignment) -> tuple[float, float]:
        """Returns the seconds added if a sum passes an op: for reshards of other operands, for repeated arithmetic."""
        besides = 0.0
        for i, value in enumerate(op.operands):
            if i not in linear and not value.constant:
                factors = self.propagation.value_factors(op, i, operand=True)
                now = tuple((x and assignment.get(x)) or () for x in factors)
                before = self.decided(op, i)
                while value.op is not None and value.op.transparent:  # such as an expand: price its smaller operand
                    (_, before), (_, now) = (self.values.through(value.op, sharding) for sharding in (before, now))
                    (value,) = value.op.operands
                besides += self.seconds(value, (before, COMPLETE), now)
        return besides, estimate_work(op, self.values.prices) * (
            share(op, assignment) - share(op, self.p.assignment(op))
        )


def fitting(values: Values, op: Op, shardings: Mapping[int, FactorAxes]) -> Assignment | None:
    """Returns the assignment of an op that takes some operands in these shardings; None if its rule forbids it."""
    pairs = [
        (x, axes)
        for i, sharding in shardings.items()
        for x, axes in zip(values.propagation.value_factors(op, i, operand=True), sharding, strict=True)
    ]
    assignment = {x: axes for x, axes in pairs if x is not None and axes}
    # Operands that share a factor must shard it over the same axes.
    fits = all(
        not axes if x is None else assignment.get(x, ()) == axes and (not axes or can_shard(values.propagation, op, x))
        for x, axes in pairs
    )
    taken = [a for axes in assignment.values() for axis in axes for a in axis.primes()]
    fits = fits and len(taken) == len({*taken})
    for t, s in op.required_rule.ties.required.items():
        fits = fits and set(assignment.get((t, 0), ())) <= set(assignment.get((s, 0), ()))
    return assignment if fits else None


def share(op: Op, assignment: Assignment) -> float:
    """Returns each device's share of an op's work."""
    tied = {*op.required_rule.ties.required}
    return 1 / math.prod(group_size(axes) for x, axes in assignment.items() if x[0] not in tied)


def _widest(on: Sequence[int], roots: Sequence[Value], least: Mapping[Value, int]) -> tuple[int, ...]:
    """Returns the operands whose smallest ancestor is largest."""
    most = max((least[roots[i]] for i in on), default=0)
    return tuple(i for i in on if least[roots[i]] == most)


def _may_pass(op: Op, i: int) -> bool:
    """Returns whether an op is linear in an operand, with others or by itself."""
    return op.rule is not None and i in {i for together in op.rule.linear for i in together}


def linear(op: Op, on: Sequence[int]) -> bool:
    """Returns whether an op is linear in the operands `on`; operands that are zero do not count."""
    if op.rule is None or op.manual or op.constrains:
        return False
    zeros = {i for i, x in enumerate(op.operands) if is_zero(x)}
    return any({*on} == together - zeros for together in op.rule.linear)


def readers(value: Value) -> Iterator[tuple[Op, int]]:
    """Yields the readers of a value and of its views, with the operands' positions."""
    for op, i in value.readers:
        if op.transparent and op.results[0] is not None:
            yield from readers(op.results[0])
        elif not op.constant:
            yield op, i


def returned(value: Value) -> bool:
    """Returns whether a value, or a view of it, is a result."""
    views = (op.results[0] for op, _ in value.readers if op.transparent)
    return value.is_output or any(returned(view) for view in views if view is not None)
