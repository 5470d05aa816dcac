"""The ops that programs are written with beside those that the user called: cuts, views and copies."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

ADD = _aten.add.Tensor
ALIAS = _aten.alias.default
CAT = _aten.cat.default
CLONE = _aten.clone.default
FILLED = _aten.new_full.default
NARROW = _aten.narrow.default
PERMUTE = _aten.permute.default
PAD = _aten.constant_pad_nd.default
RESHAPE = _aten.reshape.default
SLICE = _aten.slice.Tensor
