"""The check of out_specs of a `shard_map`: all devices along an axis that an out_spec does not name agree.

A value of a body varies over the axes that shard the arguments on which it depends. `axis_index` and the collectives
with different results per device add their axes; a sum, maximum or all-gather over an axis removes it. The check runs
on the traced graph, before unused results are dropped: their gradients rely on the claim, too. If the compiler shards
some axes (`stacked` bodies), a value varies along the axes over which it is batched when the body ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import format_path_line
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.spec import Spec

Axes = frozenset[str]


def check_claims(gm: fx.GraphModule) -> None:
    """Raises `ShardingError` with all results that may differ along unnamed axes; removes the claims from the graph."""
    claimed = [node for node in gm.graph.nodes if has_trait(node.target, "leaves_body") and node.args[3:]]
    if not claimed:
        return
    mesh = current_mesh()
    assert mesh is not None, "a program is compiled for a mesh"
    varies = find_varying_axes(gm, mesh)
    results = []
    for node in claimed:
        source, spec, _, claim = node.args
        hidden = varies[source] - _sharded_axes(node.meta["val"].shape, spec, mesh)
        results.append(ResultClaim(claim, source.meta["val"].shape, spec, hidden, _describe_origin(source)))
        node.args = node.args[:3]
    check_results(results, mesh)


@dataclass(frozen=True)
class ResultClaim:
    """A result that must be equal along the axes which its spec does not name; `hidden` are those where it varies."""

    claim: str  # "call: result"
    shape: Sequence[int]
    spec: str
    hidden: Axes
    origin: str = ""


def check_results(results: Sequence[ResultClaim], mesh: Mesh) -> None:
    """Raises `ShardingError` with all results that vary over hidden axes."""
    wrong: dict[str, list[str]] = {}
    over: dict[str, None] = {}
    for result in results:
        call, _, name = result.claim.partition(": ")
        if hidden := [a for a, n in mesh.axes.items() if n > 1 and a in result.hidden]:
            over |= dict.fromkeys(hidden)
            wrong.setdefault(call, []).append(
                f"{name} of shape {list(result.shape)} with spec {result.spec!r} varies over "
                f"{' and '.join(f'{a!r} ({mesh.axes[a]} devices)' for a in hidden)}{result.origin}"
            )
    if wrong:
        axes = repr(next(iter(over)) if len(over) == 1 else tuple(over))
        raise ShardingError(
            f"{', '.join(wrong)} out_specs leave out axes over which the devices' results differ",
            [line for lines in wrong.values() for line in lines],
            rule="an axis that an out_spec does not name is one along which all devices return the same",
            remedy=f"name the axis in out_specs, or make the result the same: sl.psum(x, {axes}), pmean, pmax, "
            "all_gather; shard_map(..., check=False) where the devices do return the same, but by other means",
        )


def find_varying_axes(gm: fx.GraphModule, mesh: Mesh) -> Mapping[fx.Node, Axes]:
    """Returns the mesh axes over which each value inside a body may vary; entries of values outside are meaningless."""
    varies: dict[fx.Node, Axes] = {}
    for node in gm.graph.nodes:
        if has_trait(node.target, "enters_body"):
            varies[node] = _sharded_axes(node.args[0].meta["val"].shape, node.args[1], mesh)
            continue
        shaped = has_trait(node.target, "metadata_only") or has_trait(node.target, "creates")
        read = [] if shaped else node.all_input_nodes
        axes: Axes = frozenset().union(*(varies[source] for source in read))
        if has_trait(node.target, "same_on_axes"):
            axes -= {*node.args[1]}
        elif has_trait(node.target, "per_device"):
            axes |= {a for a in node.args[1] if mesh.axes[a] > 1}
        elif has_trait(node.target, "leaves_body"):
            axes = frozenset()
        varies[node] = axes
    return varies


def _sharded_axes(shape: Any, spec: str, mesh: Mesh) -> Axes:
    layout = Spec.convert(spec).resolve(tuple(shape), mesh, name="x").layout
    return frozenset(a.name for a in layout.axes if a.size > 1)


def _describe_origin(node: fx.Node) -> str:
    line = node.meta.get("line")
    if has_trait(node.target, "enters_body"):
        return ", as it came in"
    return f", made at {format_path_line(line)}  {line.text}".rstrip() if line is not None else ""
