"""Finds the first value of a program that differs from one device.

The program runs with all values kept, and so does the traced graph.
"""

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
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.call_scalar import Scalar
from shardlib.core.source_lines import format_path_line
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.rules.rule import OWNED
from shardlib.sharding.layout import Layout
from shardlib.testing.compare import compare_tensors


def find_first_difference(
    compiled: Compiled,
    shards: Sequence[Sequence[Tensor]],
    leaves: Sequence[Any],
    run_seeded: Callable[..., Any],
    rtol: float | None = None,
    atol: float | None = None,
) -> str:
    """Returns the first value that differs in a call with these shards and leaves, with its op and line.

    The program is the lowered one, before passes. Returns "" if no value differs: then the trace is another program, or
    a pass is wrong. Returns "" also for per-device code, whose values have no counterpart on one device.
    """
    graph, devices = compiled.traced.graph, compiled.mesh.all_coords()
    if any(
        has_trait(node.target, trait)
        for node in graph.graph.nodes
        for trait in ("enters_body", "leaves_body", "per_device")
    ):
        return ""

    def gather(layout: Layout | None, held: Sequence[Tensor]) -> Tensor:
        assert layout is not None
        return layout.gather(list(zip(devices, held, strict=True)))

    program = lower(compiled.graph, compiled.propagated, compiled.mesh)
    one_device = _OneDevice(graph, leaves)
    run_seeded(one_device.run, *(gather(var.layout, held) for var, held in zip(program.inputs, shards, strict=True)))
    kept = [*_computed_values(program)]
    run = virtual.load(verify(replace(program, outputs=tuple(var for var, *_ in kept))), compiled.mesh, share=False)
    for (var, node, index), held in zip(kept, run_seeded(run, shards, leaves), strict=True):
        compared = compare_tensors(var.name, one_device.value(node, index), gather(var.layout, held), rtol, atol)
        if compared.fault:
            line = node.meta.get("line")
            where = f"{format_path_line(line)}  {line.text if line else ''}"
            return f"{var.name} = {node.target}, at {where}: {compared.fault}"
    return ""


def _computed_values(program: Program) -> Iterator[tuple[Var, fx.Node, int]]:
    """Yields each variable that holds a value of the graph, with the value's node and its number among the results."""
    for step in program.steps:
        for var in makes(step):
            value = var.value
            if value is not None and value.op is not None and var.layout is not None and not _is_owned(var):
                yield var, value.op.node, value.index


def _is_owned(var: Var) -> bool:
    """True if each device holds valid rows only for its own groups."""
    return var.placement is not None and var.placement[1].kind == OWNED


class _OneDevice(fx.Interpreter):
    """Runs the traced graph on one device and keeps all values."""

    def __init__(self, graph: fx.GraphModule, leaves: Sequence[Any]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.leaves = leaves

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        arguments = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map_only(Scalar, lambda number: number.value(self.leaves), arguments)

    def value(self, node: fx.Node, index: int) -> Tensor:
        result = self.env[node]
        return result if isinstance(result, Tensor) else result[index]
