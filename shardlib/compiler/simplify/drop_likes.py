"""What is made in the shape, dtype and on the device of another tensor needs none of its values: it is a constant, made
where it is read, in the size that its reader has of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_ONES = {aten.ones_like.default, aten.new_ones.default}
_FULL = {aten.new_zeros.default, aten.new_full.default}
_EMPTY = {aten.empty_like.default, aten.new_empty.default}


def free_likes(gm: fx.GraphModule) -> None:
    """`zeros_like(x)` and the like become `full`, for all who do not return it or say where it lives.

    Where it is returned it lives where x does. Who else reads it is cut as a reader of x would be, if it has the shape
    of x: `like` of a node says whose. Eager ops are traced on meta tensors, which say no device: theirs stay.
    """
    likes = [node for node in gm.graph.nodes if _is_like(node) and node.meta["val"].device.type != "meta"]
    said = _said(gm, {*likes}) if likes else set()
    for node in likes:
        if all(user in said for user in node.users):
            continue
        val, source = node.meta["val"], node.args[0]
        with gm.graph.inserting_before(node):
            make, args = _made(node)
            made = gm.graph.call_function(make, (list(val.shape), *args), {"dtype": val.dtype, "device": val.device})
        made.meta.update(node.meta | {"val": val.new_empty(val.shape)})
        while (
            has_trait(source.target, "copies")
            or has_trait(source.target, "is_alias")
            or has_trait(source.target, "metadata_only")
        ):
            source = source.args[0]
        made.meta["like"] = source
        made.meta.pop("gradient of", None)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in said)


def _is_like(node: fx.Node) -> bool:
    """Returns whether it takes a dtype and a device, if no shape, of its operand, and reads no tensor for its
    numbers."""
    if node.target in _ONES or node.target in _EMPTY:
        return True
    fills = has_trait(node.target, "fills") and (has_trait(node.target, "metadata_only") or node.target in _FULL)
    return fills and len(node.all_input_nodes) == 1


def _made(node: fx.Node) -> tuple[Any, list[Any]]:
    """What makes it of a shape, and the arguments behind that."""
    if node.target in _EMPTY:
        return aten.empty.memory_format, []
    number = 1 if node.target in _ONES else 0 if has_trait(node.target, "zeros") else get_argument(node, "fill_value")
    return aten.full.default, [number]


def _said(gm: fx.GraphModule, likes: set[fx.Node]) -> set[fx.Node]:
    """Nodes that say where what they read lives, and what leads to them of nothing but forms of tensors."""
    constant = {*likes}
    for node in gm.graph.nodes:
        if node.op != "placeholder" and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    said: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        ends = node.op == "output" or any(
            has_trait(node.target, trait) for trait in ("constrains", "enters_body", "leaves_body")
        )
        if ends or (node in constant and not said.isdisjoint(node.users)):
            said.add(node)
    return said
