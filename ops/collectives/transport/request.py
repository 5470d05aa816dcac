"""Describes a message to a collective, which chooses how to send it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.sharding.mesh.machine import Span

NCCL = ("nccl", "cuda")  # transports of GPUs


@dataclass(frozen=True)
class CollectiveRequest:
    """A message for which a collective chooses a backend and a form.

    * `nbytes`: bytes of the op's whole tensor.
    * `even`: all shards have one size.
    * `kind`: "sum", "max" or "min"; empty if nothing is reduced.
    * `transport`: "shm", "gloo", "nccl", "cuda" (NCCL, and GPUs that reach each other's memory), "virtual" (all members
      in one process), "none" (one member) or "open" (the ranks do not know yet if they share memory).
    * `members`: their number.
    * `shm_fault`: the reason why there is no shared memory.
    * `span`: how the members spread over machines, by the machine model; None if no form is chosen by it.
    """

    nbytes: int
    even: bool
    dtype: torch.dtype
    kind: str
    transport: str
    members: int
    shm_fault: str = ""
    span: Span | None = None
