"""Rewrites `zeros_like(x)` and the like as constants, which read no values of x and are sharded as readers need."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_fill_value

aten = torch.ops.aten
_ONES = {aten.ones_like.default, aten.new_ones.default}
_FULL = {aten.new_zeros.default, aten.new_full.default}
_EMPTY = {aten.empty_like.default, aten.new_empty.default}


def drop_likes(gm: fx.GraphModule) -> None:
    """Replaces `zeros_like(x)` by `full` for all readers but those that place it.

    A returned constant is placed like x. `like` in the meta of a new node names x: readers are sharded as readers of x
    would be, if their shapes are equal. Eager ops are traced on meta tensors, which have no device: their calls stay.
    """
    likes = [node for node in gm.graph.nodes if _is_like(node) and node.meta["val"].device.type != "meta"]
    placing = _list_placing_nodes(gm, {*likes}) if likes else set()
    for node in likes:
        if all(user in placing for user in node.users):
            continue
        val, source = node.meta["val"], node.args[0]
        with gm.graph.inserting_before(node):
            target, args = _get_constant_call(node)
            like = {"dtype": val.dtype, "device": val.device}
            constant = gm.graph.call_function(target, (list(val.shape), *args), like)
        constant.meta.update(node.meta | {"val": val.new_empty(val.shape)})
        while any(has_trait(source.target, trait) for trait in ("copies", "is_alias", "metadata_only")):
            source = source.args[0]
        constant.meta["like"] = source
        constant.meta.pop("gradient of", None)
        node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in placing)


def _is_like(node: fx.Node) -> bool:
    """Returns whether a constant takes its dtype and device, perhaps its shape, from its only operand."""
    if node.target in _ONES or node.target in _EMPTY:
        return True
    fills = has_trait(node.target, "fills") and (has_trait(node.target, "metadata_only") or node.target in _FULL)
    return fills and len(node.all_input_nodes) == 1


def _get_constant_call(node: fx.Node) -> tuple[Any, list[Any]]:
    """Returns the op that makes the constant, and its arguments behind the shape."""
    if node.target in _EMPTY:
        return aten.empty.memory_format, []
    return aten.full.default, [1 if node.target in _ONES else get_fill_value(node)]


def _list_placing_nodes(gm: fx.GraphModule, likes: set[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that place their operands, and the constants that only lead to them.

    Constants here are made of `likes` and of numbers alone.
    """
    constants = {*likes}
    for node in gm.graph.nodes:
        if node.op != "placeholder" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    placing: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        places = node.op == "output" or any(
            has_trait(node.target, trait) for trait in ("constrains", "enters_body", "leaves_body")
        )
        if places or (node in constants and not placing.isdisjoint(node.users)):
            placing.add(node)
    return placing
