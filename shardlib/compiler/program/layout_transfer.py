"""Checks the layouts around each step: a message shards, joins or reduces its axes, a call passes partial sums on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardlib.compiler.program.inplace_ops import takes
from shardlib.compiler.program.steps import TIERS, Collective, Compute, Var, syms
from shardlib.core.aten.op_traits import has_trait
from shardlib.sharding.layout import REDUCTIONS, Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh

_SETTLE = ("all_reduce", "reduce_scatter")
_KINDS = (*_SETTLE, "all_gather", "all_to_all", "ppermute", *TIERS)
_SUMS = {"sum": "sum", "owned": "sum"}  # what settles what is pending so


def message_faults(mesh: Mesh, c: Collective) -> Iterator[str]:
    """Yields faults of a collective: its group must be disjoint parts of mesh axes, its result's layout must follow."""
    primes, moves = _primes(c.axes), c.kind in TIERS
    if c.kind not in _KINDS:
        yield "is of no kind that is known"
    elif c.reduce not in REDUCTIONS:
        yield f"reduces by {c.reduce}, which is unknown"
    elif (c.source.host, c.out.host) != (c.kind == "to_device", c.kind == "to_host"):
        yield "goes from one memory to another, or should" if moves else "is of what is in the host's memory"
    elif any(mesh.axes.get(a.name) != a.axis_size for a in c.axes) or len({*primes}) < len(primes):
        yield "goes over axes that are none of the mesh's, or over one twice"
    elif (source := _layout(c.source)) is not None and (out := _layout(c.out)) is not None:
        yield from _pending(c, source, out)
        yield from _cut(c, source, out)


def call_faults(mesh: Mesh, step: Compute) -> Iterator[str]:
    """Yields faults of a call.

    An operand that is written over has the form of the result. A partial sum of an operand is one of every result,
    unless the op reads no values. A new partial sum comes from a sharded operand, or a number that differs by device.
    """
    varying = [a for x in syms(step) for a in x.axes]
    if varying and any(mesh.axes.get(a.name) != a.axis_size for a in varying):
        yield "reads a number that differs along an axis which is none of the mesh's"
    may = takes(step) if step.over else ()
    for i, k in enumerate(step.over):
        v, x = step.outs[i], None if k is None or k >= len(step.args) else step.args[k]
        if isinstance(x, Var) and (v is None or i >= len(may) or k not in may[i] or not _fits(v, x)):
            yield f"cannot write {v} over {x}"
    if not step.has_partial_sums or has_trait(step.target, "creates") or has_trait(step.target, "receives"):
        return
    layouts = [x for v in step.operands if (x := _layout(v)) is not None]
    if len(layouts) < len(step.operands):
        return
    pending = {p for x in layouts if x.pending for p in _primes(x.pending_axes)}
    for v in step.out_vars:
        layout = _layout(v)
        pending_after = {*_primes(layout.pending_axes)} if layout is not None and layout.pending else set[Axis]()
        if layout is None or pending_after == pending:
            continue
        if not pending <= pending_after:
            yield f"leaves {v} pending over {_named(pending_after)}, and operands are over {_named(pending)}"
        elif fresh := pending_after - pending - {*_primes(varying), *(p for x in layouts for p in _primes(x.axes))}:
            yield f"leaves {v} pending over {_named(fresh)}, along which nothing differs"


def _layout(v: Var) -> Layout | None:
    """Returns how a value is sharded over the mesh, or None if that is unknown.

    It is unknown for intermediates of local forms and for values of shard_map bodies, which have the layout of one
    device. A program that was read from text does not mark the latter, so replicated values count as unknown there.
    """
    if v.layout is None or (v.value.manual if v.value is not None else v.layout.is_replicated):
        return None
    return v.layout


def _fits(v: Var, x: Var) -> bool:
    """True if a value fits into the memory of another, element by element."""
    if v.layout is None or x.layout is None or v.layout is x.layout:
        return v.dtype == x.dtype
    return v.dtype == x.dtype and v.layout.shape == x.layout.shape


def _pending(c: Collective, source: Layout, out: Layout) -> Iterator[str]:
    """Yields faults where a reduction reduces anything but partial sums over its axes, or other ones get lost."""
    before, after = ({*_primes(x.pending_axes)} for x in (source, out))
    settles = {*_primes(c.axes)} if c.kind in _SETTLE else set()
    if before - settles != after:
        yield f"leaves pending over {_named(after)} what was pending over {_named(before)}"
    elif settles - before:
        yield f"reduces over {_named(settles)} what is pending over {_named(before)}"
    for p in source.pending:
        if not settles.isdisjoint(_primes(p.axes)) and _SUMS.get(p.kind, p.kind) != c.reduce:
            yield f"reduces by {c.reduce} what is pending by {p.kind}"


def _cut(c: Collective, source: Layout, out: Layout) -> Iterator[str]:
    """Yields faults where anything but a gather joins shards, or anything but a scatter makes new ones."""
    before, after, over = ([*_primes(x)] for x in (source.axes, out.axes, c.axes))
    more, fewer = {*after} - {*before}, {*before} - {*after}
    joins = {*over} if c.kind == "all_gather" else set()
    makes = {*over} if c.kind == "reduce_scatter" else set()
    if c.kind == "ppermute":
        is_right = more | fewer <= {*over}
    else:
        is_right = more == makes and fewer == joins and (c.kind != "all_to_all" or {*over} <= {*before})
    if not is_right:
        yield f"makes pieces over {_named(after)} of pieces over {_named(before)}"
    elif joins and [p for p in before if p in joins] != over:
        yield f"joins pieces over {_named(before)} in another order"


def _primes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple(p for a in axes for p in a.primes())


def _named(axes: Iterable[Axis]) -> str:
    return " ".join(sorted(map(str, axes))) or "nothing"
