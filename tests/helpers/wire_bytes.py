"""Counts the bytes that collectives over torch send from this rank to other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class WireBytes(TorchDispatchMode):
    """Inside the context, adds up `sent`; `machine` maps a rank to its machine.

    Counts by what each op must do: an all-to-all sends each part to its receiver; a ring passes to its neighbor.
    """

    only_observes = True  # to shardlib

    def __init__(self, machine: Callable[[int], object]) -> None:
        super().__init__()
        self.machine, self.sent = machine, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional":
            self.sent += self._count(func.__name__.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Sequence[Any]) -> int:
        if op == "wait_tensor":
            return 0
        ranks = dist.get_process_group_ranks(_resolve_process_group(args[-1]))
        me, x, n = dist.get_rank(), args[0], len(ranks)
        is_far = [self.machine(rank) != self.machine(me) for rank in ranks]
        if op == "all_to_all_single":
            return sum(count for count, far in zip(args[2], is_far, strict=True) if far) * x.itemsize
        steps = {"all_gather_into_tensor": n - 1, "all_reduce": 2 * (n - 1) / n, "all_reduce_": 2 * (n - 1) / n}[op]
        return round(steps * x.nbytes) * is_far[(ranks.index(me) + 1) % n]


def count_sent(call: Callable[[], torch.Tensor], machine: Callable[[int], object]) -> tuple[torch.Tensor, int]:
    """Runs a collective; returns its result and the bytes that this rank has sent to other machines."""
    with WireBytes(machine) as wire:
        out = call()
    return out, wire.sent
