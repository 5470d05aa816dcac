"""Removes repeats of keys and values for heads that share them: attention reads each once.

Models repeat them if they pass a mask, since torch's fast kernels take no groups of heads with one. The repeated
tensors are as large as the queries. The backward pass would hold them, and a sharded sequence would send them. A
gradient of keys then adds up over its heads in the kernel, in the precision of the products, and is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node, compute_value
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument, get_arguments
from shardlib.ops.attention.op import OPS

aten = torch.ops.aten
_BACKWARD = OPS[1]


def _has_no_dropout(node: Node) -> bool:
    """Returns whether heads may be regrouped: random numbers differ between heads that share keys and others."""
    return not get_argument(node, "dropout")


def _group_heads(emit: Emit, node: Node) -> Call | None:
    k, v = (_find_repeated(get_argument(node, name)) for name in ("k", "v"))
    if k is None or v is None or _shape(k)[1] != _shape(v)[1]:
        return None
    is_backward = node.target is _BACKWARD
    sums = _find_gradient_sums(node, _shape(k)[1]) if is_backward else {}
    if sums is None:
        return None
    operands = {"k": _regroup(emit, k), "v": _regroup(emit, v)}
    args = tuple((get_arguments(node) | operands).values())
    val: Any = compute_value(emit.gm, node.target, args, {}) if is_backward else None
    for user in node.users if is_backward else ():
        user.meta["val"] = val[user.args[1]]
    for total, grad in sums.items():
        total.replace_all_uses_with(Emit(emit.gm, total)(aten.reshape.default, grad, list(_shape(total))))
    return Call(node.target, args, val=val)


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _find_repeated(x: Any) -> fx.Node | None:
    """Returns the tensor `[B, KV, T, D]` that `[B, KV * n, T, D]` repeats n times in a row, or None.

    It may have another dim of 1 behind KV.
    """
    spread = x.args[0] if has_trait(x.target, "keeps_order") else x
    if not isinstance(spread, fx.Node) or spread.target is not aten.expand.default:
        return None
    source = spread.args[0]
    assert isinstance(source, fx.Node)
    (b, heads, t, d), many, few = _shape(x), list(_shape(spread)), list(_shape(source))
    if spread is x:
        return source if few == [b, 1, t, d] and heads > 1 else None
    repeats = len(many) == 5 and few == [b, many[1], 1, t, d] and many == [b, many[1], heads // many[1], t, d]
    return source if repeats and many[2] > 1 else None


def _find_gradient_sums(node: Node, few: int) -> dict[fx.Node, fx.Node] | None:
    """Returns the sums of gradients over the heads that share keys, each with its gradient.

    None if another node reads such a gradient.
    """
    b, heads, t, d = _shape(get_argument(node, "k"))
    sums = dict[fx.Node, fx.Node]()
    for grad in (user for user in node.users if user.args[1] in (1, 2)):
        for user in grad.users:
            if has_trait(user.target, "keeps_order") and list(_shape(user)) == [b, few, heads // few, t, d]:
                totals, dims = list(user.users), ([2], [-3])
            elif few == 1:
                totals, dims = [user], ([1], [-3])
            else:
                return None
            if any(x.target is not aten.sum.dim_IntList or x.kwargs or x.args[1] not in dims for x in totals):
                return None
            sums |= dict.fromkeys(totals, grad)
    return sums


def _regroup(emit: Emit, x: Node) -> Node:
    """Reshapes keys or values to `[B, KV, T, D]`."""
    b, few, *_, t, d = _shape(x)
    return emit(aten.reshape.default, x, [b, few, t, d])


group_heads = RewritePass(
    "group_heads",
    Rewrite([OPS], _group_heads, _has_no_dropout),  # attention(q, repeat(k), repeat(v)) -> attention(q, k, v)
)
