"""The choice of an op's backend, its reason, and the environment variable `SHARDLIB_OPS`, which overrides it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from shardlib.core.errors import ShardingError

# Every op that has a choice, and its backends. "math" is attention in plain torch ops.
BACKENDS: dict[str, tuple[str, ...]] = {
    "attention": ("torch", "math", "cuda"),
    "all_gather": ("torch", "shm", "cuda"),
    "reduce_scatter": ("torch", "shm", "cuda"),
    "all_reduce": ("torch", "shm", "cuda"),
    "all_to_all": ("torch", "shm", "cuda"),
    "ppermute": ("torch", "shm"),
    "send": ("torch", "shm"),  # messages between stages
    "random": ("torch", "host"),
    "matmul": ("torch", "onednn"),  # of large float32 matrices on CPUs
    # A plan's way to compute attention over a sharded sequence: keys sent round a ring (in order, or balanced), heads
    # sharded instead, or keys gathered.
    "sequence": ("ring", "zigzag", "heads", "gather"),
}

_RULE = 'SHARDLIB_OPS is "torch", which means every op, or entries op=backend with commas between them'


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, its way of running the case at hand (may be empty), and the reason for both.

    Example:
        >>> print(Choice("torch", "exchange", "unequal pieces"))
        torch/exchange: unequal pieces
        >>> print(Choice("shm", "", "all ranks are on this machine"))
        shm: all ranks are on this machine
    """

    backend: str
    way: str
    reason: str

    @property
    def name(self) -> str:
        """Backend and way."""
        return f"{self.backend}/{self.way}" if self.way else self.backend

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def requested_backend(op: str) -> str | None:
    """Returns the backend that the environment variable `SHARDLIB_OPS` asks for, or None.

    Reads the variable at every call. Raises `ShardingError` if its text is malformed.
    """
    return _parse(os.environ.get("SHARDLIB_OPS", "")).get(op)


def unavailable_error(op: str, backend: str, reason: str) -> ShardingError:
    """Makes the error for a backend that `SHARDLIB_OPS` asks for and that cannot run here."""
    return ShardingError(
        f"SHARDLIB_OPS asks for {op}={backend}, which cannot run here",
        [reason],
        rule="a backend that is asked for by name is never replaced by another one",
        remedy=f"mend that, or take {op}={backend} out of SHARDLIB_OPS",
    )


@functools.cache
def _parse(text: str) -> dict[str, str]:
    if text.strip() == "torch":
        return {op: "torch" for op, backends in BACKENDS.items() if "torch" in backends}
    requests: dict[str, str] = {}
    wrong = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        op, sign, backend = (part.strip() for part in entry.partition("="))
        if not sign:
            wrong.append(f"{entry!r} names no op and backend")
        elif op not in BACKENDS:
            wrong.append(f"{entry!r}: there is no op {op!r}; the ops are {', '.join(BACKENDS)}")
        elif backend not in BACKENDS[op]:
            wrong.append(f"{entry!r}: {op} has no backend {backend!r}; it has {', '.join(BACKENDS[op])}")
        elif requests.setdefault(op, backend) != backend:
            wrong.append(f"{entry!r}: {op} is to be {requests[op]} already")
    if wrong:
        raise ShardingError(
            f"cannot read SHARDLIB_OPS={text!r}",
            wrong,
            rule=_RULE,
            remedy='for instance "all_gather=shm,attention=math"',
        )
    return requests
