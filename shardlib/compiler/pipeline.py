"""The pipeline, as a flat list of stages: trace -> simplify -> propagate -> lower -> passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from shardlib.compiler.annotations import (
    conflicting_twins,
    fixed_body_inputs,
    fixed_constraints,
    fixed_inputs,
    input_tensors,
    leaf_specs,
    warn_of_misspelled_names,
)
from shardlib.compiler.dump_stages import StageDump
from shardlib.compiler.equivalence import is_placed_alike, is_same_program
from shardlib.compiler.graph import ir as graphs
from shardlib.compiler.graph.expert_rows import mark_group_rows
from shardlib.compiler.graph.ir import Graph, Value
from shardlib.compiler.graph.local_sort import DisorderError, forget_orders, mark_orders
from shardlib.compiler.graph.regather import mark_regathered
from shardlib.compiler.layer_folding import fold, spread_decisions, unroll
from shardlib.compiler.lower import MessageCounter, Part, lower_in_parts
from shardlib.compiler.memory_options import MemoryOptions
from shardlib.compiler.output_placement import fixed_outputs, forget_moved, gradients, place_outputs, state_away
from shardlib.compiler.passes.memory.offload_saved import refuse_offload
from shardlib.compiler.passes.memory.recompute import Recomputed, refuse_remat
from shardlib.compiler.passes.memory.remat_policies import is_absent
from shardlib.compiler.passes.split_backward import Halves, split
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.program.verify import verify
from shardlib.compiler.propagate import Decisions, GraphDecisions, propagate
from shardlib.compiler.propagate.pins import Pins
from shardlib.compiler.propagate.solver.effort import Planning
from shardlib.compiler.propagate.solver.search import Search
from shardlib.compiler.run_passes import PassRunner
from shardlib.compiler.simplify import normalize
from shardlib.compiler.stages.count_steps import count_steps
from shardlib.compiler.stages.cut import cut
from shardlib.compiler.stages.merge import merge, merge_halves
from shardlib.compiler.stages.order_sums import order_sums
from shardlib.compiler.stages.staged import Staged
from shardlib.core.context import paused_gc, tracing
from shardlib.core.fragment_tag import outside_microbatches
from shardlib.core.stage_clock import StageClock
from shardlib.distributed import world
from shardlib.frontend.guards.argument_specs import argument_key
from shardlib.frontend.guards.flatten_call import FlatCall, flatten_call
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.trace import trace
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.tensor.sharded_tensor import REGATHER, ShardedTensor


@dataclass(frozen=True)
class Compiled:
    """The results of all stages for one function at one set of shapes; `seconds` is the time that each stage took."""

    traced: TracedFunction
    mesh: Mesh
    graph: Graph
    propagate_whole: Callable[[], Decisions]
    program: Program
    inputs: tuple[tuple[str, Value], ...]
    fixed_inputs: Mapping[int, FixedLayout]  # by position
    halves: Halves | None = None  # of the program, where its results have gradients
    recomputed: Recomputed | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    fixed_outputs: Mapping[int, FixedLayout] = field(default_factory=dict)  # by position
    search: Search | None = None  # of the program, or of one layer of a folded graph
    staged: Staged | None = None  # the programs of stages, which are merged in `program`
    layer_decisions: Callable[[], GraphDecisions] | None = None  # of a folded graph; None: those of the whole

    @property
    def local(self) -> tuple[Program, Halves | None]:
        """The program that this process runs, and its halves: on a rank of a pipeline, those of its stage."""
        mesh, staged = self.mesh, self.staged
        if staged is None or mesh.kind != "distributed":
            return self.program, self.halves
        stage = mesh.stage_of(mesh.rank)
        return staged.programs[stage], None if staged.halves is None else staged.halves[stage]

    @cached_property
    def propagated(self) -> Decisions:
        """The decisions and their reasons; after folding, they are spread to all layers on first use."""
        with paused_gc():
            return self.propagate_whole()

    def decisions(self, *, by_layer: bool) -> GraphDecisions:
        """Returns the decisions about the whole graph, or, `by_layer`, those about some of equal layers."""
        if by_layer and self.layer_decisions is not None:
            return self.layer_decisions()
        return GraphDecisions(self.graph, self.propagated)


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
    state: StateWalk | None = None,
    differentiate: bool = False,
    exact: bool = False,
    watch: MutationTracker | None = None,
    donate: Collection[int | str] = (),
    options: MemoryOptions = MemoryOptions(),  # noqa: B008 it is frozen
    tracer: Callable[..., TracedFunction] = trace,
    before: Iterable[Compiled] = (),
    clock: StageClock | None = None,
) -> Compiled:
    """Runs all stages on `fn(*args, **kwargs)`.

    `in_specs` and `out_specs` are prefix pytrees of specs. `placed` returns the layout of a leaf that has one. `state`,
    `differentiate`, `exact` and `watch` are as in `trace`, which `tracer` replaces. The call gives up the memory of
    the arguments `donate`. `before` are programs of the function on this mesh; one with the same trace is reused.
    """
    clock = clock or StageClock()
    clock.begin("trace")
    call = flatten_call(fn, args, kwargs, static, state)
    specs = leaf_specs(fn, call, in_specs)
    with mesh, tracing(), outside_microbatches():
        device, apart = world.current_device(mesh.device, mesh.kind), conflicting_twins(call, specs)
        more = {"state": state, "differentiate": differentiate, "exact": exact, "apart": apart, "watch": watch}
        traced = tracer(fn, args, kwargs, static=static, device=device, **more)
    clock.begin("normalize")
    (dump := StageDump.open(traced.name)).write_traced("traced", traced.graph)
    inputs = fixed_inputs(traced, call, specs, mesh, placed)
    traced = _simplify(traced, mesh)
    clock.begin("rules")
    dump.write_traced("simplified", traced.graph)
    graph = graphs.build(traced.graph)
    traced = forget_moved(traced, graph)
    pins = _annotate(traced, graph, call, inputs, out_specs, placed, mesh)
    _mark(graph, options, _regathered(traced, graph, call))
    before = () if options.schedule.state or _has_stages(mesh) else before  # these belong to this call's objects
    if (reused := _reusable(before, traced, graph, inputs, pins.outputs)) is not None:
        clock.end()
        return replace(reused, traced=replace(traced, graph=reused.traced.graph), seconds=clock.seconds)
    lowered = _lower_in_order(graph, mesh, pins, options.planning, clock, dump)
    clock.begin("passes")
    finished = _finish(traced, graph, lowered.program, call, donate, options, dump)
    clock.end()
    return Compiled(
        *(traced, mesh, graph, lowered.propagate_whole),
        inputs=tuple(zip(traced.input_names, graph.inputs, strict=True)),
        fixed_inputs=inputs,
        fixed_outputs=pins.outputs,
        seconds=clock.seconds,
        search=lowered.search,
        layer_decisions=lowered.layer_decisions,
        **vars(finished),
    )


def _simplify(traced: TracedFunction, mesh: Mesh) -> TracedFunction:
    with mesh, tracing():
        traced = normalize(traced)
    if _has_stages(mesh):
        order_sums(traced.graph.graph)
        count_steps(traced.graph.graph)
    return traced


def _mark(graph: Graph, options: MemoryOptions, regathered: set[Value]) -> None:
    """Marks values that are gathered again, rows of groups, and sorts that devices do by themselves."""
    mark_regathered(graph, options.regather, regathered)
    mark_group_rows(graph)
    mark_orders(graph)


def _annotate(
    traced: TracedFunction,
    graph: Graph,
    call: FlatCall,
    inputs: Mapping[int, FixedLayout],
    out_specs: Any,
    placed: Callable[[Any], FixedLayout | None],
    mesh: Mesh,
) -> Pins:
    """Collects all layouts that are fixed, and warns of misspelled names in them."""
    values = {graph.inputs[i]: f for i, f in inputs.items()} | fixed_constraints(graph, mesh)
    outputs = gradients(traced, graph, inputs) | fixed_outputs(traced, graph, out_specs, mesh)
    warn_of_misspelled_names(traced, graph, inputs, outputs, mesh)
    outputs |= place_outputs(traced, graph, call, inputs, placed, mesh)
    return Pins(values, outputs, fixed_body_inputs(graph, mesh))


def _reusable(
    before: Iterable[Compiled],
    traced: TracedFunction,
    graph: Graph,
    inputs: Mapping[int, FixedLayout],
    outputs: Mapping[int, FixedLayout],
) -> Compiled | None:
    """Returns an earlier result that holds for this trace, too."""
    for x in before:
        same = is_same_program(traced, x.traced, (graph, x.graph), (inputs, x.fixed_inputs))
        if same and is_placed_alike(outputs, x.fixed_outputs, x.program.outputs):
            return x
    return None


def _finish(
    traced: TracedFunction,
    graph: Graph,
    program: Program,
    call: FlatCall,
    donate: Collection[int | str],
    options: MemoryOptions,
    dump: StageDump,
) -> _Finished:
    """Runs the passes on a lowered program, and notes the inputs whose memory the call gives up or overwrites."""
    is_whole, kept = not traced.after.gradients, call.state.kept
    program = replace(program, donated=_donated(traced, donate))
    program = replace(program, replaced=_replaced(traced, program)) if is_whole else program
    absent = partial(is_absent, kept)
    refuse_offload(program, options.schedule, absent, whole=is_whole)
    refuse_remat(program, options, absent)
    away = state_away(traced.name, input_tensors(traced, call), traced.input_names, kept, options.schedule)
    runner = PassRunner(traced, away, options, dump)
    if not _has_stages(program.mesh):
        return _Finished(*runner.run(program, traced.name))
    staged = _cut(traced, graph, program, call, options.memory)
    programs, stage_halves, recomputed = runner.run_stages(staged.programs)
    staged = replace(staged, programs=tuple(programs))
    if is_whole:
        return _Finished(verify(merge(staged)), recomputed=recomputed, staged=staged)
    staged = replace(staged, halves=tuple(stage_halves))
    needs = split(program, len(traced.after.cotangents), len(traced.after.gradients)).needs
    halves = merge_halves(staged, needs)
    return _Finished(verify(halves.joint), halves, recomputed, staged)


def _has_stages(mesh: Mesh) -> bool:
    """Returns whether a program on this mesh runs on several stages."""
    return mesh.stage_axis is not None and mesh.stage is None


def _cut(traced: TracedFunction, graph: Graph, program: Program, call: FlatCall, memory: int | None) -> Staged:
    """Cuts a lowered program into those of the stages; tensors of one stage stay there.

    Every stage needs the new values of plain tensors. A sharded tensor that is on all stages, and its gradient, come to
    the first stage whose forward pass reads it, or else to the one that writes to it.
    """
    after = traced.after
    tensors = dict(zip(traced.input_leaves, input_tensors(traced, call), strict=True))
    at = {leaf: x.mesh.stage for leaf, x in tensors.items() if isinstance(x, ShardedTensor)}
    written = (*after.written, *after.data, *after.grads, *after.gradients)
    var = dict(zip(traced.input_leaves, program.inputs, strict=True))
    inputs = {var[leaf]: stage for leaf, stage in at.items() if stage is not None}
    outputs: dict[int, Var | int | None] = {
        place: None if leaf not in at else var[leaf] if at[leaf] is None else at[leaf]
        for leaf, place in written
        if place is not None
    }
    own = len(program.inputs) - len(after.cotangents)
    results = {v: program.outputs[place] for v, place in zip(program.inputs[own:], after.cotangents, strict=True)}
    states = {i for i, path in enumerate(traced.input_paths) if path is None} - {*range(own, len(program.inputs))}
    trained = {value.like for value in graph.values() if value.like is not None}
    parameters = {v for i, v in enumerate(program.inputs) if i in states or graph.inputs[i] in trained}
    return cut(program, program.mesh.stages, inputs, outputs, results, parameters, memory)


@dataclass(frozen=True)
class _Finished:
    program: Program
    halves: Halves | None = None
    recomputed: Recomputed | None = None
    staged: Staged | None = None


def _regathered(traced: TracedFunction, graph: Graph, call: FlatCall) -> set[Value]:
    """Returns the parameters that their strategy gathers again for the backward pass."""
    pairs = zip(input_tensors(traced, call), graph.inputs, strict=True)
    return {value for x, value in pairs if getattr(x, REGATHER, False) is True}


def _donated(traced: TracedFunction, donate: Collection[int | str]) -> frozenset[int]:
    paths = enumerate(traced.input_paths)
    return frozenset(i for i, path in paths if path is not None and argument_key(path) in donate)


def _replaced(traced: TracedFunction, program: Program) -> dict[int, int]:
    """Returns the inputs that a call overwrites, each with the output that holds its new value."""
    inputs = {leaf: i for i, leaf in enumerate(traced.input_leaves)}
    others = {leaf for leaf, *_ in (*traced.after.data, *traced.after.takes)}  # they get other memory
    pairs = {inputs[leaf]: at for leaf, at in traced.after.written if leaf in inputs and leaf not in others}
    return {i: at for i, at in pairs.items() if i not in program.donated}


class _Lowered(NamedTuple):
    program: Program
    parts: list[Part]
    propagate_whole: Callable[[], Decisions]
    search: Search
    layer_decisions: Callable[[], GraphDecisions] | None = None


def _lower_in_order(
    graph: Graph, mesh: Mesh, pins: Pins, planning: Planning, clock: StageClock, dump: StageDump
) -> _Lowered:
    """Lowers with sorts that devices do by themselves; without them, if some reader needs one common order."""
    try:
        return _lower(graph, mesh, pins, planning, clock, dump)
    except DisorderError:
        forget_orders(graph)
        return _lower(graph, mesh, pins, planning, clock, dump)


def _lower(graph: Graph, mesh: Mesh, pins: Pins, planning: Planning, clock: StageClock, dump: StageDump) -> _Lowered:
    """Decides and lowers; of equal layers only some are planned, and their steps are repeated."""
    dump.write_graph(graph)
    sends = MessageCounter(mesh).messages
    clock.begin("propagate")
    folded = fold(graph, pins)
    if folded is not None:
        short = _lower(folded.graph, mesh, folded.restrict(pins), planning, clock, dump)
        clock.begin("lower")
        unrolled = unroll(folded, short.propagate_whole(), short.program, short.parts)
        if unrolled is not None:
            dump.write_program("unrolled", unrolled[0])
            whole = cache(lambda: spread_decisions(folded, short.propagate_whole(), mesh, pins, sends))
            near = cache(lambda: GraphDecisions(folded.graph, short.propagate_whole(), folded.representative_member))
            return _Lowered(*unrolled, whole, short.search, near)
    clock.begin("propagate")
    propagated = propagate(graph, mesh, pins, sends, planning)
    clock.begin("lower")
    dump.write_decisions(graph, propagated)
    program, parts = lower_in_parts(graph, propagated, mesh)
    dump.write_program("lowered", program)
    return _Lowered(program, parts, lambda: propagated, propagated.search)
