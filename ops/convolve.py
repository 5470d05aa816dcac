"""Convolutions with as many zeros in front of a dim as behind it, or other numbers: a causal one has none behind.

The arguments are ATen's; `padding` stands in front, `after` (less than nothing drops what is there) behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, after: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """The convolution; it is not `transposed`.

    Example:
        >>> x, taps = torch.arange(4.0).view(1, 1, 4), torch.ones(1, 1, 2)
        >>> convolve(x, taps, None, [1], [1], [1], False, [0], 1)
        tensor([[[0., 1., 3., 5.]]])
    """
    none = [0] * len(stride)
    padded = aten.constant_pad_nd.default(input, _around(padding, after))
    return aten.convolution.default(padded, weight, bias, stride, none, dilation, False, none, groups)  # type: ignore[no-any-return]


def convolve_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, after: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of input, weight and bias that `output_mask` asks for."""
    none, around = [0] * len(stride), _around(padding, after)
    padded = aten.constant_pad_nd.default(input, around)
    how = bias_sizes, stride, none, dilation, False, none, groups, output_mask
    dx, *rest = aten.convolution_backward.default(grad_output, padded, weight, *how)
    return dx if dx is None else aten.constant_pad_nd.default(dx, [-n for n in around]), *rest


def _around(padding: Sequence[int], after: Sequence[int]) -> list[int]:
    """The amounts as a pad takes them: the last dim first."""
    return [n for pair in reversed([*zip(padding, after, strict=True)]) for n in pair]


_HOW = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] after, SymInt groups"
for _form, _schema in (
    (convolve, f"(Tensor input, Tensor weight, Tensor? bias, {_HOW}) -> Tensor"),
    (convolve_backward, f"(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_HOW}, "
     "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"),
):  # fmt: skip
    torch.library.define(f"shardlib::{_form.__name__}", _schema)
    torch.library.impl(f"shardlib::{_form.__name__}", "CompositeExplicitAutograd", _form)

CONVOLVE = torch.ops.shardlib.convolve.default
CONVOLVE_BACKWARD = torch.ops.shardlib.convolve_backward.default
