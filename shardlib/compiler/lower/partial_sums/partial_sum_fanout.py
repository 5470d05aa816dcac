"""Pending sums that several read: nobody adds them up where all that is made of them, linearly, costs less to add up.
The gradient of `w + a @ b` over a batch is as large as `w`; those of `a` and `b`, a product behind it, are not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shardlib.compiler.graph.ir import Graph, Op, Value, is_zero, viewed
from shardlib.compiler.lower.placement import SETTLED, Owed, Placement
from shardlib.compiler.lower.value_layouts import Values
from shardlib.compiler.propagate import Propagated
from shardlib.compiler.propagate.decision_units import can_shard, value_factors
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.compiler.propagate.solver.problem import estimate_work
from shardlib.sharding import reshard
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.reshard import FactorAxes

MOST = 32  # ops that one sum passes

_Passed = tuple[frozenset[int], Assignment, Owed]  # on which operands a sum is pending, how the op is cut, what is owed


@dataclass
class _Branches:
    """What is made of a sum while it is pending: in which `forms`, by which ops, and what is to be added up of it."""

    forms: dict[Value, Placement]
    passed: dict[Op, _Passed] = field(default_factory=dict)
    ends: dict[Value, tuple[Value, FactorAxes]] = field(default_factory=dict)  # as the first who needs the sum has it


class Branching:
    """Which ops take operands that several read as pending sums: `passed`, with the operands that are such."""

    def __init__(self, values: Values, graph: Graph, propagated: Propagated) -> None:
        self.values, self.propagation, self.p = values, values.propagation, propagated
        self.order = {op: i for i, op in enumerate(graph.ops)}
        self.passed: dict[Op, frozenset[int]] = {}
        self._seen: set[Value] = set()

    def consider(self, value: Value) -> None:
        """Decide whether a pending sum, of which `value` is a view, branches."""
        root = viewed(value)
        if root in self._seen:
            return
        self._seen.add(root)
        form = self.values.owing(root)
        if form is None or form[1].kind != "sum" or returned(root):
            return
        for op, i in readers(root):
            if not _may_pass(op, i):
                return
        found = self._branches(root, form)
        if found is None:
            return
        found, least = self._least(found, root, form)
        now = max(self.values.price(op.operands[i], self.decided(op, i)) for op, i in readers(root))
        besides, more = map(sum, zip(*(self.more(op, *way[:2]) for op, way in found.passed.items()), strict=True))
        if now - least - besides > max(more, 0.0):
            self.passed |= {op: linear for op, (linear, *_) in found.passed.items()}
            self._seen |= found.forms.keys() - found.ends.keys()

    def _least(self, found: _Branches, root: Value, form: Placement) -> tuple[_Branches, float]:
        """The branches of which least is to be added up: each may end earlier."""
        stops, least, before = frozenset[Value](), self._price(found), math.inf
        while least < before:  # where it ends elsewhere, another end may be worth it
            before, largest = least, max((end.nbytes for end in found.ends), default=0)
            for value in [x for x in found.forms if x.nbytes < largest and x is not root][::-1]:
                if value not in found.forms or value in found.ends:
                    continue
                other = self._branches(root, form, stops | {value})
                if other is not None and (price := self._price(other)) < least:
                    found, stops, least = other, stops | {value}, price
        return found, least

    def _branches(self, root: Value, form: Placement, stops: frozenset[Value] = frozenset()) -> _Branches | None:
        """All that is made of a sum by ops that are linear in it, up to `stops`; None where that is as large anyway, or
        takes many ops."""
        found, todo, known = _Branches({root: form}), list[tuple[int, Op]](), set[Op]()
        least = {root: root.nbytes}  # on the way there

        def follow(value: Value) -> None:
            for op, _ in readers(value):
                if op not in known:
                    known.add(op)
                    heappush(todo, (self.order[op], op))

        follow(root)
        while todo:
            _, op = heappop(todo)
            roots = [viewed(x) for x in op.operands]
            on = tuple(i for i, x in enumerate(roots) if x in found.forms and x not in stops)
            # Where not all may be pending, those are that were nowhere less.
            tries = dict.fromkeys(filter(None, (on, _widest(on, roots, least))))
            way = next(filter(None, (self._passed(op, some, found.forms) for some in tries)), None)
            for i, x in enumerate(roots):
                if x in found.forms and (way is None or i not in way[0]):
                    if least[x] >= root.nbytes:
                        return None
                    found.ends.setdefault(x, (op.operands[i], self.decided(op, i)))
            if way is None:
                continue
            found.passed[op] = way
            if len(found.passed) > MOST:
                return None
            for k, r in enumerate(op.results):
                if r is not None:
                    found.forms[r] = self.values.forms.result_form(op, k, *way[1:])
                    least[r] = min(r.nbytes, max(least[roots[i]] for i in way[0]))
                    follow(r)
        for value in found.forms:
            if returned(value):
                if least[value] >= root.nbytes:
                    return None
                found.ends.setdefault(value, (value, found.forms[value][0]))
        return found

    def _passed(self, op: Op, on: Sequence[int], forms: Mapping[Value, Placement]) -> _Passed | None:
        """How an op runs on pending operands."""
        owing = {i: form for i in on if (form := self.form(op.operands[i], forms)) is not None}
        dtypes = {x.dtype for x in (*(op.operands[i] for i in on), *op.results) if x is not None}
        if len(owing) < len(on) or len({form[1] for form in owing.values()}) != 1 or len(dtypes) > 1:
            return None
        if (
            self._in_groups(op)
            or not linear(op, on)
            or (assignment := fitting(self.values, op, {i: f[0] for i, f in owing.items()})) is None
        ):
            return None
        assert op.rule is not None
        if not op.rule.adds_up(x for (x, _), axes in assignment.items() if axes):
            return None
        return frozenset(on), assignment, owing[on[0]][1]

    def _in_groups(self, op: Op) -> bool:
        """Returns whether an op has rows of own groups: the groups are cut here."""
        if op.owns is None or op not in self.p.units.op_slots:
            return False
        slot = self.p.units.op_slots[op].get((op.owns.factor, 0))
        return slot is not None and bool(self.p.unit_axes(self.p.units.unit[op])[slot])

    def form(self, value: Value, forms: Mapping[Value, Placement]) -> Placement | None:
        """How a view of what is pending is pending."""
        if value in forms:
            return forms[value]
        assert value.op is not None
        if (form := self.form(value.op.operands[0], forms)) is None:
            return None
        assignment = self.values.pulled(value.op, form[0])
        return None if assignment is None else self.values.forms.result_form(value.op, 0, assignment, form[1])

    def decided(self, op: Op, i: int) -> FactorAxes:
        """The cut in which an op was to have an operand."""
        if op.rule is None or op not in self.p.units.unit:
            return ((),) * len(self.propagation.dim_factors(op.operands[i]))
        assignment = self.p.assignment(op)
        return tuple((x and assignment.get(x)) or () for x in value_factors(self.propagation, op, i, operand=True))

    def _price(self, found: _Branches) -> float:
        """Seconds to add up what is to be added up."""
        seconds = 0.0
        for shown, want in found.ends.values():
            if (form := self.form(shown, found.forms)) is not None:
                seconds += self.seconds(shown, form, want)
            else:  # a view that needs the sum
                form = found.forms[viewed(shown)]
                seconds += self.seconds(viewed(shown), form, form[0])
        return seconds

    def seconds(self, value: Value, form: Placement, want: FactorAxes) -> float:
        sizes, (cut, owed) = self.propagation.sizes(value), form
        hops = reshard.plan_route(
            sizes, value.dtype.itemsize, cut, want, owed.axes, owed.kind, prices=self.values.prices
        )
        return reshard.estimate_seconds(hops, self.values.prices)

    def more(self, op: Op, linear: frozenset[int], assignment: Assignment) -> tuple[float, float]:
        """Seconds for other operands in other cuts, and of arithmetic that more devices do, if a sum passes an op."""
        besides = 0.0
        for i, value in enumerate(op.operands):
            if i not in linear and not value.constant:
                factors = value_factors(self.propagation, op, i, operand=True)
                now = tuple((x and assignment.get(x)) or () for x in factors)
                before = self.decided(op, i)
                while value.op is not None and value.op.transparent:  # before it is expanded, say
                    (_, before), (_, now) = (self.values.through(value.op, cut) for cut in (before, now))
                    (value,) = value.op.operands
                besides += self.seconds(value, (before, SETTLED), now)
        return besides, estimate_work(op, self.values.prices) * (
            share(op, assignment) - share(op, self.p.assignment(op))
        )


def fitting(values: Values, op: Op, cuts: Mapping[int, FactorAxes]) -> Assignment | None:
    """How an op is cut that takes some operands as they are; None where it cannot."""
    assert op.rule is not None
    pairs = [
        (x, axes)
        for i, cut in cuts.items()
        for x, axes in zip(value_factors(values.propagation, op, i, operand=True), cut, strict=True)
    ]
    assignment = {x: axes for x, axes in pairs if x is not None and axes}
    # A factor that one addend has cut must be cut the same way in all.
    fits = all(
        not axes if x is None else assignment.get(x, ()) == axes and (not axes or can_shard(values.propagation, op, x))
        for x, axes in pairs
    )
    taken = [a for axes in assignment.values() for axis in axes for a in axis.primes()]
    fits = fits and len(taken) == len({*taken})
    for t, s in op.rule.ties.required.items():
        fits = fits and set(assignment.get((t, 0), ())) <= set(assignment.get((s, 0), ()))
    return assignment if fits else None


def share(op: Op, assignment: Assignment) -> float:
    """How much of an op's work each device does."""
    assert op.rule is not None
    tied = {*op.rule.ties.required}
    return 1 / math.prod(group_size(axes) for x, axes in assignment.items() if x[0] not in tied)


def _widest(on: Sequence[int], roots: Sequence[Value], least: Mapping[Value, int]) -> tuple[int, ...]:
    """The operands of which the smallest that there was on the way is the largest."""
    most = max((least[roots[i]] for i in on), default=0)
    return tuple(i for i in on if least[roots[i]] == most)


def _may_pass(op: Op, i: int) -> bool:
    """Returns whether an op is linear in an operand, with others or by itself."""
    return op.rule is not None and i in {i for together in op.rule.linear for i in together}


def linear(op: Op, on: Sequence[int]) -> bool:
    """Returns whether an op is linear in some of its operands; zeros are whatever one likes."""
    if op.rule is None or op.manual or op.constrains:
        return False
    zeros = {i for i, x in enumerate(op.operands) if is_zero(x)}
    return any({*on} == together - zeros for together in op.rule.linear)


def readers(value: Value) -> Iterator[tuple[Op, int]]:
    """Who reads a value, views looked through."""
    for op, i in value.readers:
        if op.transparent and op.results[0] is not None:
            yield from readers(op.results[0])
        elif not op.constant:
            yield op, i


def returned(value: Value) -> bool:
    """Returns whether a value, or a view of it, is a result."""
    views = (op.results[0] for op, _ in value.readers if op.transparent)
    return value.is_output or any(returned(view) for view in views if view is not None)
