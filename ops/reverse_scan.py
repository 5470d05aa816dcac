"""Cumulative sums and other scans in reverse: over the elements from an index to the end."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.ops import define_op

aten = torch.ops.aten


def _define(forward: Any, result: str, more: str = "") -> Any:
    """Defines the op that scans in reverse: flips the operand, and the results of `forward`."""
    name = f"{forward.name().removeprefix('aten::')}_behind"

    def behind(x: torch.Tensor, dim: int, **options: Any) -> Any:
        scanned = forward(x.flip(dim), dim, **options)
        return scanned.flip(dim) if isinstance(scanned, torch.Tensor) else tuple(part.flip(dim) for part in scanned)

    return define_op(f"{name}(Tensor self, int dim{more}) -> {result}", behind)


_DTYPE = ", *, ScalarType? dtype=None"
REVERSE_SCANS = {
    aten.cumsum.default: _define(aten.cumsum.default, "Tensor", _DTYPE),
    aten.cumprod.default: _define(aten.cumprod.default, "Tensor", _DTYPE),
    aten.logcumsumexp.default: _define(aten.logcumsumexp.default, "Tensor"),
    # Their indices count from the end, too.
    aten.cummax.default: _define(aten.cummax.default, "(Tensor values, Tensor indices)"),
    aten.cummin.default: _define(aten.cummin.default, "(Tensor values, Tensor indices)"),
}
