"""Traces `AveragedModel`: whether an update is the first one, a copy, is a value, so both results are computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.core.context import is_tracing
from shardlib.core.torch_internals.torch_private import AVERAGES


class _Later:
    """The count of updates, which compares as if it were positive: torch takes the path of a later update."""

    def __init__(self, count: Tensor) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return True

    def __iadd__(self, n: int) -> Tensor:
        self.count += n
        return self.count

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.count.to(*args, **kwargs)


def trace_averages() -> AbstractContextManager[Any]:
    """Averages modules in this way in traced functions, inside the context."""
    original = AVERAGES.value

    def update_parameters(average: Any, model: nn.Module) -> None:
        if not is_tracing():
            original(average, model)
            return
        is_first = average.n_averaged == 0
        own = vars(average)
        own["n_averaged"] = _Later(average.n_averaged)  # found before the buffer
        try:
            original(average, model)
        finally:
            del own["n_averaged"]
        for old, new in _pairs(average, model):
            old.detach().copy_(torch.where(is_first, new.detach(), old.detach()))

    return AVERAGES.holding(update_parameters)


def _pairs(average: Any, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs the averaged tensors with the model's."""
    if not average.use_buffers:
        return zip(average.parameters(), model.parameters(), strict=False)
    first, second = (itertools.chain(x.parameters(), x.buffers()) for x in (average.module, model))
    return zip(first, second, strict=False)
