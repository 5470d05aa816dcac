"""Permutes rows of a tensor: a `ppermute` of stacked members' tensors.

It is an op with a sharding rule (`rules/tensor_ops/rearrange.py`): devices that hold one row each exchange rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.ops import define_op


def _send_rows(x: Tensor, sources: list[int], rows: list[int]) -> Tensor:
    out = torch.zeros_like(x)
    for source, row in zip(sources, rows, strict=True):
        out[row] = x[source]
    return out


define_op(
    "send_rows(Tensor x, int[] sources, int[] rows) -> Tensor", _send_rows, lambda x, sources, rows: torch.empty_like(x)
)


def send_rows(x: Tensor, sources: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Returns x `[n, ...]` with row `sources[i]` at `rows[i]`, each at most once, and zeros elsewhere."""
    return _SendRows.apply(x, sources, rows)  # type: ignore[no-any-return,no-untyped-call]


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, sources: Sequence[int], rows: Sequence[int]) -> Any:
        return torch.ops.shardlib.send_rows(x, list(sources), list(rows))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[int], Sequence[int]], output: Tensor) -> None:
        _, ctx.sources, ctx.rows = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return send_rows(grad, ctx.rows, ctx.sources), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return send_rows(tangent, ctx.sources, ctx.rows)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None, None], x: Tensor, sources: Sequence[int], rows: Sequence[int]
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return send_rows(x.movedim(in_dims[0], 1), sources, rows), 1
