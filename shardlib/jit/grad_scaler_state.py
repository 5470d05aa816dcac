"""The scale of a `GradScaler`, which is made where it is first asked for, in its first step.

A trace that asks for it ends, and begins anew with a scale that is there: so one program serves the first step, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from shardlib.core.context import skip_dynamo
from shardlib.core.errors import TraceAnewError
from shardlib.core.torch_private import SCALE, SCALE_BEGINS, SCALE_GROWTH


class NoScaleError(TraceAnewError):
    """A function asks a scaler that it finds for a scale, and there is none."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self.scaler, self.device = scaler, device


@contextmanager
def awaited(scalers: Sequence[Any]) -> Iterator[None]:
    """While a function is traced that finds these."""
    with ExitStack() as undo:
        for scaler in [x for x in scalers if getattr(x, SCALE) is None]:
            undo.callback(vars(scaler).pop, SCALE_BEGINS, None)
            vars(scaler)[SCALE_BEGINS] = _asked(scaler)
        yield


def _asked(scaler: Any) -> Callable[[torch.device], NoReturn]:
    def ask(device: torch.device) -> NoReturn:
        raise NoScaleError(scaler, device)

    return ask


@skip_dynamo
def begin(scaler: Any, device: torch.device, undo: ExitStack) -> None:
    """Make it, by torch's own code."""
    getattr(scaler, SCALE_BEGINS)(device)
    for name in (SCALE, SCALE_GROWTH):
        undo.callback(setattr, scaler, name, None)
