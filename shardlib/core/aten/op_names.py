"""Short names of the ATen ops that the compiler inserts into programs: slices, views, copies and arithmetic."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

ADD = _aten.add.Tensor
ALIAS = _aten.alias.default
ARANGE = _aten.arange.start
CAT = _aten.cat.default
CLONE = _aten.clone.default
FILLED = _aten.new_full.default
FLATTEN = _aten.flatten.using_ints
GE = _aten.ge.Tensor
LT = _aten.lt.Tensor
MASKED_FILL = _aten.masked_fill.Scalar
MUL = _aten.mul.Tensor
NARROW = _aten.narrow.default
OR = _aten.logical_or.default
PAD = _aten.constant_pad_nd.default
PERMUTE = _aten.permute.default
REPEAT = _aten.repeat_interleave.self_int
RESHAPE = _aten.reshape.default
SELECT = _aten.select.int
SLICE = _aten.slice.Tensor
STACK = _aten.stack.default
SPLIT = _aten.split_with_sizes.default
VIEW = _aten.view.default
UNSQUEEZE = _aten.unsqueeze.default

# A matrix product, and the op that adds it to its first operand.
ADDED = {_aten.mm.default: _aten.addmm.default, _aten.bmm.default: _aten.baddbmm.default}
