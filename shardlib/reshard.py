"""From one layout to another: the collectives, their bytes and their estimated time.

A *cut* of a value is a tuple with one entry per factor: the mesh axes over it, major first, in prime parts. Steps are
taken in the order that moves the fewest bytes: slice what is free, scatter pending sums, exchange, reduce, gather last.

Wire bytes are what one device sends under ring algorithms: all-gather out*(n-1)/n, reduce-scatter out*(n-1), all-reduce
2*out*(n-1)/n, all-to-all out*(n-1)/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from shardlib.layout import Axis
from shardlib.spread import spread

Axes = tuple[Axis, ...]
Cut = tuple[Axes, ...]

# Round figures of one node of current GPUs; they rank choices and are printed with them, they are not promises.
LINK_BYTES_PER_SECOND = 300e9
COLLECTIVE_LATENCY = 3e-8  # small collectives travel together, so each costs little more than its bytes
FLOPS_PER_SECOND = 400e12  # matmuls in 16 bits
WIDE_FLOPS_PER_SECOND = 50e12  # and in 32 or more
MEMORY_BYTES_PER_SECOND = 2e12


@dataclass(frozen=True)
class Step:
    """One collective (or free local slice): `kind` over `axes`, on factor `factor` (and `to`, for all_to_all)."""

    kind: str  # slice, reduce_scatter, all_to_all, all_reduce, all_gather
    axes: Axes
    factor: int
    to: int
    result: Cut
    bytes: float  # on the wire, per device
    reduce: str = "sum"

    @property
    def seconds(self) -> float:
        return 0.0 if self.kind == "slice" else COLLECTIVE_LATENCY + self.bytes / LINK_BYTES_PER_SECOND


def ways(axes: Axes) -> int:
    return math.prod(a.size for a in axes)


def local_numel(sizes: tuple[int, ...], cut: Cut) -> int:
    """Elements on the fullest device."""
    n = 1
    for size, axes in zip(sizes, cut, strict=True):
        for a in Axis.merge(axes):
            size = -(-size // a.size)
        n *= size
    return n


@cache
def plan(
    sizes: tuple[int, ...], itemsize: int, src: Cut, dst: Cut, pending: Axes = (), reduce: str = "sum"
) -> tuple[Step, ...]:
    """The steps from cut `src`, with a reduction pending over `pending`, to cut `dst` with nothing pending."""
    if src == dst and not pending:
        return ()
    steps: list[Step] = []
    cut = [list(a) for a in src]
    pend = list(pending)

    def frozen() -> Cut:
        return tuple(tuple(a) for a in cut)

    def numel() -> int:
        return local_numel(sizes, frozen())

    def extra(i: int) -> list[Axis]:
        """What must leave factor i: all after the prefix that it shares with the target."""
        keep = _prefix(cut[i], dst[i], sizes[i])
        return cut[i][keep:]

    def missing(i: int) -> list[Axis]:
        keep = _prefix(cut[i], dst[i], sizes[i])
        return list(dst[i][keep:])

    def emit(kind: str, axes: list[Axis], factor: int, to: int, nbytes: float) -> None:
        steps.append(Step(kind, Axis.merge(axes), factor, to, frozen(), nbytes, reduce))

    def used() -> set[Axis]:
        return {a for axes in cut for a in axes} | set(pend)

    def slices() -> None:
        """Cut locally whatever no collective is needed for."""
        for i in range(len(cut)):
            if not extra(i):
                new = []
                for a in missing(i):
                    if a in used() or any(a in extra(j) for j in range(len(cut))):
                        break
                    new.append(a)
                new = _whole_if_uneven(new, missing(i), sizes[i], cut[i])
                if new:
                    cut[i].extend(new)
                    emit("slice", new, i, i, 0.0)

    slices()
    for i in range(len(cut)):  # scatter sums onto the factors that want them
        if pend and not extra(i):
            new = []
            for a in missing(i):
                if a not in pend:
                    break
                new.append(a)
            new = _whole_if_uneven(new, missing(i), sizes[i], cut[i])
            if new:
                n = ways(tuple(new))
                cut[i].extend(new)
                for a in new:
                    pend.remove(a)
                emit("reduce_scatter", new, i, i, itemsize * numel() * (n - 1))
                slices()
    for i in range(len(cut)):  # exchange factor i's minor axes for factor j's
        if moving := extra(i):
            for j in range(len(cut)):
                if j != i and not extra(j) and moving and missing(j)[: len(moving)] == moving:
                    if not (_even(sizes[i], cut[i]) and _even(sizes[j], cut[j] + moving)):
                        continue
                    n = ways(tuple(moving))
                    del cut[i][-len(moving) :]
                    cut[j].extend(moving)
                    emit("all_to_all", moving, i, j, itemsize * numel() * (n - 1) / n)
                    moving = []
                    slices()
    if pend:
        n = ways(tuple(pend))
        axes, pend = pend, []
        emit("all_reduce", axes, -1, -1, 2 * itemsize * numel() * (n - 1) / n)
        slices()
    gathers = sorted((i for i in range(len(cut)) if extra(i)), key=lambda i: ways(tuple(extra(i))))
    for i in gathers:
        axes = extra(i)
        n = ways(tuple(axes))
        del cut[i][len(cut[i]) - len(axes) :]
        emit("all_gather", axes, i, i, itemsize * numel() * (n - 1) / n)
        slices()
    slices()
    assert frozen() == dst, f"reshard from {src} to {dst} stopped at {frozen()}"
    return tuple(steps)


@dataclass(frozen=True)
class Hop:
    """A step of a route: the factors that it works on, and the cut of the value's leaves after it."""

    step: Step
    dims: tuple[tuple[tuple[int, Axes], ...], ...]  # per dim, (size, axes) per fused factor, before the step
    after: Cut


@cache
def route(
    leaves: tuple[tuple[int, ...], ...], itemsize: int, src: Cut, dst: Cut, pending: Axes = (), reduce: str = "sum"
) -> tuple[Hop, ...]:
    """`plan` for a value whose dims are lists of `leaves`: neighbours that both cuts treat as one are moved as one."""
    groups = _fused(leaves, src, dst)
    sizes = tuple(math.prod(size for size, _ in group) for dim in groups for group in dim)

    def fuse(cut: Cut) -> Cut:
        return tuple(tuple(a for _, i in group for a in cut[i]) for dim in groups for group in dim)

    def split(cut: Cut) -> Cut:
        out: list[Axes] = []
        for group, axes in zip((g for dim in groups for g in dim), cut, strict=True):
            shares = spread([size for size, _ in group], [a.size for a in axes])
            assert shares is not None
            out += [tuple(axes[i] for i in share) for share in shares]
        return tuple(out)

    hops = []
    now = fuse(src)
    for step in plan(sizes, itemsize, now, fuse(dst), pending, reduce):
        flat = iter(zip(sizes, now, strict=True))
        hops.append(Hop(step, tuple(tuple(next(flat) for _ in dim) for dim in groups), split(step.result)))
        now = step.result
    return tuple(hops)


def _fused(leaves: tuple[tuple[int, ...], ...], src: Cut, dst: Cut) -> list[list[list[tuple[int, int]]]]:
    """Per dim, groups of `(size, flat index)` leaves; a minor leaf joins when chunks stay chunks."""
    out, i = [], 0
    for dim in leaves:
        groups: list[list[tuple[int, int]]] = []
        for size in dim:
            if (
                groups
                and all(_chunks(groups[-1], cut) or not cut[i] for cut in (src, dst))
                and _same_even([*groups[-1], (size, i)], src, dst)
            ):
                groups[-1].append((size, i))
            else:
                groups.append([(size, i)])
            i += 1
        out.append(groups)
    return out


def _chunks(group: list[tuple[int, int]], cut: Cut) -> bool:
    """Whether the cut uses the group up: one element a device."""
    return all(ways(cut[i]) == size for size, i in group)


def _same_even(group: list[tuple[int, int]], *cuts: Cut) -> bool:
    return all(size % ways(cut[i]) == 0 for cut in cuts for size, i in group)


def seconds(steps: tuple[Step, ...] | tuple[Hop, ...]) -> float:
    """Estimated time of a plan or route."""
    return sum((s.step if isinstance(s, Hop) else s).seconds for s in steps)


def _prefix(have: list[Axis], want: Axes, size: int) -> int:
    """How many leading axes of `have` may stay on the way to `want`.

    Parts of one mesh axis are cut as one when they stand together, so on an uneven factor a prefix may not end inside
    such a run of either side.
    """
    k = 0
    while k < len(have) and k < len(want) and have[k] == want[k]:
        k += 1
    while k and not _even(size, have[:k]) and (_joined(have, k) or _joined(list(want), k)):
        k -= 1
    # An even prefix can still be inside a run whose whole is uneven.
    while k and (
        (_joined(have, k) and not _even(size, have)) or (_joined(list(want), k) and not _even(size, list(want)))
    ):
        k -= 1
    return k


def _joined(axes: list[Axis], k: int) -> bool:
    """Whether position k falls inside a run of parts of one mesh axis."""
    return 0 < k < len(axes) and len(Axis.merge(axes[k - 1 : k + 1])) == 1


def _even(size: int, axes: list[Axis]) -> bool:
    return size % ways(tuple(axes)) == 0


def _whole_if_uneven(new: list[Axis], want: list[Axis], size: int, have: list[Axis]) -> list[Axis]:
    """Shorten `new` so that it does not stop inside a run of parts that is cut as one."""
    k = len(new)
    while k and not _even(size, have + want) and _joined(want, k):
        k -= 1
    return new[:k]
