"""Composes permutations of permutations, and reshapes of reshapes."""

from __future__ import annotations

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_PERMUTE = (aten.permute.default,)


def get_permuted_dims(node: Node) -> list[int]:
    """Returns the operand's dims in the order of a permutation's result."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    dims = list(range(rank))
    if rank > 1:
        a, b = (0, 1) if node.target is aten.t.default else (get_argument(node, "dim0"), get_argument(node, "dim1"))
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _compose_permutes(emit: Emit, node: Node) -> Call:
    source = node.args[0]
    return Call(aten.permute.default, (source.args[0], [source.args[1][d] for d in get_permuted_dims(node)]))


def _keeps_dims(node: Node) -> bool:
    dims = get_permuted_dims(node)
    return dims == sorted(dims)


def _is_not_plain(node: Node) -> bool:
    return node.target is not aten.permute.default or list(node.args[1]) != get_permuted_dims(node)


def _write_permute(emit: Emit, node: Node) -> Call:
    return Call(aten.permute.default, (node.args[0], get_permuted_dims(node)))


def _reads_no_shared_copy(node: Node) -> bool:
    """Returns whether a reshape's operand is made for it alone, or costs nothing."""
    source = node.args[0]
    return not (source.meta.get("copies") and len(source.users) > 1)


def _compose_reshapes(emit: Emit, node: Node) -> Call:
    source = node.args[0]
    node.meta["copies"] = node.meta.get("copies", False) or source.meta.get("copies", False)
    return Call(aten.reshape.default, (source.args[0], list(node.meta["val"].shape)))


def _keeps_shape(node: Node) -> bool:
    return bool(node.args[0].meta["val"].shape == node.meta["val"].shape)


def _get_operand(emit: Emit, node: Node) -> fx.Node:
    operand: fx.Node = node.args[0]
    return operand


compose_permutes = RewritePass(
    "compose_permutes",
    Rewrite(["permutes", _PERMUTE], _compose_permutes),  # permute(permute(x)) -> permute(x)
    Rewrite(["permutes"], _get_operand, _keeps_dims),  # permute(x, [0, 1, 2]) -> x
    Rewrite(["permutes"], _write_permute, _is_not_plain),  # transpose(x, -2, -1) -> permute(x, [0, 2, 1])
)
compose_reshapes = RewritePass(
    "compose_reshapes",
    Rewrite(["keeps_order", "keeps_order"], _compose_reshapes, _reads_no_shared_copy),  # reshape(reshape(x))
    Rewrite(["keeps_order"], _get_operand, _keeps_shape),  # reshape(x, x.shape) -> x
)
