"""The program of one op: its graph written down from the call itself, then the same stages as for a jitted function.

There is nothing to trace, since the call is known. A number that is an input is a `Scalar` among its arguments. Shapes
of results come from running it on meta tensors. An op that writes is given a copy of the tensor that owns the memory
and the views that lead to what it writes to, and is made functional as in a traced function; the owner's new value is
then one of the results.
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
from shardlib.compiler.lower import Senders, lower
from shardlib.compiler.passes import run_passes
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.propagate import propagate
from shardlib.compiler.simplify import normalize
from shardlib.core.aten.op_names import CLONE
from shardlib.core.aten.op_traits import has
from shardlib.core.call_scalar import hinted
from shardlib.core.context import paused_gc, unseen
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line, user_line
from shardlib.core.torch_private import FakeTensorMode, pytree, running_node, schema_of
from shardlib.core.tree_paths import flatten_with_path
from shardlib.eager.arg_slots import devices_of, filled, listed, made_on, moved
from shardlib.frontend.functionalize import functionalize
from shardlib.frontend.lazy_graph_module import lazily
from shardlib.frontend.traced_graph import Traced
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import Fixed, Names
from shardlib.tensor.local_shards import refuse_valueless
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import Path

Pieces = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor that comes in: its form, the views that lead from it to what the op sees, whether that is written to,
    and whether it is plain: then others may write to its memory."""

    form: Form
    path: Path = ()
    shown: Form | None = None  # what the op sees, where `path` leads elsewhere
    written: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Single:
    """A program that is ready to run on the operands' pieces; its results are the op's own, then, for every operand
    that is written to, its new value and, behind a path, that of what the op saw."""

    run: Callable[..., tuple[Any, ...]]
    results: tuple[Form | None, ...]  # None: a constant
    tree: pytree.TreeSpec  # of the op's own results
    own: int
    meets: bool  # whether it makes ranks meet

    def __call__(self, pieces: Sequence[Pieces], numbers: Sequence[Any] = (), lineage: int = 0) -> tuple[Any, ...]:
        return self.run(pieces, numbers, None, lineage) if lineage and self.meets else self.run(pieces, numbers)


@unseen
@paused_gc()
def single(op: Any, args: Any, kwargs: dict[str, Any], operands: Sequence[Operand], mesh: Mesh) -> Single:
    """Compile one call, and all others with other values of its `Scalar`s; `op` None only follows the paths of the
    operands, or moves them to where they are `shown`."""
    if op is not None:
        _refuse_pending(op, operands)
    name = ("view" if operands[0].path else "redistribute") if op is None else schema_of(op).name.removeprefix("aten::")
    line = user_line(sys._getframe(1)) or Line("", 0, name, "")
    device = made_on(operands[0].form.device, devices_of(args, kwargs))
    writer = _Writer(line, device)
    inputs = [writer.input(f"x{i}", x.form) for i, x in enumerate(operands)]
    owners = [writer.call(CLONE, (n,), {}) if x.written else n for n, x in zip(inputs, operands, strict=True)]
    seen = [writer.follow(n, x.path) for n, x in zip(owners, operands, strict=True)]
    result: Any = seen
    if op is not None:
        result = writer.items(writer.call(op, filled(args, seen), filled(kwargs, seen)))
        if schema_of(op).is_mutable:
            mine = [r.alias_info is None or not r.alias_info.is_write for r in schema_of(op).returns]
            every = result if isinstance(result, tuple) else (result,)
            result = tuple(x for x, own in zip(every, mine, strict=False) if own)
    own, tree = pytree.tree_flatten(result)
    outputs, fixed_outputs = list(own), {}
    for x, owner, view in zip(operands, owners, seen, strict=True):
        if x.written:
            fixed_outputs[len(outputs)] = _fixed(x.form, "what is written to")
            outputs.append(owner)
            if x.path and x.shown is not None:
                fixed_outputs[len(outputs)] = _fixed(x.shown, "what is written to")
                outputs.append(view)
        elif op is None and x.shown is not None:
            fixed_outputs[len(fixed_outputs)] = _fixed(x.shown, "the view")
    vals = [x.meta["val"] if isinstance(x, fx.Node) else None for x in outputs]
    traced = writer.finish(name, inputs, outputs)
    moved = op is None and not operands[0].path
    owned = None if moved or any(x.plain for x in operands) else 0
    compiled = _compile(traced, operands, fixed_outputs, mesh, owned)
    if compiled.program.collectives:
        refuse_valueless(name, mesh, [(f"operand {i}", x.form) for i, x in enumerate(operands)])
    plan = Plan(compiled)
    results = _forms(compiled.program, vals, operands, plan, device)
    meets = mesh.kind == "distributed" and bool(compiled.program.collectives)
    return Single(_load(compiled.program, mesh, plan), results, tree, len(own), meets)


class _Writer:
    """Writes down an FX graph, with the values of its nodes on meta tensors, which answer as the CPU does, or on fake
    ones of another device."""

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
        a, k = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], hinted(moved((args, kwargs), self.shown_on)))
        with self.mode:
            val = op(*a, **k)
            if has(op, "marks"):  # a bit, with which some views are refused; the program conjugates at once
                val = op(val)
            node.meta.update(self.meta, val=val)
        return node

    def follow(self, node: fx.Node, path: Path) -> fx.Node:
        for op, args, kwargs, item in path:
            node = self.call(op, (node, *map(listed, args)), dict(kwargs))
            if item is not None:
                node = self.items(node)[item]
        return node

    def items(self, node: fx.Node) -> Any:
        """A node for every tensor of a node's value; what is no tensor stands for itself."""
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

    def settle(self, gm: fx.GraphModule) -> None:
        """What passes made for the values at hand, which are meta tensors, is made where the operands live."""
        for node in gm.graph.nodes:
            if node.kwargs.get("device") == torch.device("meta"):
                node.kwargs = {**node.kwargs, "device": self.device}

    def finish(self, name: str, inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> Traced:
        node = self.graph.output(tuple(outputs))
        node.meta.update(self.meta)
        paths, _ = flatten_with_path((tuple(range(len(inputs))), {}))
        names = tuple(n.name for n in inputs)
        with lazily(), self.mode:
            gm = fx.GraphModule({}, self.graph)
            functionalize(gm, names)
            self.settle(gm)
            out_paths, out_tree = flatten_with_path(tuple(range(len(outputs))))
            traced = Traced(
                gm,
                name,
                names,
                tuple(range(len(inputs))),
                tuple(p for p, _ in paths),
                tuple(f"result{pytree.keystr(p)}" for p, _ in out_paths),
                out_tree,
            )
            return normalize(traced)


def _fixed(form: Form, source: str) -> Fixed:
    return Fixed.at(form.layout, form.names, source)


def _compile(
    traced: Traced, operands: Sequence[Operand], outputs: dict[int, Fixed], mesh: Mesh, owned: int | None
) -> Compiled:
    graph = graphs.build(traced.graph)
    fixed = {i: _fixed(x.form, f"argument {i}") for i, x in enumerate(operands)}
    propagated = propagate(
        graph, mesh, {graph.inputs[i]: f for i, f in fixed.items()}, outputs, {}, Senders(mesh).messages
    )
    names = tuple(zip(traced.input_names, graph.inputs, strict=True))
    program = run_passes(replace(lower(graph, propagated, mesh), owned=owned))
    return Compiled(traced, mesh, graph, lambda: propagated, program, names, fixed)


def _load(program: Program, mesh: Mesh, plan: Plan) -> Callable[[Sequence[Pieces]], tuple[Any, ...]]:
    """Ranks compare only programs that communicate: others may run on one of them alone.

    Results may share pieces with operands, but for plain ones, since no eager op writes to a piece. What was moved
    keeps no more alive than it shows.
    """
    if program.collectives:
        # The ranks compare it at its first call: who makes it ready holds a lock that other threads wait for.
        return (
            virtual.load(program, mesh) if mesh.kind == "virtual" else distributed.load(program, mesh, plan, late=True)
        )
    source = virtual.source if mesh.kind == "virtual" else distributed.source
    return source(program, mesh).compile()


def _forms(
    program: Program, vals: Sequence[Any], operands: Sequence[Operand], plan: Plan, device: torch.device
) -> tuple[Form | None, ...]:
    forms = [form for x in operands for form in (x.form, x.shown) if form is not None]
    named = any(name for form in forms for dim in form.names for name in dim)
    names: Sequence[Names | None] = plan.output_names if named else [None] * len(vals)
    out: list[Form | None] = []
    for var, val, called in zip(program.outputs, vals, names, strict=True):
        if isinstance(var, Var):
            assert var.layout is not None, f"{var} is no value of the program"
            out.append(Form.of(var.layout, program.mesh, var.dtype, device, called, val.stride(), val.storage_offset()))
        else:
            out.append(None)
    return tuple(out)


def _refuse_pending(op: Any, operands: Sequence[Operand]) -> None:
    if pending := [x.form for x in operands if x.form.layout.pending]:
        raise ShardingError(
            f"{op} reads a ShardedTensor that is a pending sum",
            [str(form.layout) for form in pending],
            rule="an op outside jit takes complete values",
            remedy="x.full_tensor(), and place it again",
        )
