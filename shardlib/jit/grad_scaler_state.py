"""Creates the scale of a `GradScaler`, which torch would create in its first step.

A trace that reads a missing scale is aborted, and begins again with a scale, so one program serves the first step, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from shardlib.core.context import skip_dynamo
from shardlib.core.errors import TraceAnewError
from shardlib.core.torch_internals.torch_private import SCALE, SCALE_BEGINS, SCALE_GROWTH


class NoScaleError(TraceAnewError):
    """A function reads the scale of a scaler, and there is none."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self.scaler, self.device = scaler, device


@contextmanager
def awaited(scalers: Sequence[Any]) -> Iterator[None]:
    """Inside, reading a missing scale of these scalers raises `NoScaleError`."""
    with ExitStack() as undo:
        for scaler in [x for x in scalers if getattr(x, SCALE) is None]:
            undo.callback(vars(scaler).pop, SCALE_BEGINS, None)
            vars(scaler)[SCALE_BEGINS] = _missing(scaler)
        yield


def _missing(scaler: Any) -> Callable[[torch.device], NoReturn]:
    def refuse(device: torch.device) -> NoReturn:
        raise NoScaleError(scaler, device)

    return refuse


@skip_dynamo
def begin(scaler: Any, device: torch.device, undo: ExitStack) -> None:
    """Creates the scale by torch's own code; `undo` removes it."""
    getattr(scaler, SCALE_BEGINS)(device)
    for name in (SCALE, SCALE_GROWTH):
        undo.callback(setattr, scaler, name, None)
