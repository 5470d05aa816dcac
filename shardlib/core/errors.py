"""The exception that shardlib raises, and the one way in which it is written; and what its collectives raise.

A message says what was asked, lists every offender as a bullet (tensor, shape, spec, both sizes), then the rule that
was broken and the remedy, so that one run shows all that there is to mend.

Tracebacks show these classes, and those of warnings, as `shardlib.NAME`: the file that defines one may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)
PUBLIC: dict[str, type[Exception]] = {}  # by name, as `shardlib` has them


def public(kind: type[E]) -> type[E]:
    """Shows a class of errors or warnings as `shardlib.NAME`, where pickles and filters of warnings find it, too."""
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
        self, what: str, offenders: Sequence[str] = (), *, rule: str | None = None, remedy: str | None = None
    ) -> None:
        self.what, self.offenders, self.rule, self.remedy = what, tuple(offenders), rule, remedy
        lines = [what + (":" if offenders else "")]
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
    """A function cannot be a program, though its ops can run one by one; all is as it was before."""


class ValueNeededError(NoProgramError):
    """Its Python, or a shape, depends on what a tensor holds."""


class EffectError(ShardingError):
    """A function does more than to return values that its arguments determine."""


class KeptError(NoProgramError):
    """It keeps tensors that it computes; what it kept is removed before."""


class NoStorageError(ShardingError, NotImplementedError):
    """A tensor in pieces is asked for its memory; torch's word for tensors that have none, which libraries expect."""


class NoDerivativeError(ShardingError):
    """A gradient flows through what has none."""


class TraceAnewError(Exception):
    """Something has to be put right outside, and then the function is traced anew: no fault of what it does."""


class WrittenError(ShardingError, RuntimeError):
    """What a backward pass reads was written to since the forward pass; torch's kind of error for it."""


@public
class CollectiveError(RuntimeError):
    """A collective that could not be finished: a peer is gone, or did not come in time.

    `culprit` is its rank, where it is known. `is_late` is False where nobody was waited for in vain.
    """

    culprit: int | None = None
    is_late: bool = True
