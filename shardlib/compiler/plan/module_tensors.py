"""Names a plan's inputs as their modules do, and converts their layouts to DTensor placements."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.pipeline import Compiled
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Module
from shardlib.tensor.dtensor import placements_of


def innermost_module(op: Op) -> Module | None:
    """Returns the module whose forward computes an op."""
    modules = op.node.meta.get("modules")
    return modules[-1] if modules else None


def module_names(compiled: Compiled) -> dict[str, str]:
    """Maps each input's name to its name in the module that holds it: `model.layers.0.weight` to `layers.0.weight`.

    A module holds an input if an op inside of it reads the input. Other inputs keep their names.
    """
    origin = origins(compiled)
    roots: set[str] = set()
    for op in compiled.graph.ops:
        if (module := innermost_module(op)) is None or has_trait(
            op.target, "copies"
        ):  # a cast may run outside the owner
            continue
        for name in (origin[v] for v in op.operands if v in origin):
            head = name.rpartition(".")[0]
            if not module.path or head.endswith(f".{module.path}"):
                roots.add(head.removesuffix(f".{module.path}"))
    names = {}
    for name, _ in compiled.inputs:
        root = next((root for root in sorted(roots, key=len) if root and name.startswith(f"{root}.")), None)
        names[name] = name if root is None else name[len(root) + 1 :]
    twice = {name for name, n in Counter(names.values()).items() if n > 1}
    return {name: name if own in twice else own for name, own in names.items()}


def origins(compiled: Compiled) -> dict[Value, str]:
    """Maps the inputs, and views and casts of them, to the inputs' names."""
    return {value: compiled.inputs[at][0] for value, at in input_positions(compiled).items()}


def input_positions(compiled: Compiled) -> dict[Value, int]:
    """Maps the inputs, and views and casts of them, to the inputs' positions."""
    positions = {value: at for at, (_, value) in enumerate(compiled.inputs)}
    for op in compiled.graph.ops:
        if is_same_tensor(op) and op.operands[0] in positions and op.results[0] is not None:
            positions[op.results[0]] = positions[op.operands[0]]
    return positions


def is_same_tensor(op: Op) -> bool:
    """Returns whether an op's result is its one operand in another form or dtype."""
    return len(op.operands) == 1 == len(op.results) and (
        op.transparent or op.constrains or has_trait(op.target, "copies")
    )


def dtensor_placements(compiled: Compiled) -> dict[str, tuple[Any, ...]]:
    """See `Plan.to_dtensor_placements`."""
    names, placements, wrong = module_names(compiled), {}, []
    for (name, _), var in zip(compiled.inputs, compiled.program.inputs, strict=True):
        assert var.layout is not None
        placed, faults = placements_of(var.layout, compiled.mesh)
        placements[names[name]] = tuple(placed)
        wrong += [f"{name}: {fault}" for fault in faults]
    if wrong:
        raise ShardingError(
            f"inputs of {compiled.traced.name} have no DTensor placements",
            wrong,
            rule="a DTensor shards whole dims over whole mesh axes, in the mesh's order",
            remedy="give these inputs other specs",
        )
    return placements
