"""A Fourier transform over several dims is one over each, one after the other: others may be cut meanwhile, and a cut
moves in between."""

from __future__ import annotations

import torch
from torch import fx

from shardlib.aten.views import argument
from shardlib.normalise.passes import call

aten = torch.ops.aten
_C2C, _R2C, _C2R = aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default


def dim_by_dim(gm: fx.GraphModule) -> None:
    """The last dim comes first, since leading ones are what is cut; of real results it comes last."""
    for node in gm.graph.nodes:
        dims = list(argument(node, "dim")) if node.target in (_C2C, _R2C, _C2R) else []
        if len(dims) < 2:
            continue
        norm, real = argument(node, "normalization"), node.target is _C2R
        first, last = (node.target, _C2C) if not real else (_C2C, _C2R)
        flag = argument(node, "onesided" if first is _R2C else "forward") if not real else False
        forward = first is _R2C or flag
        x, order = node.args[0], dims if real else dims[::-1]
        with gm.graph.inserting_before(node):
            for i, dim in enumerate(order[:-1]):
                x = call(gm, node, _C2C if i else first, x, [dim], norm, forward if i else flag)
        end = argument(node, "last_dim_size") if real else forward
        node.target, node.args, node.kwargs = last, (x, order[-1:], norm, end), {}
