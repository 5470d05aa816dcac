"""Rewrites scans between two flips as scans from the end: no device flips a sharded dim.

The gradient of a running sum is such a scan.
"""

from __future__ import annotations

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.schemas import get_argument
from shardlib.ops.reverse_scan import REVERSE_SCANS

aten = torch.ops.aten
_OPPOSITE = REVERSE_SCANS | {reverse: forward for forward, reverse in REVERSE_SCANS.items()}


def _reverse_scan(emit: Emit, node: Node) -> Call | None:
    flips = _find_flips(node)
    for flip in flips:
        flip.replace_all_uses_with(get_argument(flip, "self"))
        emit.gm.graph.erase_node(flip)
    return Call(_OPPOSITE[node.target], (node.args[0].args[0], *node.args[1:]), node.kwargs) if flips else None


def _find_flips(node: Node) -> list[fx.Node]:
    """Returns the flips of a scan's results, if its operand is flipped too, and if nothing else reads the results."""
    source, val = get_argument(node, "self"), node.meta["val"]
    results = [node] if isinstance(val, torch.Tensor) else list(node.users)
    flips = [user for result in results for user in result.users]
    dim = get_argument(node, "dim") % max(source.meta["val"].dim(), 1)
    are_flips = all(x.target is aten.flip.default and _flipped_dims(x) == [dim] for x in (source, *flips))
    return flips if are_flips and all(len(result.users) == 1 for result in results) else []


def _flipped_dims(flip: fx.Node) -> list[int]:
    return [d % max(flip.meta["val"].dim(), 1) for d in get_argument(flip, "dims")]


reverse_scans = RewritePass(
    "reverse_scans",
    Rewrite([_OPPOSITE, [aten.flip.default]], _reverse_scan),  # flip(cumsum(flip(x))) -> cumsum from the end
)
