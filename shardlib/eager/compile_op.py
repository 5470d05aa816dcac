"""Compiles one op outside `jit`: writes its graph from the call, then runs the compiler's usual stages.

A `Scalar` among the arguments is a number that is an input. Shapes of results come from running the op on meta tensors.
An op that writes gets a copy of the tensor that owns the memory, and the views that lead to the written part. The graph
is then made functional as in a traced function, and the owner's new value is one of the results.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardlib.compiler.codegen import distributed, virtual
from shardlib.compiler.graph import ir as graphs
from shardlib.compiler.lower import MessageCounter, lower
from shardlib.compiler.passes import run_passes
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.propagate import propagate
from shardlib.compiler.propagate.pins import Pins
from shardlib.compiler.simplify import normalize
from shardlib.core.aten.op_names import CLONE
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.call_scalar import replace_by_hints
from shardlib.core.context import paused_gc, skip_dynamo
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line, user_line
from shardlib.core.torch_internals.torch_private import FakeTensorMode, pytree, running_node, schema_of
from shardlib.core.tree_paths import flatten_with_path
from shardlib.eager.arg_slots import choose_device, fill_slots, replace_devices, requested_devices, thaw_args
from shardlib.frontend.functionalize import functionalize
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.frontend.tracing_scope import skip_graph_source
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FactorNames, FixedLayout
from shardlib.tensor.local_shards import refuse_valueless
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import ViewPath

Shards = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operand:
    """An input of the program. The op reads the tensor that the views of `path` show of the input."""

    form: Form
    path: ViewPath = ()
    shown: Form | None = None  # of the tensor that the op reads, if that is another one
    written: bool = False
    plain: bool = False  # others may write to its memory


@dataclass(frozen=True)
class CompiledOp:
    """A program that runs on the operands' shards.

    Its results are the op's own, then for each written operand the new value of its owner and, if the operand has a
    path, the new value of the tensor that the op read.
    """

    run: Callable[..., tuple[Any, ...]]
    results: tuple[Form | None, ...]  # None: a constant
    tree: pytree.TreeSpec  # of the op's own results
    own: int  # number of the op's own results
    communicates: bool

    def __call__(self, shards: Sequence[Shards], numbers: Sequence[Any] = (), lineage: int = 0) -> tuple[Any, ...]:
        return self.run(shards, numbers, None, lineage) if lineage and self.communicates else self.run(shards, numbers)


@skip_dynamo
@paused_gc()
def compile_op(op: Any, args: Any, kwargs: dict[str, Any], operands: Sequence[Operand], mesh: Mesh) -> CompiledOp:
    """Compiles one call, for all values of its `Scalar`s.

    With `op` None, the program only applies the paths of the operands, or reshards them to the forms `shown`.
    """
    if op is not None:
        _refuse_partial_sums(op, operands)
    name = ("view" if operands[0].path else "redistribute") if op is None else schema_of(op).name.removeprefix("aten::")
    line = user_line(sys._getframe(1)) or Line("", 0, name, "")
    device = choose_device(operands[0].form.device, requested_devices(args, kwargs))
    writer = _GraphWriter(line, device)
    inputs = [writer.input(f"x{i}", x.form) for i, x in enumerate(operands)]
    owners = [writer.call(CLONE, (n,), {}) if x.written else n for n, x in zip(inputs, operands, strict=True)]
    views = [writer.apply_views(n, x.path) for n, x in zip(owners, operands, strict=True)]
    result: Any = views
    if op is not None:
        result = writer.items(writer.call(op, fill_slots(args, views), fill_slots(kwargs, views)))
        if schema_of(op).is_mutable:
            is_new = [r.alias_info is None or not r.alias_info.is_write for r in schema_of(op).returns]
            returned = result if isinstance(result, tuple) else (result,)
            result = tuple(x for x, new in zip(returned, is_new, strict=False) if new)
    own, tree = pytree.tree_flatten(result)
    outputs, fixed_outputs = list(own), {}
    for x, owner, view in zip(operands, owners, views, strict=True):
        if x.written:
            fixed_outputs[len(outputs)] = _fix_form(x.form, "what is written to")
            outputs.append(owner)
            if x.path and x.shown is not None:
                fixed_outputs[len(outputs)] = _fix_form(x.shown, "what is written to")
                outputs.append(view)
        elif op is None and x.shown is not None:
            fixed_outputs[len(fixed_outputs)] = _fix_form(x.shown, "the view")
    vals = [x.meta["val"] if isinstance(x, fx.Node) else None for x in outputs]
    traced = writer.finish(name, inputs, outputs)
    is_reshard = op is None and not operands[0].path
    fresh = None if is_reshard or any(x.plain for x in operands) else 0
    compiled = _compile(traced, operands, fixed_outputs, mesh, fresh)
    if compiled.program.collectives:
        refuse_valueless(name, mesh, [(f"operand {i}", x.form) for i, x in enumerate(operands)])
    plan = Plan(compiled)
    forms = _output_forms(compiled.program, vals, operands, plan, device)
    communicates = mesh.kind == "distributed" and bool(compiled.program.collectives)
    return CompiledOp(_load(compiled.program, mesh, plan), forms, tree, len(own), communicates)


class _GraphWriter:
    """Writes an FX graph; its nodes' values are meta tensors for the CPU, fake tensors for other devices."""

    def __init__(self, line: Line, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.meta: dict[str, Any] = {"line": line}
        self.device = device
        self.shown_on = torch.device("meta") if device.type == "cpu" else device
        self.mode = nullcontext() if device.type == "cpu" else FakeTensorMode()
        if running_node() is not None:
            self.meta["backward"] = True

    def input(self, name: str, form: Form) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta.update(self.meta, val=form.abstract(self.shown_on))
        return node

    def call(self, op: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, tuple(args), dict(kwargs))
        a, k = pytree.tree_map_only(
            fx.Node, lambda n: n.meta["val"], replace_by_hints(replace_devices((args, kwargs), self.shown_on))
        )
        with self.mode:
            val = op(*a, **k)
            if has_trait(op, "sets_lazy_bit"):  # some views refuse the bit; the program conjugates at once
                val = op(val)
            node.meta.update(self.meta, val=val)
        return node

    def apply_views(self, node: fx.Node, path: ViewPath) -> fx.Node:
        for op, args, kwargs, item in path:
            node = self.call(op, (node, *map(thaw_args, args)), dict(kwargs))
            if item is not None:
                node = self.items(node)[item]
        return node

    def items(self, node: fx.Node) -> Any:
        """Returns a node for each tensor in a node's value, and other values unchanged."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return node
        if not isinstance(val, tuple | list):
            return val
        out = []
        for i, v in enumerate(val):
            if isinstance(v, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (node, i))
                item.meta.update(self.meta, val=v)
                out.append(item)
            else:
                out.append(v)
        return type(val)(out) if type(val) in (tuple, list) else tuple(out)

    def replace_meta_devices(self, gm: fx.GraphModule) -> None:
        """Moves tensors that functionalization creates on the meta device to the operands' device."""
        for node in gm.graph.nodes:
            if node.kwargs.get("device") == torch.device("meta"):
                node.kwargs = {**node.kwargs, "device": self.device}

    def finish(self, name: str, inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> TracedFunction:
        node = self.graph.output(tuple(outputs))
        node.meta.update(self.meta)
        paths, _ = flatten_with_path((tuple(range(len(inputs))), {}))
        names = tuple(n.name for n in inputs)
        with skip_graph_source(), self.mode:
            gm = fx.GraphModule({}, self.graph)
            functionalize(gm, names)
            self.replace_meta_devices(gm)
            out_paths, out_tree = flatten_with_path(tuple(range(len(outputs))))
            traced = TracedFunction(
                gm,
                name,
                names,
                tuple(range(len(inputs))),
                tuple(p for p, _ in paths),
                tuple(f"result{pytree.keystr(p)}" for p, _ in out_paths),
                out_tree,
            )
            return normalize(traced)


def _fix_form(form: Form, source: str) -> FixedLayout:
    return FixedLayout.at(form.layout, form.names, source)


def _compile(
    traced: TracedFunction, operands: Sequence[Operand], outputs: dict[int, FixedLayout], mesh: Mesh, fresh: int | None
) -> Compiled:
    graph = graphs.build(traced.graph)
    fixed = {i: _fix_form(x.form, f"argument {i}") for i, x in enumerate(operands)}
    pins = Pins({graph.inputs[i]: f for i, f in fixed.items()}, outputs)
    propagated = propagate(graph, mesh, pins, MessageCounter(mesh).messages)
    names = tuple(zip(traced.input_names, graph.inputs, strict=True))
    program = run_passes(replace(lower(graph, propagated, mesh), owned_outputs=fresh))
    return Compiled(traced, mesh, graph, lambda: propagated, program, names, fixed)


def _load(program: Program, mesh: Mesh, plan: Plan) -> Callable[[Sequence[Shards]], tuple[Any, ...]]:
    """Loads a program. Ranks compare only programs that communicate, since others may run on one rank alone.

    Results may share shards with ShardedTensors, since no eager op writes to a shard.
    """
    if program.collectives:
        # Ranks compare the program at its first call, since this caller holds a lock that other threads wait for.
        return (
            virtual.load(program, mesh) if mesh.kind == "virtual" else distributed.load(program, mesh, plan, late=True)
        )
    if mesh.is_elsewhere:
        results = distributed.absent_results(program, mesh)
        return lambda *_: results
    source = virtual.source if mesh.kind == "virtual" else distributed.source
    return source(program, mesh).compile()


def _output_forms(
    program: Program, vals: Sequence[Any], operands: Sequence[Operand], plan: Plan, device: torch.device
) -> tuple[Form | None, ...]:
    forms = [form for x in operands for form in (x.form, x.shown) if form is not None]
    named = any(name for form in forms for dim in form.names for name in dim)
    names: Sequence[FactorNames | None] = plan.output_names if named else [None] * len(vals)
    out: list[Form | None] = []
    for var, val, dim_names in zip(program.outputs, vals, names, strict=True):
        if isinstance(var, Var):
            assert var.layout is not None, f"{var} is no value of the program"
            out.append(
                Form.intern(var.layout, program.mesh, var.dtype, device, dim_names, val.stride(), val.storage_offset())
            )
        else:
            out.append(None)
    return tuple(out)


def _refuse_partial_sums(op: Any, operands: Sequence[Operand]) -> None:
    if pending := [x.form for x in operands if x.form.layout.pending]:
        raise ShardingError(
            f"{op} reads a ShardedTensor that is a pending sum",
            [str(form.layout) for form in pending],
            rule="an op outside jit takes complete values",
            remedy="x.full_tensor(), and place it again",
        )
