"""Messages between two ranks: of one stage of a pipeline to the rank at the same place in another stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.ops.collectives.transport.groups import GroupHandle


class Mailbox:
    """The messages of one program. A send never waits for its receiver; `finish` waits for all sends."""

    def __init__(self) -> None:
        self._flying: list[tuple[Any, Tensor, int]] = []

    def send(self, x: Tensor, peer: int, number: int) -> None:
        """Sends a copy of `x`, so that the program may write over it."""
        x = x.clone(memory_format=torch.contiguous_format)
        self._flying.append((dist.isend(x, peer, tag=number), x, peer))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: str, peer: int, number: int) -> Tensor:
        """Waits for the message `number` of a rank; raises `CollectiveError` if it does not arrive."""
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        _wait(dist.irecv(out, peer, tag=number), f"no message came from rank {peer}")
        return out

    def finish(self) -> None:
        """Waits until all messages are sent."""
        flying, self._flying = self._flying, []
        for work, _, peer in flying:
            _wait(work, f"rank {peer} took no message")


def broadcast(x: Tensor, source: int, group: GroupHandle) -> None:
    """Fills `x` on all members with that of the rank `source`."""
    try:
        dist.broadcast(x, source, group=group.pg)
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


def _wait(work: Any, fault: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveError(f"{fault}: {error}") from error
