"""Proof of a sharding rule by brute force: an op on the whole against the op on its pieces.

For one call, every factor that the rule allows to be cut is cut over 2, 3 and 4 devices (so that pieces are even,
uneven and empty), over two axes at once, in lopsided pieces, and every pair of factors over two axes. Each time the op
is lowered and run as in any program, on virtual devices; what they hold is put together as the rule says, and compared
in value, shape and dtype. Random addends show whether the op is linear where the rule says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from shardlib import graph as graphs
from shardlib.errors import ShardingError
from shardlib.graph import Op
from shardlib.internals import pytree
from shardlib.lower.builder import Builder
from shardlib.lower.emit import Emitter
from shardlib.lower.local import BORDERS
from shardlib.meshes.axis import Axis, Coords
from shardlib.meshes.mesh import Mesh
from shardlib.program.steps import Inside, Program, Var
from shardlib.program.verify import verify
from shardlib.rules.cuts import Cut, cuts
from shardlib.rules.rule import Labels, Rule
from shardlib.rules.table import overload_of, text_of
from shardlib.run import virtual
from shardlib.specs.layout import Factor, Layout, Pending
from shardlib.specs.pieces import span
from shardlib.state import tracing

Axes = tuple[Axis, ...]

# What rounding may cost in a few operations, relative to the largest number.
_ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ROUNDING |= {torch.complex128: 1e-11, torch.complex64: 1e-5}
_MOST = 12  # faults that are told
# What an op raises of pieces that it was not made for.
_RAISED = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)


@dataclass(frozen=True)
class Proof:
    """What was proved: the op, its rule where a user wrote one, the call's shapes, and in how many cuts."""

    op: str
    rule: str
    shapes: tuple[tuple[int, ...], ...]
    cuts: int

    def __str__(self) -> str:
        said = f" ({self.rule})" if self.rule else ""
        return f"{self.op}{said} of {', '.join(map(str, map(list, self.shapes)))}: right in all {self.cuts} cuts"


def prove(op: Any, /, *args: Any, **kwargs: Any) -> Proof:
    """Prove the sharding rule of `op` for the call `op(*args, **kwargs)`; its `Proof`, which prints.

    `op` is an op of torch, or what `torch.library.custom_op` returns. Tensors are small and plain, of any shapes that
    the op takes: sizes of 5 to 8 make pieces that differ, different sizes tell dims apart, random float64 numbers tell
    wrong values from rounding. A dim of size 1 is no factor, so it is never cut.

    Raises:
        ShardingError: the op has no rule, the rule does not fit the call's shapes, or some cut gives other results than
            the whole call; each is told with the cut, the result, and how far it is off.

    Example:
        >>> import torch, shardlib as sl
        >>> @sl.rule("... m k, k n -> ... m n | k:sum {0} {1}")
        ... @torch.library.custom_op("docs::proved", mutates_args=())
        ... def proved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ...     return a @ b
        >>> _ = proved.register_fake(lambda a, b: a @ b)
        >>> print(sl.prove(proved, torch.randn(5, 6), torch.randn(6, 7)))
        docs::proved (... m k, k n -> ... m n | k:sum {0} {1}) of [5, 6], [6, 7]: right in all 19 cuts
    """
    target = overload_of(op, "proved")
    call = _Call.of(target, args, kwargs)
    if call.op.rule is None:
        own = target.namespace not in ("aten", "prims")
        raise ShardingError(
            f"{call.op.target.name()} has no sharding rule for this call",
            [f"operand {i} has shape {list(x.shape)}" for i, x in enumerate(call.tensors)],
            rule="rules belong to ops that are no other ops together; one without runs on whole operands",
            remedy='@sl.rule("...") above the custom op; sl.rule(op) says what to write'
            if own
            else "step.plan(...) of a function that calls it shows the ops that it is made of: prove these",
        )
    if wrong := list(_bookkeeping(call)):
        raise _refused(call, "does not fit the call", wrong)
    every = list(cuts(call.op.rule))
    if len(every) == 1:
        raise _refused(call, "is not put to the test", ["no dim of this call may be cut: they are whole, or of size 1"])
    if text_of(target) and (short := list(dict.fromkeys(_all_fetched(call)))):
        raise _refused(
            call, "is not put to the test", short, "prove it with longer tensors: of more than twice the halo"
        )
    if wrong := [*_wrong(call), *_not_linear(call)]:
        raise _refused(call, "is wrong", wrong)
    return Proof(call.op.target.name(), text_of(target), tuple(tuple(x.shape) for x in call.tensors), len(every))


def _all_fetched(call: _Call) -> Iterator[str]:
    """Halos that are as long as the pieces: every device has the whole dim, whatever the op reads."""
    over, mesh = (Axis("a", 2),), Mesh.abstract(a=2)
    for cut in cuts(call.rule, ways=(2,)):
        if cut.axes and all(axes == over for axes in cut.axes.values()):
            sent = _program(call, cut, mesh).collectives
            fetched = sum(c.bytes for c in sent if isinstance(c.because, Inside) and c.because.how == BORDERS)
            given = zip(call.tensors, call.rule.operands, strict=True)
            if fetched * 2 >= sum(x.nbytes for x, labels in given if any(cut.axes.keys() & {*d} for d in labels)) > 0:
                f = next(iter(cut.axes))
                n = call.rule.sizes[f]
                yield f"{f} has {n} elements, all of which two devices fetch, so its halo shows nothing"


def faults(op: Any, given: tuple[Any, Any], rule: Rule, *, values: bool = True, each: int = 1) -> list[str]:
    """What is wrong with a rule for a call in every `each`-th cut; without `values`, with shapes and dtypes."""
    call = _Call.of(op, *given)
    call.op.rule = rule
    if wrong := list(_bookkeeping(call)):
        return wrong
    try:
        return [*_wrong(call, each, values=values), *(_not_linear(call) if values else ())]
    except ShardingError as error:
        return [str(error)]


@dataclass(frozen=True)
class _Call:
    """One call, as a graph of one op: its tensors, and what they give."""

    op: Op
    tensors: tuple[Tensor, ...]
    results: tuple[Any, ...]

    @staticmethod
    def of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        graph, tensors = fx.Graph(), list[Tensor]()

        def given(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            tensors.append(x.detach())
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = x.detach()
            return node

        node = graph.call_function(target, *pytree.tree_map(given, (tuple(args), dict(kwargs))))
        with torch.no_grad():
            found = target(*args, **kwargs)
        node.meta["val"] = found
        graph.output((node,) if isinstance(found, Tensor) else ())
        with tracing():
            (op,) = graphs.build(fx.GraphModule(torch.nn.Module(), graph)).ops
        return _Call(op, tuple(tensors), tuple(found) if isinstance(found, tuple | list) else (found,))

    @property
    def rule(self) -> Rule:
        assert self.op.rule is not None
        return self.op.rule

    def layout(self, labels: Labels, cut: Cut, pending: Sequence[Pending] = ()) -> Layout:
        sizes = {**self.rule.sizes, **cut.pieces}
        dims = (tuple(Factor(sizes[f], cut.axes.get(f, ())) for f in dim) or (Factor(1),) for dim in labels)
        return Layout(tuple(dims), tuple(pending))

    def pending(self, i: int, cut: Cut) -> list[Pending]:
        """What result i still owes: sums over axes of factors that it has not."""
        have = {f for dim in self.rule.results[i] for f in dim}
        mine = {a for f in have for a in cut.axes.get(f, ())}
        read = {f for labels in self.rule.operands for dim in labels for f in dim}
        lost = [f for f in cut.axes if f in read - have and self.rule.owed(i, f)]
        owed = ((tuple(a for a in cut.axes[f] if a not in mine), self.rule.reduce[f]) for f in lost)
        return [Pending(axes, kind) for axes, kind in owed if axes]


def _bookkeeping(call: _Call) -> Iterator[str]:
    """Labels must spell the shapes, and a factor that is cut and lost must be a declared reduction."""
    rule, results = call.rule, call.results
    pairs = [(f"operand {i}", x, rule.operands[i]) for i, x in enumerate(call.tensors)]
    pairs += [(f"result {i}", x, rule.results[i]) for i, x in enumerate(results) if isinstance(x, Tensor)]
    for name, x, labels in pairs:
        spelled = [math.prod(rule.sizes[f] for f in dim) for dim in labels]
        if spelled != list(x.shape):
            yield f"{name} of shape {list(x.shape)} is spelled {labels}, which is {spelled}"
        if len(flat := [f for dim in labels for f in dim]) != len(set(flat)):
            yield f"{name} has a factor twice: {labels}"
    read = {f for labels in rule.operands for dim in labels for f in dim} - rule.whole
    for i, x in enumerate(results):
        lost = read - {f for dim in rule.results[i] for f in dim} - rule.reduce.keys() if isinstance(x, Tensor) else ()
        yield from (f"{f} may be cut, is not in result {i}, and nothing says how it is reduced" for f in sorted(lost))
    yield from _unlike_its_fake(call)


def _unlike_its_fake(call: _Call) -> Iterator[str]:
    """Programs are made of what an op of a user says by `register_fake`."""
    if call.op.target.namespace in ("aten", "prims", "shardlib"):
        return
    try:
        found = _called(call, [x.to("meta") for x in call.tensors])
    except _RAISED as error:
        yield f"the op has no form for tensors without values (register_fake): {str(error).partition('.')[0]}"
        return
    for i, (x, want) in enumerate(zip(found, _tensors(call.results), strict=False)):
        if x.shape != want.shape or x.dtype != want.dtype:
            say, made = (f"{list(y.shape)} of {y.dtype}" for y in (x, want))
            yield f"result {i} is {made}, and its register_fake says {say}"


def _wrong(call: _Call, each: int = 1, *, values: bool = True) -> Iterator[str]:
    """What is wrong with the results, of every `each`-th cut."""
    for cut in itertools.islice(cuts(call.rule), 0, None, each):
        try:
            yield from (f"{cut}: {fault}" for fault in _faults(call, cut, values=values))
        except ShardingError as error:  # of a local form, which says what is wrong with it
            what = f"{error.what}, with {cut}"
            raise ShardingError(what, error.offenders, rule=error.rule, remedy=error.remedy) from error


def _faults(call: _Call, cut: Cut, *, values: bool = True) -> Iterator[str]:
    """What is wrong with the results of one cut."""
    mesh = Mesh.abstract({a.name: a.of for axes in cut.axes.values() for a in axes} or {"a": 1})
    devices = mesh.all_coords()
    pieces = [
        [call.layout(labels, cut).scatter(x, c) for c in devices]
        for x, labels in zip(call.tensors, call.rule.operands, strict=True)
    ]
    try:
        found = virtual.load(verify(_program(call, cut, mesh)), mesh, share=False)(pieces)
    except ShardingError:
        raise
    except _RAISED as error:
        first, *rest = str(error).splitlines() or [""]
        more = f" {rest[0].strip().removeprefix('* ')}" if first.endswith(":") and rest else ""
        yield f"{type(error).__name__}: {first}{more}"
        return
    whole = [(i, x) for i, x in enumerate(call.results) if isinstance(x, Tensor)]
    for (i, want), held in zip(whole, found, strict=True):
        at = call.layout(call.rule.results[i], cut, call.pending(i, cut))
        shards = list(zip(devices, held, strict=True))
        yield from (f"result {i} {fault}" for fault in _unlike(at, shards, want, values=values))


def _program(call: _Call, cut: Cut, mesh: Mesh) -> Program:
    """The op on pieces, as lowering writes it."""
    builder, op, rule = Builder(mesh), call.op, call.rule
    leaves, sizes = {f: [f] for f in rule.sizes}, {**rule.sizes, **cut.pieces}
    flood = SimpleNamespace(labels={op: leaves}, dims=SimpleNamespace(size=sizes.__getitem__))
    for i, labels in enumerate(rule.operands):
        value = op.operands[i]
        builder.inputs.append(Var(builder.name(value.name), call.layout(labels, cut), value.dtype, value))
    outs = [
        None if r is None else Var(builder.name(r.name), call.layout(labels, cut, call.pending(i, cut)), r.dtype, r)
        for i, (r, labels) in enumerate(zip(op.results, rule.results, strict=True))
    ]
    assignment = {(f, 0): axes for f, axes in cut.axes.items()}
    # Of all that propagation knows, a single op's local form asks for its leaves and their sizes.
    Emitter(builder, flood).op(op, rule, assignment, builder.inputs, outs)  # type: ignore[arg-type]
    builder.outputs += [out for out in outs if out is not None]
    return builder.finish()


def _unlike(at: Layout, shards: Sequence[tuple[Coords, Tensor]], want: Tensor, *, values: bool) -> Iterator[str]:
    """How pieces in a layout differ from the whole."""
    for coords, x in shards:
        if tuple(x.shape) != at.local_shape(coords) or x.dtype != want.dtype:
            yield f"is {list(x.shape)} of {x.dtype} on {coords}, not {list(at.local_shape(coords))} of {want.dtype}"
            return
    if not values:
        return
    first: dict[Any, Tensor] = {}
    for coords, x in shards:
        part = tuple(span(f.size, f.axes, coords) for f in at.factors), tuple(a.coord(coords) for a in at.pending_axes)
        if not _same(x, first.setdefault(part, x)):
            yield "differs between devices that should hold the same"
            return
    if len({p.kind for p in at.pending}) > 1:
        yield "owes reductions of two kinds, and a program knows one at a time"
    elif not _same(have := at.gather(shards), want):
        off = f": it is off by {float((have - want).abs().max()):.3g}" if want.is_floating_point() else ""
        yield f"is wrong{off}"


def _same(a: Tensor, b: Tensor, room: float = 0.0, least: float = 1.0) -> bool:
    """Equal, up to what rounding may cost of numbers as large as these, or as `least`."""
    room = room or _ROUNDING.get(a.dtype, 0.0)
    if not room or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = b[torch.isfinite(b)].abs()
    most = max(least, float(finite.max())) if finite.numel() else least
    return torch.allclose(a, b, rtol=room, atol=room * most, equal_nan=True)


def _not_linear(call: _Call) -> Iterator[str]:
    """Random addends on the operands of every linear set must add up to the result of their sums."""
    for members, size in itertools.product(filter(None, call.rule.linear), (1, 10_000)):
        said = f"{{{','.join(map(str, sorted(members)))}}}"
        if any(call.tensors[i].dtype == torch.bool for i in members):
            continue  # truth values are no sums
        if any(x.dtype == torch.bool for x in _tensors(call.results)):
            yield f"{said} says that sums may be pending, and a truth value is no sum"
            return
        other = [_addend(x, size) if i in members else x for i, x in enumerate(call.tensors)]
        total = [x + y if i in members else x for i, (x, y) in enumerate(zip(call.tensors, other, strict=True))]
        one, two, both = (_called(call, xs) for xs in (call.tensors, other, total))
        room = max(_ROUNDING.get(x.dtype, 0.0) for x in (*call.tensors, *both))
        if not all(_same(x + y, z, room, size) for x, y, z in zip(one, two, both, strict=True)):
            yield f"it is not linear in the operands {said}"
            return


def _addend(x: Tensor, size: int) -> Tensor:
    """Random numbers of that size, exact ones for a tensor of whole numbers."""
    if x.is_floating_point() or x.is_complex():
        return torch.randn_like(x) * size
    return torch.randint_like(x, min(size, 20) + 1)


def _tensors(results: Sequence[Any]) -> list[Tensor]:
    return [x for x in results if isinstance(x, Tensor)]


def _called(call: _Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    given = dict(zip(call.op.node.all_input_nodes, tensors, strict=True))
    args, kwargs = fx.map_arg((call.op.node.args, call.op.node.kwargs), given.__getitem__)
    found = call.op.target(*args, **kwargs)
    return [x for x in (found if isinstance(found, tuple | list) else [found]) if isinstance(x, Tensor)]


_MEND = "mend the rule: mark what is summed (k:sum), what must stay whole (k:whole), and linear operands ({0})"


def _refused(call: _Call, what: str, wrong: Sequence[str], remedy: str = _MEND) -> ShardingError:
    said = text_of(call.op.target)
    more = [f"and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
    return ShardingError(
        f"the rule of {call.op.target.name()}{f', {said!r},' if said else ''} {what}",
        [*wrong[:_MOST], *more],
        rule="an op on pieces gives the pieces of its results; what a result lacks is reduced as the rule says",
        remedy=remedy,
    )
