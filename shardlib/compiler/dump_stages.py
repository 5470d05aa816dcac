"""Writes every stage's form of a program as text, if `SHARDLIB_DUMP` names a folder.

Each program has a subfolder with 01_traced.txt, 02_simplified.txt, 03_graph.txt, ... in the order of the stages.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import fx

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.program.steps import Program
from shardlib.compiler.program.text import show
from shardlib.compiler.propagate import Decisions
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.distributed import world
from shardlib.rules.notation import Pattern, Term
from shardlib.sharding.mesh.axis import Axis
from shardlib.tensor.tensor_meta import short_dtype

VARIABLE = "SHARDLIB_DUMP"


class StageDump:
    """Numbered files in the `folder` of one program; without a folder nothing is formatted or written."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._numbers = itertools.count(1)

    @staticmethod
    def open(name: str) -> StageDump:
        """Makes a new subfolder for the function `name` in the folder that the environment names."""
        if not (chosen := os.environ.get(VARIABLE)):
            return StageDump(None)
        parent, label = Path(chosen), re.sub(r"[^\w.-]+", "_", name)
        rank = f"_rank{world.rank()}" if world.size() is not None else ""
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(len([*parent.iterdir()]) + 1):
            folder = parent / f"{number:03}_{label}{rank}"
            try:
                folder.mkdir()
            except FileExistsError:  # another process was faster
                continue
            return StageDump(folder)
        raise AssertionError

    def write(self, stage: str, text: Callable[[], str]) -> None:
        """Writes the next file; a reader never sees half of it."""
        if self.folder is None:
            return
        path = self.folder / f"{next(self._numbers):02}_{stage}.txt"
        partial = path.with_suffix(".partial")
        partial.write_text(text() + "\n")
        partial.replace(path)

    def write_traced(self, stage: str, graph: fx.GraphModule) -> None:
        self.write(stage, lambda: str(graph.print_readable(print_output=False)).strip())

    def write_graph(self, graph: Graph) -> None:
        """Writes ops with the factors of their operands and results."""
        self.write("graph", lambda: "\n".join(_graph_lines(graph)))

    def write_decisions(self, graph: Graph, propagated: Decisions) -> None:
        """Writes the factor classes (`#n`) and mesh axes of the dims of inputs, and of the factors of ops."""
        self.write("decisions", lambda: "\n".join(_decision_lines(graph, propagated)))

    def write_program(self, stage: str, program: Program) -> None:
        self.write(stage, lambda: show(program))


def _graph_lines(graph: Graph) -> Iterable[str]:
    yield from (f"input {_typed(value)}" for value in graph.inputs)
    yield from (f"captured {_typed(value)}" for value, _ in graph.captured)
    for op in graph.ops:
        results = ", ".join("_" if value is None else _typed(value) for value in op.results)
        times = f"  ({op.times} times)" if op.times > 1 else ""
        yield f"{results} = {op.target}({', '.join(v.name for v in op.operands)})  # {_factors(op)}{times}"
    yield f"return {', '.join(x.name if isinstance(x, Value) else repr(x) for x in graph.outputs)}"


def _factors(op: Op) -> str:
    if op.rule is None:
        return "no rule"
    pattern = Pattern(tuple(map(Term, op.rule.operands)), tuple(map(Term, op.rule.results)))
    sizes = " ".join(f"{factor}={size}" for factor, size in op.rule.sizes.items())
    return f"{pattern}; {sizes}" if sizes else str(pattern)


def _typed(value: Value) -> str:
    return f"{value.name}: {short_dtype(value.dtype)}{list(value.shape)}"


def _decision_lines(graph: Graph, propagated: Decisions) -> Iterable[str]:
    propagation = propagated.propagation
    numbers: dict[DimFactor, int] = {}  # of factor classes, in the order of the text

    def number(factor: DimFactor) -> int:
        return numbers.setdefault(factor, len(numbers))

    for value in graph.inputs:
        factors = zip(propagation.dim_factors(value), propagated.input_axes(value), strict=True)
        dims = [_sharded(f"{propagation.dims.size(factor)}#{number(factor)}", axes) for factor, axes in factors]
        yield f"input {value.name}: {' '.join(dims)}".rstrip()
    for op in graph.ops:
        if op in propagated.units.op_slots:
            assigned = propagated.assignment(op)
            labels = [
                _sharded(f"{f'{name}.{i}' if i else name}#{number(factor)}", assigned.get((name, i), ()))
                for name, factors in propagation.labels[op].items()
                for i, factor in enumerate(factors)
            ]
            yield f"{op.name} {op.kind}: {' '.join(labels)}"


def _sharded(factor: str, axes: tuple[Axis, ...]) -> str:
    return f"{factor}@{'+'.join(map(str, Axis.merge(axes)))}" if axes else factor
