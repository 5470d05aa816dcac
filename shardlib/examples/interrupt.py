"""Ctrl-C stops a run after its current step instead of in the middle of it."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

import shardlib as sl


class Interrupt:
    """A context in which the first SIGINT or SIGTERM only requests a stop; a second one ends the program as usual."""

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.stop_requested = False

    def __enter__(self) -> Self:
        self._old_handlers = {number: signal.signal(number, self._request_stop) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        signal.signal(number, self._old_handlers[signal.Signals(number)])

    def is_requested_on_any_rank(self, mesh: sl.Mesh) -> bool:
        """True if some rank got a signal, so that all stop after the same step. All ranks must call this."""
        if mesh.kind != "distributed":
            return self.stop_requested
        flag = torch.tensor([int(self.stop_requested)], device=mesh.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())
