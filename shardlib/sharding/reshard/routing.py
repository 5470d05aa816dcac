"""Plans the route of a value between layouts: fuses factors, plans the steps, and splits the factors again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardlib.sharding.chunks import is_even
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.reshard.direct import DirectPlanner
from shardlib.sharding.reshard.exchange import merge_exchanges
from shardlib.sharding.reshard.prices import DEFAULT_PRICES, Prices
from shardlib.sharding.reshard.refactor_exchange import plan_refactor_exchanges
from shardlib.sharding.reshard.search import find_cheapest
from shardlib.sharding.reshard.step import Axes, FactorAxes, FactorSizes, Step
from shardlib.sharding.split_axes import split_axes


@lru_cache(maxsize=1 << 14)
def plan_steps(
    sizes: tuple[int, ...],
    itemsize: int,
    src: FactorAxes,
    dst: FactorAxes,
    pending: Axes = (),
    reduce: str = "sum",
    into: tuple[int, ...] | None = None,
    parts: FactorSizes | None = None,
    prices: Prices = DEFAULT_PRICES,
) -> tuple[Step, ...]:
    """Plans the steps from `src`, with a partial sum over `pending`, to `dst` without one.

    `into` are the sizes at the end, if shard sizes change. `parts` are the sizes of the factors that were fused into
    each factor; every step must shard these too.
    """
    into, parts = into or sizes, parts or tuple((n,) for n in sizes)
    if src == dst and not pending and sizes == into:
        return ()
    direct = DirectPlanner(sizes, itemsize, src, dst, pending, reduce, into, parts).run()
    if sizes != into or not any(step.bytes for step in direct[:-1]):
        return direct  # nothing sends less than one collective after free steps
    cheapest = find_cheapest(parts, itemsize, src, dst, pending, reduce, direct, prices)
    plans = [merge_exchanges(steps, sizes) for steps in (cheapest, direct)]
    return min(plans, key=lambda steps: (estimate_seconds(steps, prices), len(steps)))


@dataclass(frozen=True)
class RouteStep:
    """A step of a route: its fused factors, and the sharding of the value's own factors after it."""

    step: Step
    dims: tuple[tuple[tuple[int, Axes], ...], ...]  # per dim, (size, axes) per fused factor, before the step
    after: FactorAxes
    sizes: tuple[int, ...]  # of the value's own factors, after it


@lru_cache(maxsize=1 << 14)
def plan_route(
    leaves: FactorSizes,
    itemsize: int,
    src: FactorAxes,
    dst: FactorAxes,
    pending: Axes = (),
    reduce: str = "sum",
    into: FactorSizes | None = None,
    prices: Prices = DEFAULT_PRICES,
) -> tuple[RouteStep, ...]:
    """Plans the reshard of a value whose dims are lists of factors, `leaves`.

    Neighboring factors that both `src` and `dst` treat as one are resharded as one.
    """
    into = into or leaves
    flat = [size for dim in leaves for size in dim]
    ends = [size for dim in into for size in dim]
    groups = _group_factors(leaves, ends, src, dst)
    flat_groups = [group for dim in groups for group in dim]

    def fuse_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[g[0]] if len(g) == 1 else math.prod(sizes[i] for i in g) for g in flat_groups)

    def fuse(cut: FactorAxes) -> FactorAxes:
        return tuple(tuple(a for i in group for a in cut[i]) for group in flat_groups)

    def split(cut: FactorAxes) -> FactorAxes:
        out: list[Axes] = []
        for group, axes in zip(flat_groups, cut, strict=True):
            shares = split_axes([flat[i] for i in group], [a.size for a in axes])
            assert shares is not None
            out += [tuple(axes[i] for i in share) for share in shares]
        return tuple(out)

    steps = []
    parts = tuple(tuple(flat[i] for i in group) for group in flat_groups)
    now, sizes = fuse(src), fuse_sizes(flat)
    for step in plan_steps(sizes, itemsize, now, fuse(dst), pending, reduce, fuse_sizes(ends), parts, prices):
        feed = iter(zip(sizes, now, strict=True))
        before = tuple(tuple(next(feed) for _ in dim) for dim in groups)
        after = [*flat]
        for group, size in zip(flat_groups, step.sizes, strict=True):
            if len(group) == 1:
                after[group[0]] = size
        steps.append(RouteStep(step, before, split(step.result), tuple(after)))
        now, sizes = step.result, step.sizes
    if pending or into != leaves or not any(step.step.bytes for step in steps):
        return tuple(steps)
    crossed = _plan_crossings(leaves, itemsize, src, dst)
    return crossed if crossed and estimate_seconds(crossed, prices) < estimate_seconds(steps, prices) else tuple(steps)


def _plan_crossings(leaves: FactorSizes, itemsize: int, src: FactorAxes, dst: FactorAxes) -> tuple[RouteStep, ...]:
    """Plans refactor exchanges for axes that move between factors of one dim; () if anything else changes."""
    runs, at = [], 0
    for dim in leaves:
        runs.append((src[at : at + len(dim)], dst[at : at + len(dim)]))
        at += len(dim)
    if any(a != b and not (any(a) and any(b)) for a, b in runs):
        return ()
    near = tuple(axes for a, b in runs for axes in (a if a == b else ((),) * len(a)))
    planned = plan_refactor_exchanges(leaves, itemsize, near, src, leaves, dst)
    if planned is None or planned[0] != src or len(planned[1]) < sum(a != b for a, b in runs):
        return ()
    flat, steps = tuple(n for dim in leaves for n in dim), []
    now = [a for a, _ in runs]
    for x in planned[1]:
        dims = tuple(tuple(zip(dim, cut, strict=True)) for dim, cut in zip(leaves, now, strict=True))
        now[x.dim] = runs[x.dim][1]
        after = tuple(axes for cut in now for axes in cut)
        steps.append(RouteStep(Step("all_to_all", x.axes, -1, -1, after, flat, x.bytes, crossing=x), dims, after, flat))
    return tuple(steps)


def _group_factors(leaves: FactorSizes, into: Sequence[int], src: FactorAxes, dst: FactorAxes) -> list[list[list[int]]]:
    """Groups the factors of each dim, by index; a minor factor joins a group if chunks of both are chunks of each."""
    flat = [size for dim in leaves for size in dim]

    def joins(group: list[int], i: int) -> bool:
        whole = all(_used_up(flat, group, cut) or not cut[i] for cut in (src, dst))
        return whole and all(
            is_even(flat[j], cut[j]) and is_even(into[j], cut[j]) for cut in (src, dst) for j in (*group, i)
        )

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


def _used_up(sizes: Sequence[int], group: list[int], cut: FactorAxes) -> bool:
    """Returns whether every device has one element of the group."""
    return all(group_size(cut[i]) == sizes[i] for i in group)


def estimate_seconds(steps: Iterable[Step | RouteStep], prices: Prices = DEFAULT_PRICES) -> float:
    """Estimates the time of steps."""
    return sum((s.step if isinstance(s, RouteStep) else s).seconds(prices) for s in steps)
