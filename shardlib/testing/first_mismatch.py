"""The first value of a program that is not as on one device: a run that keeps all values, beside the traced graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from shardlib.compiler.codegen import virtual
from shardlib.compiler.lower import lower
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.program.steps import Program, Var, makes
from shardlib.compiler.program.verify import verify
from shardlib.core.aten.op_traits import has
from shardlib.core.call_scalar import Scalar
from shardlib.core.source_lines import place
from shardlib.core.torch_private import pytree
from shardlib.rules.rule import OWNED
from shardlib.sharding.layout import Layout
from shardlib.testing.compare import compare_tensors


def first_difference(
    compiled: Compiled,
    pieces: Sequence[Sequence[Tensor]],
    leaves: Sequence[Any],
    seeded: Callable[..., Any],
    rtol: float | None = None,
    atol: float | None = None,
) -> str:
    """The first value that differs, its op and its line, in a call with these pieces of inputs, and these leaves.

    The program is the one that was lowered, before passes. "" where no value differs: the trace itself is another
    program, or a pass is wrong; and where the function has per-device code, of which nothing is whole.
    """
    graph, devices = compiled.traced.graph, compiled.mesh.all_coords()
    if any(has(node.target, trait) for node in graph.graph.nodes for trait in ("enters", "leaves", "per device")):
        return ""

    def whole(layout: Layout | None, held: Sequence[Tensor]) -> Tensor:
        assert layout is not None
        return layout.gather(list(zip(devices, held, strict=True)))

    program = lower(compiled.graph, compiled.propagated, compiled.mesh)
    alone = _Alone(graph, leaves)
    seeded(alone.run, *(whole(var.layout, held) for var, held in zip(program.inputs, pieces, strict=True)))
    kept = [*_kept(program)]
    run = virtual.load(verify(replace(program, outputs=tuple(var for var, _ in kept))), compiled.mesh, share=False)
    for (var, want), held in zip(kept, seeded(run, pieces, leaves), strict=True):
        found = compare_tensors(var.name, alone.value(*want), whole(var.layout, held), rtol, atol)
        if found.fault:
            line = want[0].meta.get("line")
            return f"{var.name} = {want[0].target}, at {place(line)}  {line.text if line else ''}: {found.fault}"
    return ""


def _kept(program: Program) -> Iterator[tuple[Var, tuple[fx.Node, int]]]:
    """Every value of the graph that a step makes, and which result of which node it is."""
    for step in program.steps:
        for var in makes(step):
            value = var.value
            if value is not None and value.op is not None and var.layout is not None and not _is_owned(var):
                yield var, (value.op.node, value.index)


def _is_owned(var: Var) -> bool:
    """Whether devices hold the rows of own groups only, and anything in those of others."""
    return var.placement is not None and var.placement[1].kind == OWNED


class _Alone(fx.Interpreter):
    """The traced graph on one device; what it makes is kept."""

    def __init__(self, graph: fx.GraphModule, leaves: Sequence[Any]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.leaves = leaves

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        given = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map_only(Scalar, lambda number: number.value(self.leaves), given)

    def value(self, node: fx.Node, index: int) -> Tensor:
        made = self.env[node]
        return made if isinstance(made, Tensor) else made[index]
