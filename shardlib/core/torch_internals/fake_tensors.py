"""Makes fake tensors without calling modes, and the ShapeEnv of a trace."""

from __future__ import annotations

import sys
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import SYMBOL_FRAME, FakeTensor, late, without_dispatch


def make_fake(
    mode: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, memory: Any = None, offset: int = 0
) -> Any:
    """Makes a fake tensor, in new memory or another tensor's, without calling modes."""
    with without_dispatch():
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if memory is not None:
            empty.set_(memory, offset, shape, stride)
    return FakeTensor(mode, empty, device)


def make_fake_like(x: Any) -> Any:
    """Makes a fake tensor with the same shape, strides, dtype and device, without calling modes."""
    return make_fake(x.fake_mode, x.shape, x.stride(), x.dtype, x.fake_device)


def make_shape_env() -> Any:
    """Makes the ShapeEnv of a trace, without the source of symbols, which only hidden messages show.

    It makes no symbols for values of tensors or shapes that depend on them: printed, `zuf0` would look like a value.
    """
    kind = late("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    env = kind(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    setattr(env, SYMBOL_FRAME.rpartition(".")[2], sys._getframe)
    return env
