"""Copies between the memories of a device and its host.

On CUDA they are copies to and from pinned memory, on a stream of their own. On CPUs they are copies within the one
memory, so that offloaded tensors are counted as on CUDA. `HOST_MEMORY` counts both.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from shardlib.ops.collectives.transport.torch_wire import Handle


class HostMemory:
    """Counts programs' use of the host's memory: bytes `held` now, at `peak`, `sent` so far, and `fetched` so far."""

    def __init__(self) -> None:
        self.held = self.peak = self.sent = self.fetched = 0

    def take(self, x: Tensor) -> Tensor:
        """Counts a tensor on the host until it is freed."""
        self.held += x.nbytes
        self.sent += x.nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(x, self._leave, x.nbytes).atexit = False
        return x

    def _leave(self, nbytes: int) -> None:
        self.held -= nbytes


HOST_MEMORY = HostMemory()


def to_host(x: Tensor) -> Handle[Tensor]:
    """Begin to copy `x` to the host's memory."""
    if x.device.type != "cuda" or not x.numel():
        out = HOST_MEMORY.take(x.clone())
        return Handle(lambda: out)
    return _copy_on_side_stream(x, HOST_MEMORY.take(torch.empty_like(x, device="cpu", pin_memory=True)))


def to_device(x: Tensor) -> Handle[Tensor]:
    """Begin to copy a result of `to_host` back."""
    HOST_MEMORY.fetched += x.nbytes
    if not x.is_pinned():
        out = x.clone()
        return Handle(lambda: out)
    device = torch.device("cuda", torch.cuda.current_device())
    return _copy_on_side_stream(x, torch.empty_like(x, device=device))


def reference_to_host(xs: Sequence[Tensor]) -> list[Tensor]:
    """Copies one tensor per virtual device."""
    return [to_host(x).finish() for x in xs]


def reference_to_device(xs: Sequence[Tensor]) -> list[Tensor]:
    return [to_device(x).finish() for x in xs]


def _copy_on_side_stream(source: Tensor, out: Tensor) -> Handle[Tensor]:
    """Begin to copy on the copy stream, after the current stream's work; `finish` makes the current stream wait."""
    device = source.device if source.is_cuda else out.device
    side_stream = _copy_stream(device.index)
    side_stream.wait_stream(torch.accelerator.current_stream(device))
    with side_stream:
        out.copy_(source, non_blocking=True)
    done = side_stream.record_event()

    def finish() -> Tensor:
        torch.accelerator.current_stream(device).wait_event(done)
        return out

    return Handle(finish)


@cache
def _copy_stream(index: int) -> torch.Stream:
    return torch.Stream(torch.device("cuda", index))
