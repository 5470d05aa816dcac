"""Running sums and their like from behind: of what lies at a place and behind it, up to the end."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def _define(forward: Any, result: str, more: str = "") -> Any:
    """`forward` of what is turned round, turned back."""
    name = f"{forward.name().removeprefix('aten::')}_behind"

    def behind(x: torch.Tensor, dim: int, **how: Any) -> Any:
        found = forward(x.flip(dim), dim, **how)
        return found.flip(dim) if isinstance(found, torch.Tensor) else tuple(part.flip(dim) for part in found)

    torch.library.define(f"shardlib::{name}", f"(Tensor self, int dim{more}) -> {result}")
    torch.library.impl(f"shardlib::{name}", "CompositeExplicitAutograd", behind)
    return getattr(torch.ops.shardlib, name).default


_DTYPE = ", *, ScalarType? dtype=None"
BEHIND = {
    aten.cumsum.default: _define(aten.cumsum.default, "Tensor", _DTYPE),
    aten.cumprod.default: _define(aten.cumprod.default, "Tensor", _DTYPE),
    aten.logcumsumexp.default: _define(aten.logcumsumexp.default, "Tensor"),
    # Their indices count from behind, too.
    aten.cummax.default: _define(aten.cummax.default, "(Tensor values, Tensor indices)"),
    aten.cummin.default: _define(aten.cummin.default, "(Tensor values, Tensor indices)"),
}
