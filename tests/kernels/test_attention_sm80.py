"""attention_sm80_{forward,backward}.cu on emulated threads: every variant against float64, and planted bugs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.ops import _attention_math
from shardlib.ops.attention import Variant
from tests.kernels import emulate
from tests.kernels.attention_args import AttentionArgs, AttentionBackwardArgs, attention_args, broadcast_strides, pointer
from tests.ops import attention_cases
from tests.ops.attention_cases import CASES, Case

FORWARD, BACKWARD = "attention_sm80_forward.cu", "attention_sm80_backward.cu"


def forward(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, library: ctypes.CDLL | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel's o and lse; fails when it writes anything else."""
    memory = emulate.Memory()
    args, o, lse = _arguments(memory, q, k, v, variant)
    emulate.call(library or emulate.library(FORWARD), "shardlib_attention_sm80_forward", args, None)
    memory.check()
    return o, lse


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    variant: Variant,
    need_bias: bool,
    *,
    repeatable: bool = False,
    library: ctypes.CDLL | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The kernels' dq, dk, dv and dbias; fails when they write anything else."""
    library = library or emulate.library(BACKWARD)
    memory = emulate.Memory()
    args = AttentionBackwardArgs(repeatable=repeatable)
    args.forward, _, _ = _arguments(memory, q, k, v, variant, lse)
    delta = _attention_math.delta_of(grad_o, grad_lse, o, torch.float32)
    grads = [memory.empty(*x.shape, dtype=x.dtype, name=f"d{n}") for n, x in (("q", q), ("k", k), ("v", v))]
    tensors = {"grad_o": memory.tensor(grad_o, "grad_o"), "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    for name, x in tensors.items():
        setattr(args, name, pointer(x))
        setattr(args, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    dbias = None
    if need_bias and variant.bias is not None:
        dbias = memory.tensor(torch.zeros_like(variant.bias, dtype=torch.float32), "dbias")
        strides = broadcast_strides(dbias, (*q.shape[:3], k.shape[2]))
        args.dbias, args.dbias_strides = pointer(dbias), (ctypes.c_int64 * 4)(*strides)
    size = library.shardlib_attention_sm80_backward_workspace
    size.restype = ctypes.c_int64
    workspace = memory.tensor(torch.zeros(size(ctypes.byref(args)), dtype=torch.uint8), "the workspace")
    args.delta, args.workspace = pointer(memory.tensor(delta, "delta")), pointer(workspace)
    emulate.call(library, "shardlib_attention_sm80_backward", args, None)
    memory.check()
    return *grads, dbias if dbias is None else dbias.to(q.dtype)


def _arguments(
    memory: emulate.Memory, q: Tensor, k: Tensor, v: Tensor, variant: Variant, lse: Tensor | None = None
) -> tuple[AttentionArgs, Tensor, Tensor]:
    how: dict[str, Any] = variant._asdict() | {"part": variant.part or ()}
    how |= {name: memory.tensor(x, name) for name, x in how.items() if isinstance(x, Tensor)}
    q, k, v = (memory.tensor(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    o = memory.empty(*q.shape, dtype=q.dtype, name="o")
    lse = memory.empty(*q.shape[:3], dtype=torch.float32, name="lse") if lse is None else memory.tensor(lse, "lse")
    return attention_args(q, k, v, o, lse, **how), o, lse
