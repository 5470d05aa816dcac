"""The kernels emulated on the CPU, with the interface of the torch ops: tests run every part of the session on them.

What a rehearsal prints says nothing about a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.attention import math as attention_math
from shardlib.ops.attention.variant import Variant
from shardlib.ops.collectives.transport.cuda_args import Plan
from tests.kernels import emulate
from tests.kernels.attention_args import AttentionBackwardArgs, attention_args, broadcast_strides, pointer

_STEMS = {"sm_90a": "attention", "sm_80": "attention_sm80"}


def kernel(card: str, direction: str) -> Callable[..., None]:
    """The emulated launcher behind the schema of `shardlib_cuda::attention_{forward, backward}`."""
    stem = f"{_STEMS[card]}_{direction}"
    loaded = emulate.library(f"{stem}.cu")

    def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *variant: Any) -> None:
        args = attention_args(q, k, v, o, lse, **_how(variant))
        emulate.call(loaded, f"shardlib_{stem}", args, None)

    def backward(grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, *rest: Any) -> None:
        k, v, o, lse, dq, dk, dv, dbias, repeatable, *variant = rest
        args = AttentionBackwardArgs(attention_args(q, k, v, o, lse, **_how(variant)), repeatable=int(repeatable))
        delta = attention_math.compute_delta(grad_o, grad_lse, o, torch.float32).contiguous()
        for name, x in {"grad_o": grad_o, "dq": dq, "dk": dk, "dv": dv}.items():
            setattr(args, name, pointer(x))
            setattr(args, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
        if dbias is not None:
            args.dbias = pointer(dbias)
            args.dbias_strides = (ctypes.c_int64 * 4)(*broadcast_strides(dbias, (*q.shape[:3], k.shape[2])))
        size = getattr(loaded, f"shardlib_{stem}_workspace")
        size.restype = ctypes.c_int64
        workspace = torch.zeros(size(ctypes.byref(args)) + 256, dtype=torch.uint8)
        start = -workspace.data_ptr() % 256
        args.delta, args.workspace = pointer(delta), pointer(workspace[start:])
        emulate.call(loaded, f"shardlib_{stem}", args, None)

    return forward if direction == "forward" else backward


def launch(op: str, out: Tensor, x: Tensor, plan: Plan) -> None:
    """The emulated launcher of a collective."""
    loaded = emulate.library(f"{op}.cu")
    emulate.configure(loaded, multiprocessors=128)
    emulate.call(loaded, f"shardlib_{op}", plan, None)


def _how(variant: Any) -> dict[str, Any]:
    how = Variant(*variant)
    return how._asdict() | {"part": how.part or ()}
