"""Keeps rows gathered from a sharded table on the devices that hold them.

The device that holds a row has its values, the others have zeros: a partial sum. It needs no reduction if

* every op maps zeros to zeros (`square`, `relu`), until one sums over rows (`sum`), and that sum is small;
* or the last op writes to the same rows, each device to its own (`scatter`, the gradient of a table). Then rows of
  other devices may have any values on the way:

    gather(logits, ids) -> where(s < 0, s * p, s / p) -> scatter(logits, ids)

A single row (`u[0]`, at a boundary) is a gathered row, too. It stays on its device if the values computed from it are
written among rows of that device (`cat([2 * u[1:2] - u[2:3], ...])`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from shardlib.compiler.graph.ir import Op, Value, viewed
from shardlib.compiler.lower.partial_sums.partial_sum_fanout import MOST, Branching, fitting, linear, readers, returned
from shardlib.compiler.lower.partial_sums.pointwise_ops import is_total_pointwise, keeps_zeros
from shardlib.compiler.lower.placement import COMPLETE, Partial, Placement
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.core.aten.op_names import CAT, SELECT, SLICE, STACK
from shardlib.core.aten.op_traits import has_trait
from shardlib.rules.iteration_space import arg, normalize_dim
from shardlib.rules.rule import OWNED, SingleBlock
from shardlib.sharding.chunks import shard_sizes
from shardlib.sharding.mesh.axis import Axis


class RowsOp(NamedTuple):
    """The way an op runs on gathered rows: its assignment, its operands' forms, and its results' partial sum."""

    assignment: Assignment
    forms: Mapping[int, Placement]
    partial: Partial


class _Joined(NamedTuple):
    """Rows of several gathers, concatenated along a dim: the number of each, and the rows."""

    dim: int
    parts: tuple[tuple[int, Any], ...]


class _Holder(NamedTuple):
    """The device that has a single row: its position along the axes that shard the table."""

    axes: tuple[Axis, ...]
    place: int


@dataclass
class _Region:
    """The values computed from gathered rows.

    `rows` identifies the rows of values that are aligned with a gather. Values in `own` are undefined in rows of other
    devices. `ends` are the sums that remain to be reduced.
    """

    roots: dict[Value, Placement] = field(default_factory=dict)
    rows: dict[Value, Any] = field(default_factory=dict)
    forms: dict[Value, Placement] = field(default_factory=dict)
    own: set[Value] = field(default_factory=set)
    passed: dict[Op, RowsOp] = field(default_factory=dict)
    ends: dict[Value, Placement] = field(default_factory=dict)

    def rows_of(self, value: Value) -> Any:
        """Returns the identity of a value's rows; the holder of a single row holds its views."""
        root = self.rows.get(viewed(value))
        return root if isinstance(root, _Holder) else self.rows.get(value)


class GatheredRows:
    """Finds the ops that run on gathered rows without a reduction: `passed`."""

    def __init__(self, branching: Branching) -> None:
        self.branching, self.values, self.propagation = branching, branching.values, branching.propagation
        self.passed: dict[Op, RowsOp] = {}
        self._waiting: dict[Value, Any] = {}  # gathered rows without a reader so far

    def note_results(self, op: Op, *, carried: bool) -> None:
        """Records the gathered rows among an op's results, if they are a partial sum over the holders.

        An op that `carried` partial sums gathers nothing itself, but may concatenate gathered rows.
        """
        sources = {*op.operands} if self._joins(op) else set[Value]()
        rows = _joined(op, [self._waiting[x] for x in op.operands]) if sources else None
        if not sources and (carried or (rows := self._gathered(op)) is None):
            return
        (top, *_) = op.results
        assert top is not None
        form = self.values.partial_form(top)
        if form is not None and form[1].kind == "sum" and top.dtype.is_floating_point:
            self._waiting[top] = rows
        for source in sources:
            del self._waiting[source]

    def _joins(self, op: Op) -> bool:
        """Returns whether an op only concatenates gathered rows that have no other reader."""
        if len(op.operands) == 1 or not has_trait(op.target, "moves_data"):
            return False
        return all(x in self._waiting and len(x.readers) == 1 and not x.is_output for x in op.operands)

    def reach(self, op: Op) -> None:
        """Decides, before the first op that reads gathered rows, whether they are reduced."""
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
        computed = region.forms.keys() - region.roots.keys()
        for op, way in region.passed.items():
            for i in () if way.partial else way.forms:  # the op writes rows: without the region they are resharded
                now += self._reshard_seconds(op, i) if viewed(op.operands[i]) in computed else 0.0
        ends = 0.0
        for value, form in region.ends.items():
            decided = [branching.decided(op, i) for op, i in readers(value) if op.operands[i] is value]
            ends += branching.seconds(value, form, decided[0] if decided else form[0])
        prices = [branching.more(op, frozenset(way.forms), way.assignment) for op, way in region.passed.items()]
        besides, more = map(sum, zip(*prices, strict=True))
        return now - ends - besides > max(more, 0.0)

    def _reshard_seconds(self, op: Op, i: int) -> float:
        """Returns the seconds of the reshard between an operand's producer and its reader, as both were decided."""
        value, branching = op.operands[i], self.branching
        want, maker = branching.decided(op, i), value.op
        while maker is not None and maker.transparent:
            _, want = self.values.through(maker, want)
            (value,) = maker.operands
            maker = value.op
        assert maker is not None
        form = self.values.forms.result_form(maker, value.index, branching.p.assignment(maker), COMPLETE)
        return branching.seconds(value, form, want)

    def _region(self, root: Value) -> _Region | None:
        """Returns the values computed from gathered rows; None if an op needs the reduced sum."""
        region, todo, queued = _Region(), list[tuple[int, Op]](), set[Op]()

        def begin(root: Value) -> bool:
            if (form := self.values.partial_form(root)) is None:  # already reduced
                return False
            region.roots[root] = region.forms[root] = form
            region.rows[root] = self._waiting[root]
            return follow(root)

        def follow(value: Value) -> bool:
            for op, _ in readers(value):
                if op not in queued:
                    queued.add(op)
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
            if any(not follow(x) for x in self._note_rows(op, way, region)):
                return None
            region.passed[op] = way
        return region

    def _note_rows(self, op: Op, way: RowsOp, region: _Region) -> list[Value]:
        """Records an op's results in the region; returns those that are still gathered rows."""
        row_results = list[Value]()
        for k, r in enumerate(op.results):
            if r is None or not way.partial:
                continue
            own = way.partial.kind == OWNED
            form = self.values.forms.result_form(op, k, way.assignment, COMPLETE if own else way.partial)
            rows = _common(region.rows_of(op.operands[i]) for i in way.forms)
            part = rows if isinstance(rows, _Holder) else _part(op, rows)
            aligned = (
                rows is not None and is_total_pointwise(op) and all(op.operands[i].shape == r.shape for i in way.forms)
            )
            if aligned or has_trait(op.target, "moves_data") or (is_total_pointwise(op) and len(way.forms) == 1):
                region.forms[r] = (form[0], way.partial) if own else form
                region.rows[r] = rows if aligned else part
                region.own |= {r} if own else set()
                row_results.append(r)
            else:
                region.ends[r] = form
        return row_results

    def _way(self, op: Op, region: _Region) -> RowsOp | None:
        """Returns how an op runs on gathered rows; None if it needs the reduced sum."""
        if op.rule is None or op.manual or op.constrains or op.owns is not None:
            return None
        on = [i for i, x in enumerate(op.operands) if viewed(x) in region.forms]
        forms = {i: form for i in on if (form := self.branching.form(op.operands[i], region.forms)) is not None}
        if len(forms) < len(on) or len({form[1].axes for form in forms.values()}) != 1:
            return None
        if self._puts_there(op, forms, region):
            earlier = self.passed[op].forms if op in self.passed else {}
            return RowsOp(self.branching.p.assignment(op), {**earlier, **forms}, COMPLETE)
        if op in self.passed:
            return None
        rows = _common(region.rows_of(op.operands[i]) for i in on)
        if self._writes_there(op, forms, rows):
            return RowsOp(self.branching.p.assignment(op), forms, COMPLETE)
        assignment = fitting(self.values, op, {i: axes for i, (axes, _) in forms.items()})
        if assignment is None or not op.rule.adds_up(x for (x, _), axes in assignment.items() if axes):
            return None
        axes = next(iter(forms.values()))[1].axes
        shapes = {x.shape for x in (*(op.operands[i] for i in on), *op.results) if x is not None}
        aligned = rows is not None and len(shapes) == 1
        if region.own.isdisjoint(viewed(op.operands[i]) for i in on):
            zeros = len(on) == len(op.operands) and (aligned or len(on) == 1) and is_total_pointwise(op)
            if linear(op, on) or (zeros and keeps_zeros(op)):
                return RowsOp(assignment, forms, Partial(axes))
        held = isinstance(rows, _Holder) and has_trait(op.target, "moves_data")
        stays = (aligned and is_total_pointwise(op)) or held or _part(op, rows) is not None
        return RowsOp(assignment, forms, Partial(axes, OWNED)) if stays else None

    def _writes_there(self, op: Op, forms: Mapping[int, Placement], rows: Any) -> bool:
        """Returns whether an op writes values to the rows that they came from, with the same sharding."""
        lookup = None if op.rule is None else op.rule.accesses.lookup
        if lookup is None or rows is None or [*forms] != [lookup.values]:
            return False
        (i,) = forms
        return self._rows(op) == rows and self.branching.decided(op, i) == forms[i][0]

    def _puts_there(self, op: Op, forms: Mapping[int, Placement], region: _Region) -> bool:
        """Returns whether an op writes single rows among the rows of their holders."""
        blocks = {} if op.rule is None else {held.value: held for held in op.rule.accesses.blocks}
        return all(
            i in blocks
            and (holder := self._holder(op, blocks[i])) is not None
            and holder == region.rows_of(op.operands[i])
            and self.branching.decided(op, i) == form[0]
            for i, form in forms.items()
        )

    def _gathered(self, op: Op) -> Any:
        """Returns the identity of the rows that an op gathers; None if it gathers none."""
        if op.rule is None:
            return None
        if op.rule.accesses.lookup is not None and op.rule.accesses.lookup.values is None:
            return self._rows(op)
        return next((self._holder(op, held) for held in op.rule.accesses.blocks if held.value is None), None)

    def _holder(self, op: Op, held: SingleBlock) -> _Holder | None:
        """Returns the device that holds a block; None if the block is not sharded."""
        axes = Axis.merge(self.branching.p.assignment(op).get((held.factor, 0), ()))
        if not axes:
            return None
        first, *rest = map(self.propagation.dims.size, self.propagation.labels[op][held.factor])
        ends = itertools.accumulate(shard_sizes(first, axes))
        return _Holder(tuple(axes), next(i for i, end in enumerate(ends) if held.block // math.prod(rest) < end))

    def _rows(self, op: Op) -> Any:
        """Returns the identity of the rows that an op reads or writes: indices, sharding, dims, shape."""
        assert op.rule is not None
        assert op.rule.accesses.lookup is not None
        rows, indices, values = op.rule.accesses.lookup
        assignment = self.branching.p.assignment(op)
        leaves = [
            (leaf, assignment.get((f, k), ()))
            for f in rows
            for k, leaf in enumerate(self.propagation.labels[op].get(f, ()))
        ]
        labels = op.rule.results[0] if values is None else op.rule.operands[values]
        value = op.results[0] if values is None else op.operands[values]
        assert value is not None
        counted = {f for i in indices for dim in op.rule.operands[i] for f in dim}
        where = tuple(d for d, dim in enumerate(labels) if counted & {*dim})
        return tuple(op.operands[i] for i in indices), tuple(leaves), where, value.shape


def _joined(op: Op, rows: Sequence[Any]) -> Any:
    """Returns the identity of concatenated rows, or the holder of all of them; None if unknown."""
    if op.target not in (STACK, CAT) or None in rows:
        return None
    if isinstance(rows[0], _Holder):
        return _common(rows)
    (result,) = op.call.results
    assert result is not None
    dim = normalize_dim(arg(op.call, "dim"), len(result.shape))
    sizes = [1 if op.target is STACK else x.shape[dim] for x in op.operands]
    return _Joined(dim, tuple(zip(sizes, rows, strict=True)))


def _part(op: Op, rows: Any) -> Any:
    """Returns the rows of one gather, if an op slices exactly these from several; else None."""
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
    """Returns the common value, or None."""
    (first, *others) = rows
    return first if all(x == first for x in others) else None
