"""Random numbers on the CPU by `cuda/random.cpp`, compiled with the host library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.ops import native_libs
from shardlib.ops.random.distributions import KINDS

_TYPES = {torch.bool: 0, torch.int64: 1, torch.float32: 2, torch.float64: 3}
_MASK = (1 << 64) - 1


def draw(
    seed: int,
    counter: int,
    kind: str,
    size: Sequence[int],
    first: Sequence[int],
    whole: Sequence[int],
    *,
    dtype: torch.dtype,
    p: int,
) -> Tensor:
    """Returns a contiguous CPU tensor of shape `size`; takes checked arguments of `ops/random/op.py`."""
    host = native_libs.host()
    assert not isinstance(host, Missing), "`choose` has checked it"
    out = torch.empty(list(size), dtype=dtype)
    ints = ctypes.c_int64 * len(size)
    host.shardlib_random(
        KINDS.index(kind),
        _TYPES[dtype],
        ctypes.c_uint64(seed & _MASK),
        ctypes.c_uint64(counter & _MASK),
        ctypes.c_uint64(p),
        len(size),
        ints(*size),
        ints(*first),
        ints(*whole),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out
