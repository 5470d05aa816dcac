"""What a trace can see that no argument says: modes and switches of torch. All of it is part of a call's key."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_DEVICES = ("cpu", "cuda")


def ambient() -> tuple[Any, ...]:
    """The modes of this thread and the switches of this process, as part of a key.

    Gradient and inference mode; autocast of each kind of device, its dtype and its cache; default dtype and device;
    deterministic algorithms and the precision of matrix products; `SHARDLIB_OPS`; modes that see every function.
    """
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *[torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES],
        torch.is_autocast_cache_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_float32_matmul_precision(),
        os.environ.get("SHARDLIB_OPS"),
        _modes(_get_current_function_mode_stack) if torch._C._len_torch_function_stack() else (),
        _modes(_get_current_dispatch_mode_stack) if torch._C._len_torch_dispatch_stack() else (),
    )


def _modes(stack: Callable[[], Any]) -> tuple[Any, ...]:
    """Modes by their kind, and `with device:` by its device."""
    return tuple((type(mode), getattr(mode, "device", None)) for mode in stack())


NAMES = (
    "gradient mode",
    "inference mode",
    "the default dtype",
    *(f"autocast on {d}" for d in _DEVICES),
    "autocast's cache",
    "deterministic algorithms",
    "float32 precision",
    "SHARDLIB_OPS",
    "torch function modes",
    "torch dispatch modes",
)
