"""What the torch at hand can do, where versions that shardlib supports differ: torch is asked, not its number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def _runs(fn: Callable[[], object]) -> bool:
    try:
        fn()
    except RuntimeError:  # a NotImplementedError is one
        return False
    return True


def _quantize() -> None:
    with FakeTensorMode():
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)


# aminmax has a gradient since torch 2.12; what quantizes has a form for fake tensors since then.
HAS_AMINMAX_GRADIENT = _runs(lambda: torch.zeros(2, requires_grad=True).aminmax(dim=0).max.backward())
HAS_FAKE_QUANTIZED = _runs(_quantize)
