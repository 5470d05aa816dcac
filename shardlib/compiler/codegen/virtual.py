"""Runs all devices of a mesh in this process; collectives are plain arithmetic on the members' local tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from shardlib.compiler.codegen.below_autograd import run_below
from shardlib.compiler.codegen.codegen import Generator, Source
from shardlib.compiler.codegen.comm_debug import counted
from shardlib.compiler.codegen.profiler_ranges import Runner, label, ranged, watched
from shardlib.compiler.program.steps import Collective, Program, Start
from shardlib.ops import offload
from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.sharding.mesh.mesh import Mesh

_SHARED: dict[str, Callable[..., Any]] = {"all_reduce": all_reduce.reference, "all_gather": all_gather.reference}
_SEPARATE: dict[str, Callable[..., Any]] = {
    "reduce_scatter": reduce_scatter.reference,
    "all_to_all": all_to_all.reference,
    "ppermute": ppermute.reference,
    "to_host": offload.reference_to_host,
    "to_device": offload.reference_to_device,
}


def source(program: Program, mesh: Mesh, *, share: bool = True, ranges: bool = False) -> Source:
    """Generates one Python function for the whole mesh; `share=False` computes every value on every device."""
    return Generator(program, mesh.all_coords(), share, ranges).generate(_communicate)


def load(program: Program, mesh: Mesh, *, share: bool = True) -> Runner:
    """Returns the program as a function from every input's local tensors (one per device) to every output's."""
    function: Runner = source(program, mesh, share=share).compile()
    function = watched(function, lambda: source(program, mesh, share=share, ranges=True).compile())
    return counted(partial(run_below, function), program.collectives)


def _communicate(g: Generator, start: Start) -> None:
    for c in start.moves:
        _collective(g, c)


def _collective(g: Generator, step: Collective) -> None:
    function = (_SHARED | _SEPARATE)[step.kind]
    if step.kind in _SHARED and not g.share:
        function = _own(function)
    if g.ranges:
        function = ranged(function, label([step]))
    call = g.bind(function, step.kind)
    for group in g.members(step):
        sources = [g.name(step.source, c) for c in group]
        outs = [g.name(step.out, c) for c in group]
        args = [f"[{', '.join(sources)}]"]
        for key, value in step.params.items():
            member = [g.literal(value, c) for c in group]
            # A parameter of the group is passed once, a member's own parameter as a list over members.
            args.append(f"{key}={member[0]}" if key in _COMMON[step.kind] else f"{key}=[{', '.join(member)}]")
        if step.kind in ("all_reduce", "reduce_scatter"):
            args.append(f"kind={step.reduce!r}")
        left = "".join(f"{o}, " for o in outs).strip()
        g.lines.append(f"{left} = {call}({', '.join(args)})")


@cache
def _own(reference: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Returns the collective with a separate tensor for every member, which may be written over."""

    def separate(*args: Any, **params: Any) -> list[torch.Tensor]:
        return [out.clone() for out in reference(*args, **params)]

    return separate


_COMMON: dict[str, tuple[str, ...]] = {
    "all_reduce": (),
    "all_gather": ("dim", "sizes"),
    "reduce_scatter": ("dim", "sizes"),
    "all_to_all": ("split_dim", "split_sizes", "concat_dim", "concat_sizes"),
    "ppermute": ("pairs", "shapes"),
}
