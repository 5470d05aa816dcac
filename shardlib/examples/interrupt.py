"""Ctrl-C asks a run to stop after the step that it is in, rather than in the middle of it."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

import shardlib as sl


class Interrupt:
    """While it is entered, the first SIGINT or SIGTERM only sets a mark; a second one ends the program as usual.

    Example:
        >>> with Interrupt() as interrupt:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interrupt.asked
        True
    """

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._mark) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._before[signal.Signals(number)])

    def anywhere(self, mesh: sl.Mesh) -> bool:
        """Whether any rank was asked: all ranks must stop after the same step. All ranks must call this."""
        if mesh.kind != "distributed":
            return self.asked
        asked = torch.tensor([int(self.asked)], device=mesh.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked.item())
