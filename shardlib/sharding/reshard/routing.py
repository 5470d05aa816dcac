"""The route of a value from one layout to another: a plan on its factors, told in the leaves of its dims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardlib.sharding.chunks import even
from shardlib.sharding.mesh.axis import ways
from shardlib.sharding.reshard.direct import Direct
from shardlib.sharding.reshard.exchange import together
from shardlib.sharding.reshard.prices import USUAL, Prices
from shardlib.sharding.reshard.refactor_exchange import crossings
from shardlib.sharding.reshard.search import cheapest
from shardlib.sharding.reshard.step import Axes, Cut, Leaves, Step
from shardlib.sharding.split_axes import spread


def plan(
    sizes: tuple[int, ...],
    itemsize: int,
    src: Cut,
    dst: Cut,
    pending: Axes = (),
    reduce: str = "sum",
    into: tuple[int, ...] | None = None,
    parts: Leaves | None = None,
    prices: Prices = USUAL,
) -> tuple[Step, ...]:
    """The steps from cut `src`, with a reduction pending over `pending`, to cut `dst` with nothing pending.

    `into` are the sizes at the end, where their pieces are others; `parts` the leaves that each factor is made of,
    which every cut on the way must be a cut of.
    """
    parts = parts or tuple((n,) for n in sizes)
    return _plan(sizes, itemsize, src, dst, pending, reduce, into or sizes, parts, prices)


@lru_cache(maxsize=1 << 14)
def _plan(
    sizes: tuple[int, ...],
    itemsize: int,
    src: Cut,
    dst: Cut,
    pending: Axes,
    reduce: str,
    into: tuple[int, ...],
    parts: Leaves,
    prices: Prices,
) -> tuple[Step, ...]:
    if src == dst and not pending and sizes == into:
        return ()
    steps = Direct(sizes, itemsize, src, dst, pending, reduce, into, parts).run()
    if sizes != into or not any(step.bytes for step in steps[:-1]):
        return steps  # one collective, after all that is free: nothing sends less
    return min(
        (together(way, sizes) for way in (cheapest(parts, itemsize, src, dst, pending, reduce, steps, prices), steps)),
        key=lambda way: (seconds(way, prices), len(way)),
    )


@dataclass(frozen=True)
class Hop:
    """A step of a route: the factors that it works on, and the cut of the value's leaves after it."""

    step: Step
    dims: tuple[tuple[tuple[int, Axes], ...], ...]  # per dim, (size, axes) per fused factor, before the step
    after: Cut
    sizes: tuple[int, ...]  # of the leaves, after it


def route(
    leaves: Leaves,
    itemsize: int,
    src: Cut,
    dst: Cut,
    pending: Axes = (),
    reduce: str = "sum",
    into: Leaves | None = None,
    prices: Prices = USUAL,
) -> tuple[Hop, ...]:
    """`plan` for a value whose dims are lists of `leaves`: neighbors that both cuts treat as one are moved as one."""
    return _route(leaves, itemsize, src, dst, pending, reduce, into or leaves, prices)


@lru_cache(maxsize=1 << 14)
def _route(
    leaves: Leaves, itemsize: int, src: Cut, dst: Cut, pending: Axes, reduce: str, into: Leaves, prices: Prices
) -> tuple[Hop, ...]:
    flat = [size for dim in leaves for size in dim]
    ends = [size for dim in into for size in dim]
    groups = _fused(leaves, ends, src, dst)
    flat_groups = [group for dim in groups for group in dim]

    def fuse_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[g[0]] if len(g) == 1 else math.prod(sizes[i] for i in g) for g in flat_groups)

    def fuse(cut: Cut) -> Cut:
        return tuple(tuple(a for i in group for a in cut[i]) for group in flat_groups)

    def split(cut: Cut) -> Cut:
        out: list[Axes] = []
        for group, axes in zip(flat_groups, cut, strict=True):
            shares = spread([flat[i] for i in group], [a.size for a in axes])
            assert shares is not None
            out += [tuple(axes[i] for i in share) for share in shares]
        return tuple(out)

    hops = []
    parts = tuple(tuple(flat[i] for i in group) for group in flat_groups)
    now, sizes = fuse(src), fuse_sizes(flat)
    for step in plan(sizes, itemsize, now, fuse(dst), pending, reduce, fuse_sizes(ends), parts, prices):
        feed = iter(zip(sizes, now, strict=True))
        before = tuple(tuple(next(feed) for _ in dim) for dim in groups)
        after = [*flat]
        for group, size in zip(flat_groups, step.sizes, strict=True):
            if len(group) == 1:
                after[group[0]] = size
        hops.append(Hop(step, before, split(step.result), tuple(after)))
        now, sizes = step.result, step.sizes
    if pending or into != leaves or not any(hop.step.bytes for hop in hops):
        return tuple(hops)
    crossed = _crossed(leaves, itemsize, src, dst)
    return crossed if crossed and seconds(crossed, prices) < seconds(hops, prices) else tuple(hops)


def _crossed(leaves: Leaves, itemsize: int, src: Cut, dst: Cut) -> tuple[Hop, ...]:
    """Axes that go from leaf to leaf of one dim: devices send what overlaps. Empty where more than that changes."""
    runs, at = [], 0
    for dim in leaves:
        runs.append((src[at : at + len(dim)], dst[at : at + len(dim)]))
        at += len(dim)
    if any(a != b and not (any(a) and any(b)) for a, b in runs):
        return ()
    near = tuple(axes for a, b in runs for axes in (a if a == b else ((),) * len(a)))
    found = crossings(leaves, itemsize, near, src, leaves, dst)
    if found is None or found[0] != src or len(found[1]) < sum(a != b for a, b in runs):
        return ()
    flat, hops = tuple(n for dim in leaves for n in dim), []
    now = [a for a, _ in runs]
    for x in found[1]:
        dims = tuple(tuple(zip(dim, cut, strict=True)) for dim, cut in zip(leaves, now, strict=True))
        now[x.dim] = runs[x.dim][1]
        after = tuple(axes for cut in now for axes in cut)
        hops.append(Hop(Step("all_to_all", x.axes, -1, -1, after, flat, x.bytes, crossing=x), dims, after, flat))
    return tuple(hops)


def _fused(leaves: Leaves, into: Sequence[int], src: Cut, dst: Cut) -> list[list[list[int]]]:
    """Per dim, groups of leaves, by their index; a minor leaf joins when chunks stay chunks."""
    flat = [size for dim in leaves for size in dim]

    def joins(group: list[int], i: int) -> bool:
        whole = all(_used_up(flat, group, cut) or not cut[i] for cut in (src, dst))
        return whole and all(even(flat[j], cut[j]) and even(into[j], cut[j]) for cut in (src, dst) for j in (*group, i))

    out, i = [], 0
    for dim in leaves:
        groups: list[list[int]] = []
        for _ in dim:
            if groups and joins(groups[-1], i):
                groups[-1].append(i)
            else:
                groups.append([i])
            i += 1
        out.append(groups)
    return out


def _used_up(sizes: Sequence[int], group: list[int], cut: Cut) -> bool:
    """Whether the cut leaves one element a device."""
    return all(ways(cut[i]) == sizes[i] for i in group)


def seconds(steps: Iterable[Step | Hop], prices: Prices = USUAL) -> float:
    """Estimated time of a plan or route."""
    return sum((s.step if isinstance(s, Hop) else s).seconds(prices) for s in steps)
