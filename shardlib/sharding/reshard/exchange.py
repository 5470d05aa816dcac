"""Merges neighboring exchanges of a route into one all-to-all over all their axes."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from shardlib.sharding.chunks import is_even
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.reshard.step import Exchange, Step


def merge_exchanges(steps: tuple[Step, ...], sizes: tuple[int, ...]) -> tuple[Step, ...]:
    """Merges consecutive exchanges, so that every element is sent once.

    `sizes` are those of the factors before the first step. Separate exchanges over n and m devices send
    (n-1)/n + (m-1)/m of a shard; a merged one sends (nm-1)/nm.

    Example:
        >>> n, m = Axis("n", 4), Axis("m", 2)
        >>> one = Step("all_to_all", (n,), 1, 0, ((n,), (), (m,)), (8, 16, 16), 96.0)
        >>> two = Step("all_to_all", (m,), 2, 0, ((n, m), (), ()), (8, 16, 16), 64.0)
        >>> [(both.axes, both.bytes) for both in merge_exchanges((one, two), (8, 16, 16))] == [((n, m), 112.0)]
        True
    """
    merged: list[Step] = []
    for exchanges, run in groupby(steps, lambda step: _is_exchange(step, sizes)):
        if not exchanges:
            merged += run
            continue
        first, *others = run
        merged.append(first)
        for step in others:
            both = _merge(merged[-1], step)
            merged[-1:] = [merged[-1], step] if both is None else [both]
    return tuple(merged)


def _is_exchange(step: Step, sizes: tuple[int, ...]) -> bool:
    """Returns whether a step moves axes from one factor to another, in shards of one size."""
    if step.kind != "all_to_all" or step.factor == step.to or step.sizes != sizes:
        return False
    before = {step.factor: (*step.result[step.factor], *step.axes)}  # with the minor axes that left
    shardings = ((n, axes) for i, n in enumerate(sizes) for axes in (step.result[i], before.get(i, ())))
    return all(type(n) is int and is_even(n, axes) for n, axes in shardings)


def _merge(a: Step, b: Step) -> Step | None:
    """Merges two exchanges; None if the second moves axes that the first has moved."""
    exchanges = (*(a.exchanges or (_exchange(a),)), _exchange(b))
    moved = [p for axes, _, _ in exchanges for axis in axes for p in axis.primes()]
    if len(set(moved)) < len(moved) or {e.factor for e in exchanges} & {e.to for e in exchanges}:
        return None
    n, axes = group_size(a.axes), Axis.merge((*a.axes, *b.axes))
    local = a.bytes * n / (n - 1)
    nbytes = local - local / group_size(axes)
    return replace(b, axes=axes, factor=a.factor, to=a.to, bytes=nbytes, exchanges=exchanges)


def _exchange(step: Step) -> Exchange:
    return Exchange(step.axes, step.factor, step.to)
