"""The ops that programs are written with beside those that the user called: cuts, views and copies."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

ALIAS = _aten.alias.default
CLONE = _aten.clone.default
FILLED = _aten.new_full.default
NARROW = _aten.narrow.default
RESHAPE = _aten.reshape.default
