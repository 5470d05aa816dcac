"""Whether tensors are what they were, to the last bit: also NaNs and signs of zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlib import ShardedTensor


class ChangedError(AssertionError):
    """An input was written to."""


def bits(x: Tensor) -> Tensor:
    """The bytes of a plain tensor's values, copied."""
    return (
        x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    )


@contextmanager
def unchanged(inputs: Sequence[Any]) -> Iterator[None]:
    """Raise `ChangedError` where what runs inside writes to one of these: to plain tensors, or to anybody's piece."""
    held = [[s.data for s in x.shards] if isinstance(x, ShardedTensor) else [x] for x in inputs]
    before = [[bits(x) for x in pieces] for pieces in held]
    yield
    changed = [
        f"{i}, on device {d}" if len(pieces) > 1 else str(i)
        for i, (pieces, then) in enumerate(zip(held, before, strict=True))
        for d, (x, old) in enumerate(zip(pieces, then, strict=True))
        if not torch.equal(bits(x), old)
    ]
    if changed:
        raise ChangedError(f"the call wrote to input {changed[0]}")
