"""What the results of a `shard_map` claim: along an axis that an out_spec leaves out, all devices return the same.

A value of a body varies over the axes that cut the arguments which it is made of. `axis_index` and the collectives that
give each device something of its own add their axes; a sum, a maximum or a gathering over an axis makes its result the
same along it. This is decided on the graph as it was traced, so that a result which nothing reads is held to its claim,
too: its gradient rests on it. Where axes are left to the compiler, a value varies along those for which it is batched
(`stacked`), as is known when the body ends.
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


def hold_claims(gm: fx.GraphModule) -> None:
    """Raise `ShardingError` with all results that may differ where they are said to be the same; drop what was said."""
    made = [node for node in gm.graph.nodes if has_trait(node.target, "leaves_body") and node.args[3:]]
    if not made:
        return
    mesh = current_mesh()
    assert mesh is not None, "a program is compiled for a mesh"
    varies = varying(gm, mesh)
    results = []
    for node in made:
        source, spec, _, claim = node.args
        hidden = varies[source] - _cut(node.meta["val"].shape, spec, mesh)
        results.append(Claimed(claim, source.meta["val"].shape, spec, hidden, _origin(source)))
        node.args = node.args[:3]
    hold(results, mesh)


@dataclass(frozen=True)
class Claimed:
    """A result that is to be the same along the axes which its spec leaves out; `hidden` are those where it is not."""

    claim: str  # "who: which result"
    shape: Sequence[int]
    spec: str
    hidden: Axes
    origin: str = ""


def hold(results: Sequence[Claimed], mesh: Mesh) -> None:
    """Raise `ShardingError` with all results that may differ where they are said to be the same."""
    wrong: dict[str, list[str]] = {}
    over: dict[str, None] = {}
    for result in results:
        who, _, name = result.claim.partition(": ")
        if hidden := [a for a, n in mesh.axes.items() if n > 1 and a in result.hidden]:
            over |= dict.fromkeys(hidden)
            wrong.setdefault(who, []).append(
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


def varying(gm: fx.GraphModule, mesh: Mesh) -> Mapping[fx.Node, Axes]:
    """The mesh axes over which each value inside a body may differ; of values outside nothing is said."""
    varies: dict[fx.Node, Axes] = {}
    for node in gm.graph.nodes:
        if has_trait(node.target, "enters_body"):
            varies[node] = _cut(node.args[0].meta["val"].shape, node.args[1], mesh)
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


def _cut(shape: Any, spec: str, mesh: Mesh) -> Axes:
    layout = Spec.convert(spec).resolve(tuple(shape), mesh, name="x").layout
    return frozenset(a.name for a in layout.axes if a.size > 1)


def _origin(node: fx.Node) -> str:
    line = node.meta.get("line")
    if has_trait(node.target, "enters_body"):
        return ", as it came in"
    return f", made at {format_path_line(line)}  {line.text}".rstrip() if line is not None else ""
