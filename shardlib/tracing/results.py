"""What the outputs of a traced function are as tensors of one device: their strides, and which of them are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardlib.tracing.ending import After


def strides_of(returned: Sequence[Any], after: After, leaves: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
    """The strides of all outputs; a gradient has those of its tensor, as autograd would keep it."""
    own = [x.stride() if isinstance(x, torch.Tensor) else None for x in returned]
    at = len(own) - len(after.gradients)
    of = [leaves[leaf] for leaf, _ in after.gradients]
    kept = [torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride() for x in of]
    return (*own[:at], *(None for _ in after.written), *kept)


def repeated(results: Sequence[Any]) -> dict[int, int]:
    """The tensors among these that are an earlier one, with its place."""
    first: dict[int, int] = {}
    places = {i: first.setdefault(id(x), i) for i, x in enumerate(results) if isinstance(x, torch.Tensor)}
    return {i: at for i, at in places.items() if i != at}
