"""Reads JAX's `PartitionSpec` without importing JAX: a class of that name with one entry per dim."""

from __future__ import annotations

from typing import Any

from shardlib.core.errors import ShardingError

Entry = str | tuple[str, ...] | None


def is_partition_spec(x: Any) -> bool:
    """Returns whether `x` is a `jax.sharding.PartitionSpec`, which later versions of JAX call `jax.P`."""
    return any(
        cls.__name__ == "PartitionSpec" or (cls.__name__ == "P" and cls.__module__.partition(".")[0] == "jax")
        for cls in type(x).__mro__
    )


def list_entries(x: Any) -> tuple[list[Entry], list[bool]]:
    """Returns the entries of a PartitionSpec, and for each whether it is UNCONSTRAINED: open to the compiler.

    Raises `ShardingError` for `unreduced` and `reduced` axes: partial sums are inferred.
    """
    sums = [f"{kind}={set(axes)}" for kind in ("unreduced", "reduced") if (axes := getattr(x, kind, ()))]
    if sums:
        raise ShardingError(
            f"{x!r} is not a spec of shardlib, because of {' and '.join(sums)}",
            rule="a spec says how dims are sharded; the compiler infers partial sums, and adds them when needed",
            remedy="leave these axes out",
        )
    free = [not (part is None or isinstance(part, str | tuple)) for part in x]
    return [None if is_open else part for part, is_open in zip(x, free, strict=True)], free
