"""Copies between the memory of a device and that of its host.

On CUDA they are copies to and from pinned memory, on a stream of their own; elsewhere copies within the one memory that
there is, so that what lives on the host is counted as it would be. `TIER` counts both.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from shardlib.ops.collectives.transport.torch_wire import Handle


class Tier:
    """The host's memory as programs use it: bytes `held` now, `peak` at most, and those `sent` there and brought back
    (`fetched`) so far."""

    def __init__(self) -> None:
        self.held = self.peak = self.sent = self.fetched = 0

    def take(self, x: Tensor) -> Tensor:
        """Count a tensor that came, as long as somebody has it."""
        self.held += x.nbytes
        self.sent += x.nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(x, self._leave, x.nbytes).atexit = False
        return x

    def _leave(self, nbytes: int) -> None:
        self.held -= nbytes


TIER = Tier()


def to_host(x: Tensor) -> Handle[Tensor]:
    """Begin to copy `x` to the host's memory."""
    if x.device.type != "cuda" or not x.numel():
        out = TIER.take(x.clone())
        return Handle(lambda: out)
    return _aside(x, TIER.take(torch.empty_like(x, device="cpu", pin_memory=True)))


def to_device(x: Tensor) -> Handle[Tensor]:
    """Begin to copy back what `to_host` brought."""
    TIER.fetched += x.nbytes
    if not x.is_pinned():
        out = x.clone()
        return Handle(lambda: out)
    device = torch.device("cuda", torch.cuda.current_device())
    return _aside(x, torch.empty_like(x, device=device))


def reference_to_host(xs: Sequence[Tensor]) -> list[Tensor]:
    """For devices of one process, each by itself."""
    return [to_host(x).finish() for x in xs]


def reference_to_device(xs: Sequence[Tensor]) -> list[Tensor]:
    return [to_device(x).finish() for x in xs]


def _aside(source: Tensor, out: Tensor) -> Handle[Tensor]:
    """Copy on the stream of copies, which waits for what is under way; whoever finishes waits for that."""
    device = source.device if source.is_cuda else out.device
    here, aside = torch.accelerator.current_stream(device), _stream(device.index)
    aside.wait_stream(here)
    with aside:
        out.copy_(source, non_blocking=True)
    done = aside.record_event()

    def finish() -> Tensor:
        torch.accelerator.current_stream(device).wait_event(done)
        return out

    return Handle(finish)


@cache
def _stream(index: int) -> torch.Stream:
    return torch.Stream(torch.device("cuda", index))
