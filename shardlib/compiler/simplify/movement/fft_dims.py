"""Splits a Fourier transform over several dims into one over each dim, between which shards may change dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_C2C, _R2C, _C2R = aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default
_TRANSFORMS = {_C2C, _R2C, _C2R}


@dataclass(frozen=True)
class _History:
    """The transforms that a value depends on, numbered in order.

    `latest` numbers the last transform of each dim, `last` the last one of all. `descends` is true if
    the last transform over several dims began with the last dim.
    """

    latest: Mapping[int, int] = field(default_factory=dict)
    last: int = 0
    descends: bool = False


def split_fft_dims(gm: fx.GraphModule) -> None:
    """Splits transforms; the dim that was transformed last comes first, since a transformed dim is whole.

    So a transform and its inverse go through the dims in opposite orders. Without a transform before, the last dim
    comes first: programs mostly shard leading dims. It comes first of real operands, and last of real results.
    """
    if all(node.target not in _TRANSFORMS for node in gm.graph.nodes):
        return
    histories: dict[fx.Node, _History] = {}
    count = 0
    for node in list(gm.graph.nodes):
        histories[node] = history = _merge_histories(node, histories)
        if node.target not in _TRANSFORMS:
            continue
        dims = [d % node.meta["val"].dim() for d in get_argument(node, "dim")]
        order = _choose_order(node, dims, history)
        latest = {dim: count + i for i, dim in enumerate(order, 1)}
        count += len(order)
        descends = order[0] != dims[0] if len(dims) > 1 else history.descends
        histories[node] = _History({**history.latest, **latest}, count, descends)
        if len(order) > 1:
            _split(Emit(gm, node), node, order)


def _merge_histories(node: fx.Node, histories: Mapping[fx.Node, _History]) -> _History:
    """Returns the history of a node's operands; dims of a tensor of another rank are other dims."""
    operands = [(x, history) for x in node.all_input_nodes if (history := histories[x]).last]
    if not operands:
        return _History()
    latest: dict[int, int] = {}
    for x, history in operands:
        if _get_rank(x) == _get_rank(node):
            latest |= {dim: max(number, latest.get(dim, 0)) for dim, number in history.latest.items()}
    newest = max((history for _, history in operands), key=lambda history: history.last)
    return _History(latest, newest.last, newest.descends)


def _get_rank(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    return val.dim() if isinstance(val, torch.Tensor) else None


def _choose_order(node: fx.Node, dims: list[int], history: _History) -> list[int]:
    """Returns the order in which a transform goes through its dims."""
    *others, last = dims
    free = dims if node.target is _C2C else others
    free = free if history.descends else free[::-1]
    free = sorted(free, key=lambda dim: -history.latest.get(dim, 0))
    return free if node.target is _C2C else [last, *free] if node.target is _R2C else [*free, last]


def _split(emit: Emit, node: fx.Node, order: list[int]) -> None:
    """Emits a transform over each dim but the last in the order, which the node keeps."""
    norm, is_to_real = get_argument(node, "normalization"), node.target is _C2R
    first, last = (node.target, _C2C) if not is_to_real else (_C2C, _C2R)
    flag = get_argument(node, "onesided" if first is _R2C else "forward") if not is_to_real else False
    forward = first is _R2C or flag
    x = node.args[0]
    for i, dim in enumerate(order[:-1]):
        x = emit(_C2C if i else first, x, [dim], norm, forward if i else flag)
    final = get_argument(node, "last_dim_size") if is_to_real else forward
    node.target, node.args, node.kwargs = last, (x, order[-1:], norm, final), {}
