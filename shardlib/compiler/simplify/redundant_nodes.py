"""Removes nodes that return their operand, repeat another node, or have no readers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, make_key
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

aten = torch.ops.aten


def drop_identities(gm: fx.GraphModule) -> None:
    """Removes nodes that return their operand; a copy stays if the function would else return the same memory twice."""
    returned = _list_returned_owners(gm)
    for node in gm.graph.nodes:
        if not _has_operand_values(node) or not _has_operand_type(node):
            continue
        source = _get_returned_operand(node)
        if node in returned:
            owner = _find_owner(source)
            if owner in returned or owner.op != "call_function":
                continue
            returned.add(owner)
        _note_copies(node)
        node.replace_all_uses_with(source)


def merge_equal_nodes(gm: fx.GraphModule) -> None:
    """Merges nodes that compute the same.

    Two results with memory of their own stay two. A backward node that repeats forward arithmetic stays: activation
    checkpointing trades time for memory this way.
    """
    returned = _list_returned_owners(gm)
    nodes: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        if (op := node.op) not in ("call_function", "get_attr"):
            continue
        is_free = op == "get_attr" or _is_free(node.target)
        if is_free is None:
            continue
        phase = None if is_free else bool(node.meta.get("backward"))
        target = node.target if op == "get_attr" else id(node.target)
        key = (target, phase, make_key(node.args), make_key(kwargs) if (kwargs := node.kwargs) else ())
        first = nodes.setdefault(key, node)
        if first is not node and (is_free or not returned.issuperset((node, first))):
            if node in returned and not is_free:  # now the first one is
                returned.add(first)
                first.meta = {k: v for k, v in node.meta.items() if k == "gradient of"} | first.meta
            node.replace_all_uses_with(first)


def merge_reductions(gm: fx.GraphModule) -> None:
    """Merges reductions of one operand over the same dims, whether they keep the dims or not.

    A variance then takes the mean that is there already, and one message serves both.
    """
    returned = _list_returned_owners(gm)
    reductions: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        if not _reduces_dims(node.target) or not isinstance(node.meta["val"], torch.Tensor):
            continue
        source, *rest = node.args
        dims = rest.pop(0) if rest and node.target not in _WHOLE_REDUCTIONS else node.kwargs.get("dim")
        rank = source.meta["val"].dim()
        reduced = frozenset(d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims or range(rank)))
        options = make_key({k: v for k, v in node.kwargs.items() if k not in ("dim", "keepdim")})
        phase = bool(node.meta.get("backward"))
        first = reductions.setdefault(
            (node.target.overloadpacket, phase, source, reduced, make_key(rest[1:]), options), node
        )
        if first is not node and node not in returned:
            same = Emit(gm, node)(aten.reshape.default, first, list(node.meta["val"].shape))
            node.replace_all_uses_with(same)


def drop_dead_nodes(gm: fx.GraphModule) -> None:
    """Removes nodes without readers, but for checks and for a call's key, whose draw advances a generator."""
    for node in reversed(gm.graph.nodes):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if not _is_random(node.target) and not _is_check(node.target):
            gm.graph.erase_node(node)


# --- reductions -------------------------------------------------------------------------------------------------------

_WHOLE_REDUCTIONS = frozenset({aten.mean.default, aten.sum.default})


@cache
def _reduces_dims(target: Any) -> bool:
    """Returns whether an op reduces all dims, or those of its second argument."""
    names = [a.name for a in schema_of(target).arguments] if isinstance(target, OpOverload) else []
    return target in _WHOLE_REDUCTIONS or names[1:3] == ["dim", "keepdim"]


# --- identities -------------------------------------------------------------------------------------------------------


def _is_by_one(node: fx.Node) -> bool:
    value = node.args[1]
    return isinstance(value, int | float) and value == 1


_IDENTITIES: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(
        (aten.expand.default, aten.slice.Tensor, aten.slice_scatter.default, aten.reshape.default), lambda node: True
    ),
    **dict.fromkeys((aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor), _is_by_one),
    aten.pow.Tensor_Scalar: _is_by_one,  # from the gradient of x ** 2
}


def _has_operand_values(node: fx.Node) -> bool:
    """True if a node's values are its operand's, provided that shape and dtype are."""
    test = _IDENTITIES.get(node.target)
    return has_trait(node.target, "is_alias") or has_trait(node.target, "copies") or (test is not None and test(node))


def _get_returned_operand(node: fx.Node) -> Any:
    """Returns the operand whose values a node has: the written tensor of a write into another one."""
    return node.args[node.target is aten.slice_scatter.default]


def _has_operand_type(node: fx.Node) -> bool:
    source = _get_returned_operand(node)
    if not isinstance(source, fx.Node):
        return False
    old, new = source.meta["val"], node.meta["val"]
    return bool(old.shape == new.shape and old.dtype == new.dtype and old.device == new.device)


def _note_copies(node: fx.Node) -> None:
    """Marks the reshapes that needed a copy: they copy by themselves without it."""
    for user in node.users:
        if node.target is aten.clone.default and user.target is aten.reshape.default:
            user.meta["copies"] = True


# --- helpers ----------------------------------------------------------------------------------------------------------


def _list_returned_owners(gm: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes whose memory the function returns."""
    return {_find_owner(node) for node in gm.graph.output_node().all_input_nodes}


def _find_owner(node: fx.Node) -> fx.Node:
    """Returns the node that a node is a view of, or the node itself."""
    while is_view(node.target) or (node.target is operator.getitem and is_view(node.all_input_nodes[0].target)):
        node = node.all_input_nodes[0]
    return node


def _is_random(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


@cache
def _is_free(target: Any) -> bool | None:
    """Returns whether an op does no arithmetic; None for one that draws random numbers."""
    if _is_random(target):
        return None
    return target is operator.getitem or is_view(target) or has_trait(target, "keeps_order")


def _is_check(target: Any) -> bool:
    """Returns whether an op has no results: its purpose is the error that it may raise."""
    return isinstance(target, OpOverload) and not schema_of(target).returns
