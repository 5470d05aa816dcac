"""A running sum of what is turned round, turned back, is one from behind: nobody has to turn round what is cut. The
gradient of a running sum is one."""

from __future__ import annotations

import torch
from torch import fx

from shardlib.core.aten.schemas import get_argument
from shardlib.ops.reverse_scan import REVERSE_SCANS

aten = torch.ops.aten
_TURNED = REVERSE_SCANS | {behind: forward for forward, behind in REVERSE_SCANS.items()}


def scan_from_behind(gm: fx.GraphModule) -> None:
    """Scans between two flips of their dim run in the other direction, without the flips."""
    for node in gm.graph.nodes:
        while node.target in _TURNED and (flips := _flips(node)):
            turned = get_argument(node, "self")
            node.target, node.args = _TURNED[node.target], (turned.args[0], *node.args[1:])
            for flip in flips:
                flip.replace_all_uses_with(get_argument(flip, "self"))
                gm.graph.erase_node(flip)


def _flips(node: fx.Node) -> list[fx.Node]:
    """The flips of what a scan makes, if it is turned round before the scan and after it; nobody else reads it."""
    source, val = get_argument(node, "self"), node.meta["val"]
    results = [node] if isinstance(val, torch.Tensor) else list(node.users)
    flips = [user for result in results for user in result.users]
    dim = get_argument(node, "dim") % max(source.meta["val"].dim(), 1)
    turned = all(x.target is aten.flip.default and _dims(x) == [dim] for x in (source, *flips))
    return flips if turned and all(len(result.users) == 1 for result in results) else []


def _dims(flip: fx.Node) -> list[int]:
    return [d % max(flip.meta["val"].dim(), 1) for d in get_argument(flip, "dims")]
