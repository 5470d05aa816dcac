"""This rank's program on `torch.distributed`.

A collective is started where its source is ready and finished where its result is first read, so that it runs under the
arithmetic in between. Before the first run the ranks compare their programs; when a collective fails, the ranks that are
gone are named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlib.lower.program import Collective, Program
from shardlib.mesh import Mesh
from shardlib.ops import _groups, all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops._wire import CollectiveError
from shardlib.run.agree import agree, blame
from shardlib.run.codegen import Generator, Source

if TYPE_CHECKING:
    from shardlib.plan import Plan

_START: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce.start,
    "all_gather": all_gather.start,
    "reduce_scatter": reduce_scatter.start,
    "all_to_all": all_to_all.start,
    "ppermute": ppermute.start,
}


def source(program: Program, mesh: Mesh) -> Source:
    """The Python function of this rank."""

    def collective(g: Generator, step: Collective) -> None:
        (coords,) = g.devices
        start = g.bind(_START[step.kind], f"start_{step.kind}")
        group = g.bind(_groups.group_for(mesh, step.axes), "group_" + "_".join(map(str, step.axes)))
        args = [g.name(step.source, coords)]
        args += [f"{key}={g.literal(value, coords)}" for key, value in step.params.items()]
        args.append(f"group={group}")
        if step.kind in ("all_reduce", "reduce_scatter"):
            args.append(f"kind={step.reduce!r}")
        g.wait_for([step.source])
        out = g.name(step.out, coords)
        handle = g.fresh(f"{out}_flying")
        g.emit(f"{handle} = {start}({', '.join(args)})", [handle], [g.name(step.source, coords)])
        g.finish_later(step.out, f"{out} = {handle}.finish()", [out], [handle])

    return Generator(program, [mesh.coords(mesh.rank)]).generate(collective)


def load(program: Program, mesh: Mesh, plan: Plan) -> Callable[[Sequence[Sequence[torch.Tensor]]], tuple[Any, ...]]:
    """The program as a function of this rank's local inputs; compares the ranks' programs first."""
    mesh.device_mesh  # noqa: B018 - starts torch.distributed where nothing has yet
    text = str(plan)
    agree(mesh, hashlib.sha256(text.encode()).hexdigest(), f"{plan.name}\n{text}")
    _groups.prepare(mesh, list(dict.fromkeys(c.axes for c in program.collectives)))
    generated = source(program, mesh)
    function, feed = generated.compile(), generated.feed

    def run(pieces: Sequence[Sequence[torch.Tensor]]) -> tuple[Any, ...]:
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return function([pieces[i][d] for i, d in feed])
        except CollectiveError as error:
            blame(mesh, error)

    return run
