"""Runs this rank's program on `torch.distributed`.

A collective starts when its source is ready and finishes when its result is first read, so it overlaps with the
arithmetic in between. Before the first run the ranks compare their programs. If a collective fails, the error names the
dead ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardlib.compiler.codegen.below_autograd import run_below
from shardlib.compiler.codegen.codegen import Generator, Source
from shardlib.compiler.codegen.comm_debug import counted
from shardlib.compiler.codegen.profiler_ranges import Runner, label, ranged, watched
from shardlib.compiler.program.call_numbers import list_numbers
from shardlib.compiler.program.steps import TIERS, Collective, Compute, Program, Start, Step, Var
from shardlib.compiler.stages.message_groups import group_messages
from shardlib.compiler.stages.staged import Staged
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import CollectiveError
from shardlib.core.source_lines import format_file_line
from shardlib.distributed.consensus import compare_programs, raise_lost_ranks
from shardlib.distributed.turns import CURRENT_TURN, CallTime, Turn
from shardlib.ops import offload
from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops.collectives.p2p import Form, Incoming, Mailbox
from shardlib.ops.collectives.transport import groups
from shardlib.ops.collectives.transport.shm_route import Pair, Route
from shardlib.ops.transfers import RECEIVE, SEND
from shardlib.sharding.mesh.axis import Coords
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor import rank_checks
from shardlib.tensor.tensor_meta import short_dtype

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

_SETTINGS = ("SHARDLIB_OPS", "SHARDLIB_CHECK")  # variables that all ranks must agree on

_START: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce.start,
    "all_gather": all_gather.start,
    "reduce_scatter": reduce_scatter.start,
    "all_to_all": all_to_all.start,
    "ppermute": ppermute.start,
}
_START_MANY: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce.start_many,
    "all_gather": all_gather.start_many,
    "reduce_scatter": reduce_scatter.start_many,
}


def source(program: Program, mesh: Mesh, *, ranges: bool = False) -> Source:
    """Generates the Python function of this rank."""
    coords = mesh.coords(mesh.rank)
    return Generator(program, [coords], ranges=ranges).generate(_communicate)


def _open_routes(staged: Staged, mesh: Mesh) -> Mapping[Pair, Route]:
    """Opens routes in shared memory for all messages of the stages; every rank calls it. Returns those of this rank."""
    stages = {(message.sender, message.receiver) for message in staged.messages}
    axis, places = str(mesh.stage_axis), mesh.all_coords()
    pairs = {(mesh.rank_of({**at, axis: a}), mesh.rank_of({**at, axis: b})) for a, b in stages for at in places}
    return groups.open_routes(mesh, sorted(pairs))


def _addressed(
    program: Program, mesh: Mesh, last: Mapping[int, int], routes: Mapping[Pair, Route]
) -> tuple[Program, Mailbox]:
    """Returns the program of a stage with this rank's peers and mailbox in its messages.

    `last` has the number of the last value of each message.
    """
    coords = mesh.coords(mesh.rank)

    def peer(stage: int) -> int:
        return mesh.rank_of({**coords, str(mesh.stage_axis): stage})

    values = defaultdict[tuple[int, int], list[Form]](list)  # by sender and number
    for step in program.steps:
        if isinstance(step, Compute) and step.target is RECEIVE:
            (out,), (stage, number) = step.out_vars, step.args
            assert out.layout is not None, f"{out} travels, and has no layout"
            values[peer(stage), last[number]].append((out.layout.local_shape(coords), out.dtype))
    mailbox = Mailbox([Incoming(*key, tuple(forms)) for key, forms in values.items()], mesh.device, routes)
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Compute) and step.target is SEND:
            x, stage, number = step.args
            message = {"peer": peer(stage), "number": number, "last": last[number] == number}
            step = replace(step, target=partial(mailbox.send, **message), args=(x,))
        elif isinstance(step, Compute) and step.target is RECEIVE:
            step = replace(step, target=mailbox.receive, args=())
        steps.append(step)
    return replace(program, steps=tuple(steps)), mailbox


def absent_results(program: Program, mesh: Mesh) -> tuple[Any, ...]:
    """Returns the results of a program of another stage on this rank."""
    return tuple(_absent(x, mesh) for x in program.outputs)


def _with_all_draws(own: Program, whole: Program) -> Program:
    """Returns the program of a stage with the draws of others, unread, so that all ranks' generators stay alike."""
    draws = [s for s in whole.steps if isinstance(s, Compute) and has_trait(s.target, "draws_key")]
    drawn = [s.args for s in own.steps if isinstance(s, Compute) and has_trait(s.target, "draws_key")]
    unread = (
        replace(s, kwargs={**s.kwargs, "lead": 0}, outs=tuple(replace(v, name=f"{v.name}.unread") for v in s.out_vars))
        for s in draws
        if s.args not in drawn
    )
    return replace(own, steps=(*unread, *own.steps))


def _absent(x: Any, mesh: Mesh) -> Any:
    """Returns a result that only another stage has: its shard, without memory. A constant is everywhere."""
    if not isinstance(x, Var):
        return x
    assert x.layout is not None, f"{x} is no value of the program"
    (coords,) = mesh.own_coords()
    return (torch.empty(x.layout.local_shape(coords), dtype=x.dtype, device="meta"),)


def _with_absent(function: Callable[..., Any], own: Program, whole: Program, mesh: Mesh) -> Callable[..., Any]:
    """Returns the program of a stage with the results of other stages beside its own; saved values stay its own."""
    pairs = zip(own.outputs, whole.outputs, strict=False)
    absent = {i: _absent(x, mesh) for i, (mine, x) in enumerate(pairs) if mine is None and x is not None}

    def run(*args: Any) -> tuple[Any, ...]:
        return tuple(absent.get(i, x) for i, x in enumerate(function(*args)))

    return run


def _communicate(g: Generator, start: Start) -> None:
    """Writes the start of one message, and the lines that finish it."""
    (coords,) = g.devices
    bundle, first = start.moves, start.first
    if first.kind in TIERS:
        _copy(g, first, coords, start)
        return
    sources, outs = ([g.name(v, coords) for v in vs] for vs in ([c.source for c in bundle], [c.out for c in bundle]))
    handle = groups.group_for(g.program.mesh, first.axes)
    group = g.bind(handle, "group_" + "_".join(map(str, first.axes)))
    counted = _counted if handle.shm is None and handle.size > 1 else lambda start: start
    more = [f"kind={first.reduce!r}"] if first.kind in ("all_reduce", "reduce_scatter") else []
    if len(bundle) == 1:
        begin = g.bind(_in_range(g, counted(_START[first.kind]), label(bundle)), f"start_{first.kind}")
        args = [sources[0], *(f"{key}={g.literal(value, coords)}" for key, value in first.params.items())]
        left = outs[0]
    else:
        begin = g.bind(_in_range(g, counted(_START_MANY[first.kind]), label(bundle)), f"start_many_{first.kind}")
        args = [f"[{', '.join(sources)}]"]
        if first.kind != "all_reduce":
            args += [g.literal([c.params[key] for c in bundle], coords) for key in ("dim", "sizes")]
        left = ", ".join(outs)
    if first.kind == "all_gather" and all(c.out in g.read_only for c in bundle):
        more.append("shared=True")
    flying = g.fresh(f"{outs[0]}_flying")
    g.lines.append(f"{flying} = {begin}({', '.join([*args, f'group={group}', *more])})")
    finish = f"{flying}.finish()"
    if g.ranges:
        finish = f"{g.bind(ranged(lambda h: h.finish(), f'wait for {label(bundle)}'), 'finish')}({flying})"
    g.flying[start.outs] = [f"{left} = {finish}", f"del {flying}"]


def _copy(g: Generator, c: Collective, coords: Coords, start: Start) -> None:
    """Writes a copy between tiers of memory, without other ranks."""
    begin, out = g.bind(getattr(offload, c.kind), c.kind), g.name(c.out, coords)
    flying = g.fresh(f"{out}_flying")
    g.lines.append(f"{flying} = {begin}({g.name(c.source, coords)})")
    g.flying[start.outs] = [f"{out} = {flying}.finish()", f"del {flying}"]


@cache
def _counted(start: Callable[..., Any]) -> Callable[..., Any]:
    """Counts starts over torch, as the shared-memory library counts its own, so that all ranks count alike."""

    def begin(*args: Any, **kwargs: Any) -> Any:
        CURRENT_TURN[3] += 1
        return start(*args, **kwargs)

    return begin


def _in_range(g: Generator, start: Callable[..., Any], name: str) -> Callable[..., Any]:
    return ranged(start, name) if g.ranges else start


def _compile(
    program: Program, stage: Program | None, mesh: Mesh, plan: Plan
) -> tuple[Runner, AbstractContextManager[None]]:
    """Returns what this rank runs, and the mailbox around each of its calls."""
    if mesh.is_elsewhere:
        absent = absent_results(program, mesh)
        return lambda *_: absent, nullcontext()
    own: Program = program
    mailbox: AbstractContextManager[None] = nullcontext()
    if stage is not None:
        staged = plan.compiled.staged
        assert staged is not None, "the program of a stage is one of several"
        own, mailbox = _addressed(stage, mesh, group_messages(staged, stage), _open_routes(staged, mesh))
        own = _with_all_draws(own, program)
    function = watched(source(own, mesh).compile(), lambda: source(own, mesh, ranges=True).compile())
    return (function if stage is None else _with_absent(function, stage, program, mesh)), mailbox


def load(program: Program, mesh: Mesh, plan: Plan, *, stage: Program | None = None, late: bool = False) -> Runner:
    """Returns the program as a function of this rank's local inputs; the ranks compare their programs first.

    `stage` is the program of this rank's stage, if it has a pipeline's. Results of other stages have no memory. With
    `late` they do so at the first call. They do so again if torch.distributed is restarted.
    """
    constants = (f"{var.name} = a constant with the digest {rank_checks.digest(x):x}" for var, x in program.captured)
    text = "\n".join([plan.listing(format_file_line), f"on {mesh}", *constants])
    digest = hashlib.sha256(text.encode()).hexdigest()
    collectives = [f"{c.kind} of {short_dtype(c.source.dtype)}[{c.source.layout}]" for c in program.collectives]
    turn = Turn("\n".join([plan.name, *collectives]), digest)
    function: Runner | None = None
    mailbox: AbstractContextManager[None] = nullcontext()
    numbers = list_numbers(program)
    gloo: list[groups.GroupHandle] = []
    world: object = None

    def prepare() -> None:
        nonlocal function, gloo, world, mailbox
        mesh.device_mesh  # noqa: B018 - starts torch.distributed if it is not running
        settings = "\n".join(f"{name}={os.environ.get(name, '')!r}" for name in _SETTINGS)
        compare_programs(
            mesh, hashlib.sha256(f"{digest}\n{settings}".encode()).hexdigest(), f"{plan.name}\n{text}\n{settings}"
        )
        axes = list(dict.fromkeys(c.axes for c in program.collectives))
        groups.prepare(mesh, axes)
        handles = [groups.group_for(mesh, a) for a in axes]
        gloo = [group for group in handles if group.may_use_gloo]
        function, mailbox = _compile(program, stage, mesh, plan)
        world = dist.group.WORLD

    def run(
        pieces: Sequence[Sequence[torch.Tensor]],
        leaves: Sequence[Any] = (),
        after: CallTime | None = None,
        lineage: int = 0,
    ) -> tuple[Any, ...]:
        if world is not dist.group.WORLD:
            prepare()
        assert function is not None
        if not collectives and stage is None:
            return run_below(function, pieces, leaves)
        with turn.for_call([leaves[i] for i in numbers], after, lineage) as order:
            try:
                if gloo:
                    order.meet(gloo)
                with mailbox:
                    return run_below(function, pieces, leaves)
            except CollectiveError as error:
                raise_lost_ranks(mesh, error)

    if not late:
        prepare()
    return counted(run, program.collectives)
