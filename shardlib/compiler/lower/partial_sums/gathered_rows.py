"""What is looked up in tables whose rows are cut, while each row is where it was found and nowhere else.

The device that holds a row has it, the others have zeros. Nobody adds up as long as

* every op on the way makes zeros of zeros (`square`, `relu`), until one adds up rows (`sum`): that sum is little;
* or whoever reads writes to the same rows, each device to its own (`scatter`, the gradient of a table): then what is on
  the way may be anything where a row is another device's.

    gather(logits, ids) -> where(s < 0, s * p, s / p) -> scatter(logits, ids)

A single row (`u[0]`, at a boundary) is such a row, too: where what is made of it is put in its place among rows of the
device that has it (`cat([2 * u[1:2] - u[2:3], ...])`), nobody else hears of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch

from shardlib.compiler.graph.ir import Op, Value, viewed
from shardlib.compiler.lower.partial_sums.partial_sum_fanout import MOST, Branching, fitting, linear, readers, returned
from shardlib.compiler.lower.placement import SETTLED, Owed, Placement
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.core.aten.op_names import CAT, SELECT, SLICE, STACK
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.torch_private import pytree, without_modes
from shardlib.rules.iteration_space import arg, normalize_dim
from shardlib.rules.rule import OWNED, Meta, SingleBlock
from shardlib.sharding.chunks import shard_sizes
from shardlib.sharding.mesh.axis import Axis


class Passed(NamedTuple):
    """How an op runs: cut so, on operands in these forms. What it makes owes this."""

    assignment: Assignment
    forms: Mapping[int, Placement]
    owed: Owed


class _Joined(NamedTuple):
    """Rows of several lookups, side by side along a dim: of each how many, and which."""

    dim: int
    parts: tuple[tuple[int, Any], ...]


class _Holder(NamedTuple):
    """The device that has a single row: its place along the axes that cut what the row is of."""

    axes: tuple[Axis, ...]
    place: int


@dataclass
class _Region:
    """What is made of looked-up rows: `rows` says of values that lie as these were looked up which they are; what is
    `own` may be anything where they are another device's; `ends` are sums that are left."""

    roots: dict[Value, Placement] = field(default_factory=dict)
    rows: dict[Value, Any] = field(default_factory=dict)
    forms: dict[Value, Placement] = field(default_factory=dict)
    own: set[Value] = field(default_factory=set)
    passed: dict[Op, Passed] = field(default_factory=dict)
    ends: dict[Value, Placement] = field(default_factory=dict)

    def rows_of(self, value: Value) -> Any:
        """Which rows a value is; who holds a single one holds its views."""
        root = self.rows.get(viewed(value))
        return root if isinstance(root, _Holder) else self.rows.get(value)


class LookedUp:
    """Which ops take looked-up rows as they are: `passed`."""

    def __init__(self, branching: Branching) -> None:
        self.branching, self.values, self.propagation = branching, branching.values, branching.propagation
        self.passed: dict[Op, Passed] = {}
        self._waiting: dict[Value, Any] = {}  # rows that nobody has read yet

    def made(self, op: Op, *, carried: bool) -> None:
        """Note what an op has looked up, or put side by side (`carried` sums), if that is a sum over those who hold the
        rows."""
        sources = {*op.operands} if self._joins(op) else set[Value]()
        found = _joined(op, [self._waiting[x] for x in op.operands]) if sources else None
        if not sources and (carried or (found := self._found(op)) is None):
            return
        (top, *_) = op.results
        assert top is not None
        form = self.values.owing(top)
        if form is not None and form[1].kind == "sum" and top.dtype.is_floating_point:
            self._waiting[top] = found
        for source in sources:
            del self._waiting[source]

    def _joins(self, op: Op) -> bool:
        """Returns whether all that an op does is to put what is looked up side by side, which nobody else reads."""
        if len(op.operands) == 1 or not has_trait(op.target, "moves_data"):
            return False
        return all(x in self._waiting and len(x.readers) == 1 and not x.is_output for x in op.operands)

    def reach(self, op: Op) -> None:
        """Decide, in front of the first op that reads rows, what becomes of them."""
        if not self._waiting or self._joins(op):
            return
        for root in map(viewed, op.operands):
            if root in self._waiting and (region := self._region(root)) is not None and self._pays(region):
                self.passed |= region.passed
                for other in region.roots:
                    del self._waiting[other]
            self._waiting.pop(root, None)

    def _pays(self, region: _Region) -> bool:
        branching = self.branching
        now = sum(
            max(self.values.price(op.operands[i], branching.decided(op, i)) for op, i in readers(root))
            for root in region.roots
        )
        made = region.forms.keys() - region.roots.keys()
        for op, way in region.passed.items():
            for i in () if way.owed else way.forms:  # it writes there, and would have to be given what it writes
                now += self._given(op, i) if viewed(op.operands[i]) in made else 0.0
        ends = 0.0
        for value, form in region.ends.items():
            wants = [branching.decided(op, i) for op, i in readers(value) if op.operands[i] is value]
            ends += branching.seconds(value, form, wants[0] if wants else form[0])
        prices = [branching.more(op, frozenset(way.forms), way.assignment) for op, way in region.passed.items()]
        besides, more = map(sum, zip(*prices, strict=True))
        return now - ends - besides > max(more, 0.0)

    def _given(self, op: Op, i: int) -> float:
        """Seconds to give an op what another one has made, both as they were to be cut."""
        value, branching = op.operands[i], self.branching
        want, maker = branching.decided(op, i), value.op
        while maker is not None and maker.transparent:
            _, want = self.values.through(maker, want)
            (value,) = maker.operands
            maker = value.op
        assert maker is not None
        cut, owed = self.values.forms.result_form(maker, value.index, branching.p.assignment(maker), SETTLED)
        return branching.seconds(value, (cut, owed), want)

    def _region(self, root: Value) -> _Region | None:
        """All that is made of it; None where somebody needs more than that."""
        region, todo, known = _Region(), list[tuple[int, Op]](), set[Op]()

        def begin(root: Value) -> bool:
            if (form := self.values.owing(root)) is None:  # somebody has added up already
                return False
            region.roots[root] = region.forms[root] = form
            region.rows[root] = self._waiting[root]
            return follow(root)

        def follow(value: Value) -> bool:
            for op, _ in readers(value):
                if op not in known:
                    known.add(op)
                    heappush(todo, (self.branching.order[op], op))
            return not returned(value)

        if not begin(root):
            return None
        while todo:
            _, op = heappop(todo)
            for other in dict.fromkeys(map(viewed, op.operands)):
                if other in self._waiting and other not in region.forms and not begin(other):
                    return None
            way = self._way(op, region)
            lookups = sum(
                len(rows.parts) if isinstance(rows, _Joined) else 1 for rows in map(region.rows.get, region.roots)
            )
            if way is None or len(region.passed) == MOST * lookups:
                return None
            if any(not follow(x) for x in self._made(op, way, region)):
                return None
            region.passed[op] = way
        return region

    def _made(self, op: Op, way: Passed, region: _Region) -> list[Value]:
        """Note what an op makes; those that are rows still."""
        found = list[Value]()
        for k, r in enumerate(op.results):
            if r is None or not way.owed:
                continue
            own = way.owed.kind == OWNED
            form = self.values.forms.result_form(op, k, way.assignment, SETTLED if own else way.owed)
            rows = _common(region.rows_of(op.operands[i]) for i in way.forms)
            part = rows if isinstance(rows, _Holder) else _part(op, rows)
            aligned = rows is not None and _is_pointwise(op) and all(op.operands[i].shape == r.shape for i in way.forms)
            if aligned or has_trait(op.target, "moves_data") or (_is_pointwise(op) and len(way.forms) == 1):
                region.forms[r] = (form[0], way.owed) if own else form
                region.rows[r] = rows if aligned else part
                region.own |= {r} if own else set()
                found.append(r)
            else:
                region.ends[r] = form
        return found

    def _way(self, op: Op, region: _Region) -> Passed | None:
        """How an op runs on rows; None where it cannot."""
        if op.rule is None or op.manual or op.constrains or op.owns is not None:
            return None
        on = [i for i, x in enumerate(op.operands) if viewed(x) in region.forms]
        forms = {i: form for i in on if (form := self.branching.form(op.operands[i], region.forms)) is not None}
        if len(forms) < len(on) or len({form[1].axes for form in forms.values()}) != 1:
            return None
        if self._puts_there(op, forms, region):
            earlier = self.passed[op].forms if op in self.passed else {}
            return Passed(self.branching.p.assignment(op), {**earlier, **forms}, SETTLED)
        if op in self.passed:
            return None
        rows = _common(region.rows_of(op.operands[i]) for i in on)
        if self._writes_there(op, forms, rows):
            return Passed(self.branching.p.assignment(op), forms, SETTLED)
        assignment = fitting(self.values, op, {i: cut for i, (cut, _) in forms.items()})
        if assignment is None or not op.rule.adds_up(x for (x, _), axes in assignment.items() if axes):
            return None
        axes = next(iter(forms.values()))[1].axes
        shapes = {x.shape for x in (*(op.operands[i] for i in on), *op.results) if x is not None}
        aligned = rows is not None and len(shapes) == 1
        if region.own.isdisjoint(viewed(op.operands[i]) for i in on):
            zeros = len(on) == len(op.operands) and (aligned or len(on) == 1) and _is_pointwise(op)
            if linear(op, on) or (zeros and _keeps_zeros(op)):
                return Passed(assignment, forms, Owed(axes))
        held = isinstance(rows, _Holder) and has_trait(op.target, "moves_data")
        stays = (aligned and _is_pointwise(op)) or held or _part(op, rows) is not None
        return Passed(assignment, forms, Owed(axes, OWNED)) if stays else None

    def _writes_there(self, op: Op, forms: Mapping[int, Placement], rows: Any) -> bool:
        """Returns whether an op writes values to the rows that they are of, where these are cut alike."""
        looks = None if op.rule is None else op.rule.accesses.lookup
        if looks is None or rows is None or [*forms] != [looks.values]:
            return False
        (i,) = forms
        return self._rows(op) == rows and self.branching.decided(op, i) == forms[i][0]

    def _puts_there(self, op: Op, forms: Mapping[int, Placement], region: _Region) -> bool:
        """Returns whether an op puts single rows among those of the devices that hold them."""
        found = {} if op.rule is None else {held.value: held for held in op.rule.accesses.blocks}
        return all(
            i in found
            and (holder := self._holder(op, found[i])) is not None
            and holder == region.rows_of(op.operands[i])
            and self.branching.decided(op, i) == form[0]
            for i, form in forms.items()
        )

    def _found(self, op: Op) -> Any:
        """Which rows an op looks up; None where it looks up none."""
        if op.rule is None:
            return None
        if op.rule.accesses.lookup is not None and op.rule.accesses.lookup.values is None:
            return self._rows(op)
        return next((self._holder(op, held) for held in op.rule.accesses.blocks if held.value is None), None)

    def _holder(self, op: Op, held: SingleBlock) -> _Holder | None:
        """Who has a block."""
        axes = Axis.merge(self.branching.p.assignment(op).get((held.factor, 0), ()))
        if not axes:
            return None
        first, *rest = map(self.propagation.dims.size, self.propagation.labels[op][held.factor])
        ends = itertools.accumulate(shard_sizes(first, axes))
        return _Holder(tuple(axes), next(i for i, end in enumerate(ends) if held.block // math.prod(rest) < end))

    def _rows(self, op: Op) -> Any:
        """Which rows an op reads or writes: what counts them, how they are cut, and where they lie in its values."""
        assert op.rule is not None
        assert op.rule.accesses.lookup is not None
        rows, indices, values = op.rule.accesses.lookup
        cuts = self.branching.p.assignment(op)
        leaves = [
            (leaf, cuts.get((f, k), ())) for f in rows for k, leaf in enumerate(self.propagation.labels[op].get(f, ()))
        ]
        labels = op.rule.results[0] if values is None else op.rule.operands[values]
        value = op.results[0] if values is None else op.operands[values]
        assert value is not None
        counted = {f for i in indices for dim in op.rule.operands[i] for f in dim}
        where = tuple(d for d, dim in enumerate(labels) if counted & {*dim})
        return tuple(op.operands[i] for i in indices), tuple(leaves), where, value.shape


def _is_pointwise(op: Op) -> bool:
    """Returns whether an op goes element by element, and takes what others have, too: no device divides integers by
    zero."""
    pointwise = op.target.namespace == "aten" and torch.Tag.pointwise in op.target.tags
    return pointwise and not has_trait(op.target, "raises_on_values")


def _joined(op: Op, rows: Sequence[Any]) -> Any:
    """Which rows an op puts side by side, or who holds all of them; None where that is not known."""
    if op.target not in (STACK, CAT) or None in rows:
        return None
    if isinstance(rows[0], _Holder):
        return _common(rows)
    (made,) = op.call.results
    assert made is not None
    dim = normalize_dim(arg(op.call, "dim"), len(made.shape))
    sizes = [1 if op.target is STACK else x.shape[dim] for x in op.operands]
    return _Joined(dim, tuple(zip(sizes, rows, strict=True)))


def _part(op: Op, rows: Any) -> Any:
    """The rows of one lookup, if these are what an op takes of several."""
    if not isinstance(rows, _Joined) or op.target not in (SELECT, SLICE):
        return None
    (value,), single = op.operands, op.target is SELECT
    if normalize_dim(arg(op.call, "dim"), len(value.shape)) != rows.dim or (not single and arg(op.call, "step") != 1):
        return None
    total = value.shape[rows.dim]
    if single:
        low = arg(op.call, "index") % total
        high = low + 1
    else:
        low, high, _ = slice(arg(op.call, "start"), arg(op.call, "end")).indices(total)
    ends = itertools.accumulate((size for size, _ in rows.parts), initial=0)
    for at, (size, part) in zip(ends, rows.parts, strict=False):
        if (at, at + size) == (low, high):
            return part
    return None


def _common(rows: Iterable[Any]) -> Any:
    """What all of them are, if it is the same."""
    (first, *others) = rows
    return first if all(x == first for x in others) else None


def _keeps_zeros(op: Op) -> bool:
    """Returns whether a pointwise op makes zeros of nothing but zeros, of whatever signs."""
    dims, shape = itertools.count(), [2] * len(op.operands)
    plain = (int, float, bool, str, torch.Tensor, type(None))

    def zero(x: Any) -> Any:
        if isinstance(x, Meta):
            dtype = torch.float32 if x.dtype.is_floating_point else x.dtype
            signs = torch.tensor([0.0, -0.0], dtype=dtype).reshape(2, *[1] * next(dims))
            return signs.expand(shape).contiguous()  # each with each
        return x

    with without_modes():
        args, kwargs = pytree.tree_map(zero, (op.call.args, dict(op.call.kwargs)))
        if not all(isinstance(x, plain) for x in pytree.tree_leaves((args, kwargs))):
            return False
        return bool((op.target(*args, **kwargs) == 0).all())
