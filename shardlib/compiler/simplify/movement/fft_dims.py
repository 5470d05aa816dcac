"""A Fourier transform over several dims is one over each, one after the other: others may be cut meanwhile, and a cut
moves in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from shardlib.compiler.simplify.basic import call
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_C2C, _R2C, _C2R = aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default
_TRANSFORMS = {_C2C, _R2C, _C2R}


@dataclass(frozen=True)
class _Way:
    """What was transformed on the way to a value: the last turn of each of its dims; of all turns, whatever dims there
    were then, the last; and whether the last transform over several dims went through them from the last dim on."""

    turns: Mapping[int, int] = field(default_factory=dict)
    last: int = 0
    falling: bool = False


def dim_by_dim(gm: fx.GraphModule) -> None:
    """The dim that was transformed last comes first: it is whole, and the first may be cut by now. So a transform there
    and back goes through its dims in one order and in the other. Without a transform before it, the last dim comes
    first, since leading ones are what is cut. Of real operands the last comes first in any case, of real results last.
    """
    if all(node.target not in _TRANSFORMS for node in gm.graph.nodes):
        return
    ways: dict[fx.Node, _Way] = {}
    count = 0
    for node in list(gm.graph.nodes):
        ways[node] = way = _met(node, ways)
        if node.target not in _TRANSFORMS:
            continue
        dims = [d % node.meta["val"].dim() for d in get_argument(node, "dim")]
        order = _order(node, dims, way)
        turns = {dim: count + i for i, dim in enumerate(order, 1)}
        count += len(order)
        falling = order[0] != dims[0] if len(dims) > 1 else way.falling
        ways[node] = _Way({**way.turns, **turns}, count, falling)
        if len(order) > 1:
            _split(gm, node, order)


def _met(node: fx.Node, ways: Mapping[fx.Node, _Way]) -> _Way:
    """The way of what a node reads; the dims of a tensor of another rank are others."""
    met = [(x, way) for x in node.all_input_nodes if (way := ways[x]).last]
    if not met:
        return _Way()
    turns: dict[int, int] = {}
    for x, way in met:
        if _rank(x) == _rank(node):
            turns |= {dim: max(turn, turns.get(dim, 0)) for dim, turn in way.turns.items()}
    latest = max((way for _, way in met), key=lambda way: way.last)
    return _Way(turns, latest.last, latest.falling)


def _rank(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    return val.dim() if isinstance(val, torch.Tensor) else None


def _order(node: fx.Node, dims: list[int], way: _Way) -> list[int]:
    """In which order a transform goes through its dims."""
    *others, last = dims
    free = dims if node.target is _C2C else others
    free = free if way.falling else free[::-1]
    free = sorted(free, key=lambda dim: -way.turns.get(dim, 0))
    return free if node.target is _C2C else [last, *free] if node.target is _R2C else [*free, last]


def _split(gm: fx.GraphModule, node: fx.Node, order: list[int]) -> None:
    """Make a transform over several dims one over each, in this order."""
    norm, real = get_argument(node, "normalization"), node.target is _C2R
    first, last = (node.target, _C2C) if not real else (_C2C, _C2R)
    flag = get_argument(node, "onesided" if first is _R2C else "forward") if not real else False
    forward = first is _R2C or flag
    x = node.args[0]
    with gm.graph.inserting_before(node):
        for i, dim in enumerate(order[:-1]):
            x = call(gm, node, _C2C if i else first, x, [dim], norm, forward if i else flag)
    end = get_argument(node, "last_dim_size") if real else forward
    node.target, node.args, node.kwargs = last, (x, order[-1:], norm, end), {}
