"""Exchanges of several factors at once: neighbors in a route that an all-to-all over all their axes does in one."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from shardlib.sharding.chunks import even
from shardlib.sharding.mesh.axis import Axis, ways
from shardlib.sharding.reshard.step import Exchange, Step


def together(steps: tuple[Step, ...], sizes: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps, with exchanges that follow each other as one: what a device sends goes straight to its end.

    `sizes` are those of the factors before the first step. One after the other over n and m devices, exchanges send
    (n-1)/n + (m-1)/m of what a device holds; as one, (nm-1)/nm.

    Example:
        >>> n, m = Axis("n", 4), Axis("m", 2)
        >>> one = Step("all_to_all", (n,), 1, 0, ((n,), (), (m,)), (8, 16, 16), 96.0)
        >>> two = Step("all_to_all", (m,), 2, 0, ((n, m), (), ()), (8, 16, 16), 64.0)
        >>> [(both.axes, both.bytes) for both in together((one, two), (8, 16, 16))] == [((n, m), 112.0)]
        True
    """
    found: list[Step] = []
    for exchanges, run in groupby(steps, lambda step: _is_exchange(step, sizes)):
        if not exchanges:
            found += run
            continue
        first, *others = run
        found.append(first)
        for step in others:
            both = _both(found[-1], step)
            found[-1:] = [found[-1], step] if both is None else [both]
    return tuple(found)


def _is_exchange(step: Step, sizes: tuple[int, ...]) -> bool:
    """Whether it takes axes from one factor to another, in pieces of one size."""
    if step.kind != "all_to_all" or step.factor == step.to or step.sizes != sizes:
        return False
    before = {step.factor: (*step.result[step.factor], *step.axes)}  # its minor axes left
    cuts = ((n, of) for i, n in enumerate(sizes) for of in (step.result[i], before.get(i, ())))
    return all(type(n) is int and even(n, axes) for n, axes in cuts)


def _both(a: Step, b: Step) -> Step | None:
    """Two exchanges as one; None where the second goes on with what the first has brought."""
    exchanges = (*(a.exchanges or (_exchange(a),)), _exchange(b))
    moved = [p for of, _, _ in exchanges for axis in of for p in axis.primes()]
    if len(set(moved)) < len(moved) or {e.factor for e in exchanges} & {e.to for e in exchanges}:
        return None
    n, axes = ways(a.axes), Axis.merge((*a.axes, *b.axes))
    local = a.bytes * n / (n - 1)
    nbytes = local - local / ways(axes)
    return replace(b, axes=axes, factor=a.factor, to=a.to, bytes=nbytes, exchanges=exchanges)


def _exchange(step: Step) -> Exchange:
    return Exchange(step.axes, step.factor, step.to)
