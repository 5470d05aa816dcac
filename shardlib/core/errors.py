"""The exceptions that shardlib and its collectives raise, all formatted alike.

A message states the request, lists every offender as a bullet (tensor, shape, spec, both sizes), then the broken rule
and the remedy, so that one run shows everything to fix.

Tracebacks show these classes, and those of warnings, as `shardlib.NAME`, whatever file defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)
PUBLIC: dict[str, type[Exception]] = {}  # by name, as `shardlib` has them


def public(kind: type[E]) -> type[E]:
    """Moves a class of errors or warnings to `shardlib.NAME`, also for pickles and filters of warnings."""
    kind.__module__ = "shardlib"
    PUBLIC[kind.__name__] = kind
    return kind


@public
class ShardingError(ValueError):
    """A program, spec or mesh that shardlib refuses, before anything runs.

    Example:
        >>> print(ShardingError("shard(w) cannot be laid out", ["w has 2 dims, the spec 3"], rule="one name a dim"))
        shard(w) cannot be laid out:
          * w has 2 dims, the spec 3
        Rule: one name a dim
    """

    def __init__(
        self, summary: str, offenders: Sequence[str] = (), *, rule: str | None = None, remedy: str | None = None
    ) -> None:
        self.what, self.offenders, self.rule, self.remedy = summary, tuple(offenders), rule, remedy
        lines = [summary + (":" if offenders else "")]
        lines += [f"  * {offender}" for offender in offenders]
        if rule:
            lines.append(f"Rule: {rule}")
        if remedy:
            lines.append(f"Remedy: {remedy}")
        super().__init__("\n".join(lines))

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.__module__.partition(".")[0] == "shardlib":
            public(cls)


class NoProgramError(ShardingError):
    """A function cannot be compiled, but its ops can run one by one; its side effects were undone."""


class ValueNeededError(NoProgramError):
    """Control flow or a shape depends on the values of a tensor."""


class EffectError(ShardingError):
    """A function has side effects, or returns values that its arguments do not determine."""


class SideEffectError(NoProgramError):
    """A function changes objects in a way that no call can repeat, or keeps traced tensors; the trace is undone."""


class NoStorageError(ShardingError, NotImplementedError):
    """A sharded tensor is asked for its memory; torch raises NotImplementedError for tensors without."""


class NoDerivativeError(ShardingError):
    """A gradient flows through an op without a derivative."""


class TraceAnewError(Exception):
    """The trace must start again after a change outside of it; no fault of the function."""


class WrittenError(ShardingError, RuntimeError):
    """A tensor that a backward pass reads was written after the forward pass; RuntimeError, as in torch."""


@public
class CollectiveError(RuntimeError):
    """A collective did not finish: a peer is gone, or did not arrive in time.

    `culprit` is the rank of the peer, if known. `is_late` is False if no peer was late.
    """

    culprit: int | None = None
    is_late: bool = True
