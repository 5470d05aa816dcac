"""Converts the layouts of parameters along one mesh axis to a `tp_plan` of transformers.

A style there says how one module's weight is sharded and what is communicated around the module. So a style fits only
if the plan's layouts imply the same communication: columns whose sharded dim a later weight contracts need none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.module_tensors import innermost_module, is_same_tensor, module_names, origins
from shardlib.compiler.program.steps import Compute, Var
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.core.errors import ShardingError
from shardlib.core.name_patterns import star
from shardlib.sharding.layout import ShardSizes

LINEAR = ("weight", "bias")  # parameters that are styled by their module's name; others by their own


@dataclass
class _Weight:
    """A parameter: its values (the input and views of it), its readers, the sharded dim, its factor classes there."""

    name: str
    var: Var
    values: set[Value]
    readers: list[Op] = field(default_factory=list)
    dim: int | None = None
    classes: set[DimFactor] = field(default_factory=set)
    is_contracted: bool = False

    @property
    def key(self) -> str:
        head, _, last = self.name.rpartition(".")
        return star(head if last in LINEAR else self.name)

    @property
    def rank(self) -> int:
        assert self.var.layout is not None
        return len(self.var.layout.dims)


def tp_plan(compiled: Compiled, axis: str) -> dict[str, str]:
    """See `Plan.to_tp_plan`."""
    if axis not in compiled.mesh.axes:
        raise ShardingError(
            f"the plan of {compiled.traced.name} has no axis {axis!r}",
            [f"its axes are {', '.join(compiled.mesh.axes)}"],
            remedy='plan.to_tp_plan(axis="model")',
        )
    weights = _list_weights(compiled, axis)
    columns = [w for w in weights if w.dim is not None and not w.is_contracted]
    rows = [w for w in weights if w.dim is not None and w.is_contracted]
    styles: dict[str, set[str]] = defaultdict(set)
    wrong = []
    for w in sorted(weights, key=lambda w: -w.rank):  # a bias goes with its weight
        style = _find_style(w, axis, rows, columns, styles)
        if faults := _find_faults(w, axis):
            wrong += [f"{w.name} is {w.var.layout}: {fault}" for fault in faults]
        elif style is None:
            wrong.append(f"{w.name} is {w.var.layout}")
        elif style or w.name.endswith("weight") or w.rank > 1:
            styles[w.key].add(style)
            if style and w.rank > 2:
                styles[w.key.rpartition(".")[0]].add("moe_tp_experts")
    for w in weights:
        if w.rank == 1 and w.dim is None and styles.get(w.key) == {""} and _meets_shards(w, compiled, axis):
            styles[w.key] = {"replicated_with_grad_allreduce"}
    wrong += [
        f"layers of {key} differ: {', '.join(sorted(x or 'whole' for x in s))}"
        for key, s in styles.items()
        if len(s) > 1
    ]
    if wrong:
        raise ShardingError(
            f"layouts of {compiled.traced.name} along {axis!r} have no style in transformers",
            wrong,
            rule="a style shards the output dim -2 of a weight (colwise), its contracted dim -1 (rowwise), or a dim of "
            "an embedding, and all layers of a model alike",
            remedy="give these parameters other specs, or use plan.to_dtensor_placements()",
        )
    return {key: style for key, (style,) in styles.items() if style}


def _find_faults(w: _Weight, axis: str) -> list[str]:
    """Returns the reasons why no style has the shards of a parameter along an axis, whatever its dims are."""
    assert w.var.layout is not None
    uses = [(f, a) for dim in w.var.layout.dims for f in dim for a in f.axes if a.name == axis]
    faults = [f"only {a} of {axis} shards it" for _, a in uses if not a.whole]
    return faults + ["transformers shards in chunks" for f, _ in uses if isinstance(f.size, ShardSizes)]


def _find_style(
    w: _Weight, axis: str, rows: list[_Weight], columns: list[_Weight], styles: dict[str, set[str]]
) -> str | None:
    """Returns the style of a parameter, or None; "" for a replicated one, and a bias that goes with its weight."""
    if w.rank < 2:
        goes_with = {"colwise", "colwise_gather_output"} & styles.get(w.key, set())
        return "" if w.dim is None or goes_with else None
    if w.dim is None:
        return ""
    if w.rank == 2 and any(_is_lookup(op) for op in w.readers):
        return {0: "embedding_rowwise", 1: "embedding_colwise"}[w.dim]
    assert w.var.layout is not None
    factors = w.var.layout.dims[w.dim]
    at = next(i for i, f in enumerate(factors) if any(a.name == axis for a in f.axes))
    front = math.prod(int(f.size) for f in factors[:at])
    if front not in (1, 2) or w.dim != w.rank - (1 if w.is_contracted else 2):
        return None
    packed = "packed_" if front == 2 else ""
    if w.is_contracted:
        is_paired = any(w.classes & other.classes for other in columns)
        return f"{packed}rowwise" + ("" if is_paired or packed else "_split_input")
    is_paired = any(w.classes & other.classes for other in rows)
    return f"{packed}colwise" + ("" if is_paired or packed else "_gather_output")


def _is_lookup(op: Op) -> bool:
    """Returns whether an op reads one floating-point tensor, by indices."""
    return [v.dtype.is_floating_point for v in op.operands].count(True) == 1 < len(op.operands)


def _list_weights(compiled: Compiled, axis: str) -> list[_Weight]:
    """Returns the floating-point inputs that ops inside modules read."""
    propagation, names = compiled.propagated.propagation, module_names(compiled)
    find = propagation.dims.find
    weights = {
        value: _Weight(names[name], var, {value})
        for (name, value), var in zip(compiled.inputs, compiled.program.inputs, strict=True)
        if names[name] != name and var.dtype.is_floating_point
    }
    by_name = {name: weights[value] for name, value in compiled.inputs if value in weights}
    owner = {value: by_name[name] for value, name in origins(compiled).items() if name in by_name}
    for value, w in owner.items():
        w.values.add(value)
    for op in compiled.graph.ops:
        if not op.backward and not is_same_tensor(op) and innermost_module(op) is not None:
            for v in op.operands:
                if v in owner:
                    owner[v].readers.append(op)
    for value, w in weights.items():
        assert w.var.layout is not None
        sharded = [d for d, dim in enumerate(w.var.layout.dims) if any(a.name == axis for f in dim for a in f.axes)]
        if sharded:
            w.dim = sharded[0]
            w.classes = {find(x) for x in propagation.value[value][w.dim]}
            w.is_contracted = any(
                w.classes & {find(x) for x in leaves} for op in w.readers for leaves in _summed(op, compiled)
            )
    return [w for w in weights.values() if w.readers]


def _summed(op: Op, compiled: Compiled) -> Iterator[list[DimFactor]]:
    """Yields the factors that an op sums over."""
    propagation = compiled.propagated.propagation
    if op.rule is not None:
        for label, kind in op.rule.reduce.items():
            if kind == "sum":
                yield [x for leaf in propagation.labels[op].get(label, ()) for x in propagation.dims.resolve([leaf])]


def _meets_shards(w: _Weight, compiled: Compiled, axis: str) -> bool:
    """Returns whether a replicated parameter meets shards along the axis, so that its gradient is summed there."""
    return any(
        not step.backward
        and any(v.value in w.values for v in step.operands)
        and any(a.name == axis for v in step.out_vars if v.layout is not None for a in v.layout.axes)
        for step in compiled.program.steps
        if isinstance(step, Compute)
    )
