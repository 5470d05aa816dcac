"""Keys that are repeated for heads that share them: attention reads each once, and knows which heads share it.

Models repeat them where they give a mask, since torch's fast kernels take no groups of heads with one. The repeated
are as large as the queries: they would be held for the backward pass, and go round where a sequence is cut. A gradient
of keys then adds up over its heads where it is made, in the precision of the products, and is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.basic import call, value_of
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument, get_arguments
from shardlib.ops.attention.op import OPS

aten = torch.ops.aten
_BACKWARD = OPS[1]


def group_heads(gm: fx.GraphModule) -> None:
    """Attention to keys and values that are repeated alike reads those that are repeated."""
    for node in gm.graph.nodes:
        if node.target not in OPS or get_argument(node, "dropout"):  # draws are for neighbors that share keys
            continue
        k, v = (_repeated(get_argument(node, name)) for name in ("k", "v"))
        if k is None or v is None or _shape(k)[1] != _shape(v)[1]:
            continue
        sums = _summed(node, _shape(k)[1]) if node.target is _BACKWARD else {}
        if sums is not None:
            _read(gm, node, k=k, v=v)
            for total, grad in sums.items():
                with gm.graph.inserting_before(total):
                    total.replace_all_uses_with(call(gm, total, aten.reshape.default, grad, list(_shape(total))))


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _repeated(x: Any) -> fx.Node | None:
    """What `[B, KV * n, T, D]` repeats n times in a row: `[B, KV, T, D]`, or the same with a dim of 1 behind KV."""
    spread = x.args[0] if has_trait(x.target, "keeps_order") else x
    if not isinstance(spread, fx.Node) or spread.target is not aten.expand.default:
        return None
    source = spread.args[0]
    assert isinstance(source, fx.Node)
    (b, heads, t, d), many, few = _shape(x), list(_shape(spread)), list(_shape(source))
    if spread is x:
        return source if few == [b, 1, t, d] and heads > 1 else None
    alike = len(many) == 5 and few == [b, many[1], 1, t, d] and many == [b, many[1], heads // many[1], t, d]
    return source if alike and many[2] > 1 else None


def _summed(node: fx.Node, few: int) -> dict[fx.Node, fx.Node] | None:
    """The sums over the heads that share keys, of which gradient of these; None if somebody reads one before."""
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


def _read(gm: fx.GraphModule, node: fx.Node, **keys: fx.Node) -> None:
    """The call reads other keys and values, and makes gradients of their shapes."""
    with gm.graph.inserting_before(node):
        for name, x in keys.items():
            b, few, *_, t, d = _shape(x)
            keys[name] = call(gm, node, aten.reshape.default, x, [b, few, t, d])
    node.args, node.kwargs = tuple((get_arguments(node) | keys).values()), {}
    if node.target is _BACKWARD:
        node.meta["val"] = value_of(gm, node.target, node.args, {})
        for user in node.users:
            user.meta["val"] = node.meta["val"][user.args[1]]
