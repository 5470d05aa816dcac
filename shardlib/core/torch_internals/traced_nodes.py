"""Nodes of the graph that is being traced."""

from __future__ import annotations

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from shardlib.core.torch_internals.torch_private import innermost


def node_of(x: Tensor) -> fx.Node | None:
    """Returns the node of the running trace whose value a tensor is; None if there is none."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(innermost(x), mode.tracer, None)
    return None if slot is None else slot.proxy.node


def last_node(graph: fx.Graph | None = None) -> fx.Node | None:
    """Returns the last node of a graph, by default the one of the running trace; None if there is none."""
    if graph is None and (mode := get_proxy_mode()) is not None:
        graph = mode.tracer.graph
    return None if graph is None else next(iter(reversed(graph.nodes)), None)
