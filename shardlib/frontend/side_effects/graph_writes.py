"""Values of a traced graph that a stretch of code reads or writes, also by `x.data`, where torch counts no write."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from shardlib.core.aten.op_traits import is_view
from shardlib.core.aten.schemas import find_nodes, get_argument, written_arguments
from shardlib.core.torch_internals.traced_nodes import last_node, node_of
from shardlib.ops.set_data import OP as SET_DATA


def written_since(start: fx.Node | None) -> set[fx.Node]:
    """Returns the values that the ops behind this node write to, directly or through views."""
    written: set[fx.Node] = set()
    for node in _nodes_since(start):
        names = ("x",) if node.target is SET_DATA else written_arguments(node.target)
        written |= {_owner(x) for name in names for x in find_nodes(get_argument(node, name))}
    return written


def values_read_since(start: fx.Node | None) -> set[fx.Node]:
    """Returns the values that the ops behind this node take as operands, directly or through views."""
    return {_owner(x) for node in _nodes_since(start) for x in node.all_input_nodes}


def owner_of(x: Tensor) -> fx.Node | None:
    """Returns the node of the running trace whose memory a tensor shows; None if there is none."""
    node = node_of(x)
    return None if node is None else _owner(node)


def _nodes_since(start: fx.Node | None) -> Iterator[fx.Node]:
    node = last_node()
    while start is not None and node is not None and node is not start and node.op != "root":
        yield node
        node = node.prev


def _owner(node: fx.Node) -> fx.Node:
    """Returns the value whose memory a node shows."""
    while is_view(node.target) or written_arguments(node.target):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            break
        node = source
    return node
