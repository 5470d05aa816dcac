"""The pipeline, as a flat list of stages: trace -> normalize -> propagate -> lower -> passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from shardlib.compiler.equivalence import is_same, is_there
from shardlib.compiler.graph import ir as graphs
from shardlib.compiler.graph.expert_rows import mark as mark_owned
from shardlib.compiler.graph.ir import Graph, Op, Value, is_door
from shardlib.compiler.graph.local_sort import DisorderError, forget
from shardlib.compiler.graph.local_sort import mark as mark_ordered
from shardlib.compiler.graph.regather import mark
from shardlib.compiler.layer_folding import fold, spread, unroll
from shardlib.compiler.lower import Part, Senders, lower_in_parts
from shardlib.compiler.memory_options import Keeping
from shardlib.compiler.output_placement import at_home, fixed_outputs, gradients, placed_anew, state_away
from shardlib.compiler.passes.memory.offload_saved import refuse_offload
from shardlib.compiler.passes.memory.recompute import Recomputed
from shardlib.compiler.passes.memory.remat_policies import is_absent
from shardlib.compiler.passes.split_backward import Halves
from shardlib.compiler.program.steps import Program
from shardlib.compiler.propagate import Propagated, propagate
from shardlib.compiler.propagate.solver.effort import Planning
from shardlib.compiler.propagate.solver.search import Search
from shardlib.compiler.run_passes import Finish
from shardlib.compiler.simplify import normalize
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.context import paused_gc, tracing
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import name_of
from shardlib.core.source_lines import format_path_line
from shardlib.core.stage_clock import StageClock
from shardlib.core.torch_private import pytree
from shardlib.distributed import world
from shardlib.frontend.guards.argument_specs import argument_of, by_argument, describe, refuse_left_out
from shardlib.frontend.guards.flatten_call import FlatCall, arguments_of, flatten_call, twins
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.trace import trace
from shardlib.frontend.traced_graph import Traced
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import Spec, resolve_many
from shardlib.sharding.tree_prefix import SpecLike, broadcast_prefix
from shardlib.sharding.typos import Use, warn_of_typos
from shardlib.tensor.sharded_tensor import REGATHER, ShardedTensor, typeof


@dataclass(frozen=True)
class Compiled:
    """What every stage made of one function at one set of shapes; `seconds` is the time that each stage took."""

    traced: Traced
    mesh: Mesh
    graph: Graph
    told: Callable[[], Propagated]
    program: Program
    inputs: tuple[tuple[str, Value], ...]
    fixed_inputs: Mapping[int, FixedLayout]  # by position
    halves: Halves | None = None  # of the program, where its results have gradients
    recomputed: Recomputed | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    fixed_outputs: Mapping[int, FixedLayout] = field(default_factory=dict)  # by position
    search: Search | None = None  # in the program, or in one layer of those that stand for many

    @cached_property
    def propagated(self) -> Propagated:
        """What was decided, and why; where one layer stood for many, worked out for all when somebody asks."""
        return self.told()


@paused_gc()
def compile_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    static: Collection[int | str] = (),
    placed: Callable[[Any], FixedLayout | None] = lambda leaf: None,
    state: State | None = None,
    differentiate: bool = False,
    exact: bool = False,
    watch: MutationTracker | None = None,
    donate: Collection[int | str] = (),
    keeping: Keeping = Keeping(),  # noqa: B008 it is frozen
    tracer: Callable[..., Traced] = trace,
    before: Iterable[Compiled] = (),
    clock: StageClock | None = None,
) -> Compiled:
    """Run all stages on `fn(*args, **kwargs)`.

    `in_specs` and `out_specs` are prefix pytrees of specs; `placed` gives the layout of a leaf of the call that has
    one. `state`, `differentiate`, `exact` and `watch` are as in `trace`, which `tracer` does; `donate` are arguments
    whose memory is given up; `before` are programs of the function on this mesh: one whose trace is the same is the
    program. `clock` is told of every stage that ends.
    """
    clock = clock or StageClock()
    call = flatten_call(fn, args, kwargs, static, state)
    specs = leaf_specs(fn, call, in_specs)
    with mesh, tracing():
        there = world.current_device(mesh.device, mesh.kind)
        traced = tracer(
            fn,
            args,
            kwargs,
            static=static,
            device=there,
            state=state,
            differentiate=differentiate,
            exact=exact,
            apart=_apart(call, specs),
            watch=watch,
        )
    clock.stop("trace")
    fixed_inputs = _fixed_inputs(traced, call, specs, mesh, placed)
    with mesh, tracing():
        traced = normalize(traced)
    clock.stop("normalize")
    graph = graphs.build(traced.graph)
    traced = placed_anew(traced, graph)
    fixed = {graph.inputs[i]: f for i, f in fixed_inputs.items()} | _constraints(graph, mesh)
    outputs = gradients(traced, graph, fixed_inputs) | fixed_outputs(traced, graph, out_specs, mesh)
    _warn_of_slips(traced, graph, fixed_inputs, outputs, mesh)
    mark(graph, keeping.regather, _regathered(traced, graph, call))
    mark_owned(graph)
    mark_ordered(graph)
    outputs |= at_home(traced, graph, call, fixed_inputs, placed, mesh)

    def is_it(x: Compiled) -> bool:
        same = is_same(traced, x.traced, (graph, x.graph), (fixed_inputs, x.fixed_inputs))
        return same and is_there(outputs, x.fixed_outputs, x.program.outputs)

    clock.stop("rules")
    if not keeping.schedule.state and (found := next(filter(is_it, before), None)):  # calls are its own matter
        return replace(found, traced=replace(traced, graph=found.traced.graph), seconds=clock.seconds)
    try:
        decided = _decided(graph, mesh, fixed, outputs, _doors(graph, mesh), keeping.planning, clock)
    except DisorderError:
        forget(graph)
        decided = _decided(graph, mesh, fixed, outputs, _doors(graph, mesh), keeping.planning, clock)
    program = decided.program
    program = replace(program, donated=_donated(traced, donate))
    program = program if traced.after.gradients else replace(program, replaced=_replaced(traced, program))
    absent = partial(is_absent, call.state.kept)
    refuse_offload(program, keeping.schedule, absent, whole=not traced.after.gradients)
    away = state_away(traced.name, _input_leaves(traced, call), traced.input_names, call.state.kept, keeping.schedule)
    program, halves, recomputed = Finish(traced, away, keeping, absent).run(program)
    clock.stop("passes")
    names = tuple(zip(traced.input_names, graph.inputs, strict=True))
    return Compiled(
        traced,
        mesh,
        graph,
        decided.told,
        program,
        names,
        fixed_inputs,
        halves,
        recomputed,
        clock.seconds,
        outputs,
        decided.search,
    )


def _regathered(traced: Traced, graph: Graph, call: FlatCall) -> set[Value]:
    """The parameters that are gathered anew for the backward pass, as their strategy says."""
    given = zip(_input_leaves(traced, call), graph.inputs, strict=True)
    return {value for x, value in given if getattr(x, REGATHER, False) is True}


def _donated(traced: Traced, donate: Collection[int | str]) -> frozenset[int]:
    """The inputs that are given up."""
    paths = enumerate(traced.input_paths)
    return frozenset(i for i, path in paths if path is not None and argument_of(path) in donate)


def _replaced(traced: Traced, program: Program) -> dict[int, int]:
    """The inputs that a call overwrites, each with the output that comes to stand there."""
    inputs = {leaf: i for i, leaf in enumerate(traced.input_leaves)}
    others = {leaf for leaf, *_ in (*traced.after.data, *traced.after.takes)}  # which show other memory then
    pairs = {inputs[leaf]: at for leaf, at in traced.after.written if leaf in inputs and leaf not in others}
    return {i: at for i, at in pairs.items() if i not in program.donated}


class _Decided(NamedTuple):
    program: Program
    parts: list[Part]
    told: Callable[[], Propagated]
    search: Search


def _decided(
    graph: Graph,
    mesh: Mesh,
    fixed: Mapping[Value, FixedLayout],
    outputs: Mapping[int, FixedLayout],
    doors: Mapping[Op, FixedLayout],
    planning: Planning,
    clock: StageClock,
) -> _Decided:
    """Decide and lower; where layers are alike, one for many of them."""
    sends = Senders(mesh).messages
    folded = fold(graph, fixed, outputs, doors)
    clock.stop("propagate")
    if folded is not None:
        said = folded.of(fixed), folded.of(outputs), folded.of(doors)
        short, parts, told, search = _decided(folded.graph, mesh, *said, planning, clock)
        unrolled = unroll(folded, told(), short, parts)
        clock.stop("lower")
        if unrolled is not None:
            whole = cache(lambda: spread(folded, told(), mesh, fixed, outputs, doors, sends))
            return _Decided(*unrolled, whole, search)
    propagated = propagate(graph, mesh, fixed, outputs, doors, sends, planning)
    clock.stop("propagate")
    program, parts = lower_in_parts(graph, propagated, mesh)
    clock.stop("lower")
    return _Decided(program, parts, lambda: propagated, propagated.search)


def _refuse_other_meshes(name: str, given: Sequence[tuple[Any, str]], mesh: Mesh) -> None:
    others = [
        f"{at}, {typeof(x)}, lives on {x.mesh}" for x, at in given if isinstance(x, ShardedTensor) and x.mesh != mesh
    ]
    if others:
        raise ShardingError(
            f"{name} takes tensors of another mesh than the current one, {mesh}",
            others,
            rule="all tensors of a program live on one mesh",
            remedy="place it again: shard(x.full_tensor(), spec) inside `with` the current mesh",
        )


def _fixed_inputs(
    traced: Traced,
    call: FlatCall,
    leaf_specs: Sequence[SpecLike],
    mesh: Mesh,
    placed: Callable[[Any], FixedLayout | None],
) -> dict[int, FixedLayout]:
    """Layouts of the inputs that have one: from their spec, or because they are placed already. What is `cut` of each
    is noted on its node."""
    nodes = traced.graph.graph.find_nodes(op="placeholder")
    specs = [leaf_specs[i] if 0 <= i < len(leaf_specs) else None for i in traced.input_leaves]
    items = [
        (i, (name, tuple(node.meta["val"].shape), spec, None))
        for i, (name, node, spec) in enumerate(zip(traced.input_names, nodes, specs, strict=True))
        if spec is not None
    ]
    resolved = resolve_many([item for _, item in items], mesh, call="jit in_specs") if items else []
    fixed = {i: r.by(f"in_specs: {item[0]} {r.spec}") for (i, item), r in zip(items, resolved, strict=True)}
    given = [*zip(_input_leaves(traced, call), traced.input_names, strict=True)]
    _refuse_other_meshes(traced.name, given, mesh)
    wrong = []
    for i, (leaf, name) in enumerate(given):
        if (at := placed(leaf)) is not None:
            said = fixed.get(i)
            if said is not None and not any(said.open) and not said.agrees_with(at):
                wrong.append(
                    f"{name} of shape {list(at.layout.shape)} is laid out [{at.layout}], in_specs say [{said.layout}]"
                )
            names = said.names if said is not None and said.layout.chunked == at.layout.chunked else at.names
            fixed[i] = FixedLayout.at(at.layout, names, said.source if said else f"argument {name}")
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        raise ShardingError(
            f"{traced.name}: {len(wrong)} of {len(items)} arguments with a spec {verb} elsewhere",
            wrong,
            rule="jit does not move its arguments",
            remedy="x.redistribute(spec) before the call, or leave the spec out (None) to take the argument as it is",
        )
    for i, node in enumerate(nodes):
        dims = fixed[i].layout.dims if i in fixed else ()
        node.meta["cut"] = {d for d, dim in enumerate(dims) if any(factor.axes for factor in dim)}
        node.meta["fixed"] = i in fixed
    return fixed


def _input_leaves(traced: Traced, call: FlatCall) -> list[Any]:
    """The leaf of the call that each input is; None for a cotangent."""
    leaves = call.leaves
    return [leaves[i] if i >= 0 else None for i in traced.input_leaves]


def leaf_specs(fn: Callable[..., Any], call: FlatCall, in_specs: Any) -> list[SpecLike]:
    """The spec of each leaf of the arguments."""
    if in_specs is None:
        return [None] * len(call.arguments)
    if callable(in_specs):
        found: list[SpecLike] = list(in_specs(call.arguments))
        if len(found) != len(call.arguments):
            raise ShardingError(
                f"in_specs, a function, returns {len(found)} specs for {len(call.arguments)} leaves of the arguments",
                rule="it gets the list of all leaves, and returns a spec, or None, for each",
                remedy="lambda leaves: [None for _ in leaves]",
            )
        state = twins(call.arguments, call.state.tensors)  # an argument that is a buffer lives where that does
        return [None if state.get(i, 0) >= len(found) else spec for i, spec in enumerate(found)]
    name = name_of(fn)
    positional, named = pytree.tree_unflatten(list(call.arguments), call.tree)
    tree = by_argument(fn, name, in_specs, len(positional), named)
    names = arguments_of(fn, len(positional), named)
    specs, values = ([*a, *k.values()] for a, k in (tree, (positional, named)))
    leaves = broadcast_prefix(specs, values, f"{name}: in_specs", describe, names)
    refuse_left_out(fn, name, in_specs, positional, named)
    return leaves


def _apart(call: FlatCall, specs: Sequence[SpecLike]) -> set[int]:
    """Arguments that are one tensor with something else, but are said to live elsewhere: then they are two."""
    pairs = twins(call.arguments, call.state.tensors).items()
    return {i for i, at in pairs if specs[i] != (specs[at] if at < len(specs) else None)}


def _constraints(graph: Graph, mesh: Mesh) -> dict[Value, FixedLayout]:
    fixed = {}
    for op in graph.ops:
        if op.constrains or has_trait(op.target, "leaves_body"):
            value = op.results[0]
            assert value is not None
            fixed[value] = _said(op, value, mesh)
    return fixed


def _doors(graph: Graph, mesh: Mesh) -> dict[Op, FixedLayout]:
    return {op: _said(op, op.operands[0], mesh) for op in graph.ops if has_trait(op.target, "enters_body")}


def _said(op: Op, value: Value, mesh: Mesh) -> FixedLayout:
    """What the spec in an op's text says of a value."""
    r = Spec.convert(str(op.node.args[1])).resolve(value.shape, mesh, name=op.operands[0].name)
    call, exact = ("shard", r.exact) if op.constrains else ("shard_map", (True,) * len(r.exact))
    return replace(r, exact=exact, source=f"{call}(..., {str(r.spec)!r}) at {format_path_line(op.line)}")


def _warn_of_slips(
    traced: Traced, graph: Graph, inputs: Mapping[int, FixedLayout], outputs: Mapping[int, FixedLayout], mesh: Mesh
) -> None:
    """Warn of names that nearly have a rule, in all that this program's source says."""
    names = traced.input_names
    uses = [(f"in_specs of {names[i]}", f.spec) for i, f in inputs.items() if f.spec is not None]
    names = traced.result_names
    uses += [(f"out_specs of {names[i]}", f.spec) for i, f in outputs.items() if f.spec is not None]
    lines: dict[Any, Use] = {}  # a line in a loop says it once
    for op in graph.ops:
        if (op.constrains or is_door(op.target)) and not op.backward:
            call, spec = "shard" if op.constrains else "shard_map", Spec.convert(str(op.node.args[1]))
            lines.setdefault((op.line, spec), (f"{call}({op.operands[0].name}) at {format_path_line(op.line)}", spec))
    warn_of_typos([*uses, *lines.values()], mesh)
