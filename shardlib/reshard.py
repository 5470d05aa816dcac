"""From one layout to another: the collectives, their bytes and their estimated time.

A *cut* of a value is a tuple with one entry per factor: the mesh axes over it, major first, in prime parts. Steps are
taken in the order that moves the fewest bytes: slice what is free, scatter pending sums, exchange, reduce, gather last.
Between other pieces of one factor over the same axes, an all-to-all along its dim exchanges what changes hands.

Wire bytes are what one device sends under ring algorithms: all-gather out*(n-1)/n, reduce-scatter out*(n-1), all-reduce
2*out*(n-1)/n, all-to-all out*(n-1)/n.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from shardlib.axis import Axis
from shardlib.pieces import even, fullest, nested, over, spans
from shardlib.regrid import moves, regrid
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

    kind: str  # slice, reduce_scatter, all_to_all, ppermute, all_reduce, all_gather
    axes: Axes
    factor: int
    to: int
    result: Cut
    sizes: tuple[int, ...]  # of the factors, after it
    bytes: float  # on the wire, per device
    reduce: str = "sum"

    @property
    def seconds(self) -> float:
        return 0.0 if self.kind == "slice" else COLLECTIVE_LATENCY + self.bytes / LINK_BYTES_PER_SECOND


def ways(axes: Axes) -> int:
    return math.prod(a.size for a in axes)


def local_numel(sizes: tuple[int, ...], cut: Cut) -> int:
    """Elements on the fullest device."""
    return math.prod(fullest(size, Axis.merge(axes)) for size, axes in zip(sizes, cut, strict=True))


def plan(
    sizes: tuple[int, ...],
    itemsize: int,
    src: Cut,
    dst: Cut,
    pending: Axes = (),
    reduce: str = "sum",
    into: tuple[int, ...] | None = None,
) -> tuple[Step, ...]:
    """The steps from cut `src`, with a reduction pending over `pending`, to cut `dst` with nothing pending.

    `into` are the sizes at the end, where their pieces are others.
    """
    return _plan(sizes, itemsize, src, dst, pending, reduce, into or sizes)


@cache
def _plan(
    sizes: tuple[int, ...], itemsize: int, src: Cut, dst: Cut, pending: Axes, reduce: str, into: tuple[int, ...]
) -> tuple[Step, ...]:
    if src == dst and not pending and sizes == into:
        return ()
    way = _Way(sizes, itemsize, src, dst, pending, reduce, into)
    way.slices()
    way.scatter_sums()
    way.exchange_factors()
    way.permute_pieces()
    way.exchange_pieces()
    way.scatter_sums()
    way.add_sums()
    way.gather()
    assert way.frozen() == dst, f"reshard from {src} to {dst} stopped at {way.frozen()}"
    assert all(over(a, x) == over(b, x) for a, b, x in zip(way.sizes, into, dst, strict=True))
    return tuple(way.steps)


class _Way:
    """Where a value is on its way from one cut to another."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        src: Cut,
        dst: Cut,
        pending: Axes,
        reduce: str,
        into: tuple[int, ...],
    ) -> None:
        self.sizes, self.into, self.dst = list(sizes), into, dst
        self.itemsize, self.reduce = itemsize, reduce
        self.cut = [list(a) for a in src]
        self.pending = list(pending)
        self.steps: list[Step] = []

    def frozen(self) -> Cut:
        return tuple(tuple(a) for a in self.cut)

    def numel(self) -> int:
        return local_numel(tuple(self.sizes), self.frozen())

    def keep(self, i: int) -> int:
        """How many leading axes of factor i may stay on the way to the target: no step may end inside a run."""
        have, want, k = self.cut[i], self.dst[i], 0
        while k < len(have) and k < len(want) and have[k] == want[k]:
            k += 1
        while k and not self._stays(i, k):
            k -= 1
        return k

    def _stays(self, i: int, k: int) -> bool:
        have, want = self.sizes[i], self.into[i]
        same = have == want or over(have, tuple(self.cut[i][:k])) == over(want, self.dst[i][:k])
        return same and nested(have, self.cut[i], k) and nested(want, self.dst[i], k)

    def extra(self, i: int) -> list[Axis]:
        """What must leave factor i: all after the prefix that it shares with the target."""
        return self.cut[i][self.keep(i) :]

    def missing(self, i: int) -> list[Axis]:
        return list(self.dst[i][self.keep(i) :])

    def emit(self, kind: str, axes: list[Axis], factor: int, to: int, nbytes: float) -> None:
        step = Step(kind, Axis.merge(axes), factor, to, self.frozen(), tuple(self.sizes), nbytes, self.reduce)
        self.steps.append(step)

    def extend(self, i: int, new: list[Axis]) -> None:
        """Cut factor i further, in the pieces that it is to have."""
        self.sizes[i] = self.into[i]
        self.cut[i].extend(new)

    def startable(self, i: int, ready: Collection[Axis]) -> list[Axis]:
        """The axes that factor i may take next, of those that are `ready`: not stopping inside a run."""
        if self.keep(i) < len(self.cut[i]):
            return []
        want = self.dst[i][len(self.cut[i]) :]
        k = 0
        while k < len(want) and want[k] in ready:
            k += 1
        while k and not nested(self.into[i], self.dst[i], len(self.cut[i]) + k):
            k -= 1
        return list(want[:k])

    def slices(self) -> None:
        """Cut locally whatever no collective is needed for."""
        for i in range(len(self.cut)):
            if len(self.cut[i]) == len(self.dst[i]):
                continue
            free = {*self.dst[i]}.difference(self.pending, *self.cut)
            if new := self.startable(i, free):
                self.extend(i, new)
                self.emit("slice", new, i, i, 0.0)

    def scatter_sums(self) -> None:
        """Scatter pending sums onto the factors that want them."""
        for i in range(len(self.cut)):
            if self.pending and (new := self.startable(i, self.pending)):
                self.extend(i, new)
                for a in new:
                    self.pending.remove(a)
                self.emit("reduce_scatter", new, i, i, self.itemsize * self.numel() * (ways(tuple(new)) - 1))
                self.slices()

    def exchange_factors(self) -> None:
        """Exchange factor i's minor axes for factor j's."""
        for i in range(len(self.cut)):
            moving = self.extra(i)
            for j in range(len(self.cut)):
                if not moving or j == i or self.extra(j) or self.missing(j)[: len(moving)] != moving:
                    continue
                kept = len(self.cut[i]) - len(moving)
                if not nested(self.sizes[i], self.cut[i], kept):
                    continue
                if not nested(self.into[j], self.dst[j], len(self.cut[j]) + len(moving)):
                    continue
                n = ways(tuple(moving))
                del self.cut[i][kept:]
                self.extend(j, moving)
                self.emit("all_to_all", moving, i, j, self.itemsize * self.numel() * (n - 1) / n)
                moving = []
                self.slices()

    def permute_pieces(self) -> None:
        """The pieces as they are, on other devices: factors that are cut as often after as before, by other axes.

        Factors are sliced finer first where axes are free; axes that are left over stay, to be gathered.
        """
        apart = [i for i in range(len(self.cut)) if self.extra(i) and self.missing(i) and self._plain(i)]
        for group in (apart, *([i] for i in apart if len(apart) > 1)):
            if not all(self.extra(i) and self.missing(i) for i in group):
                continue
            used = {a for axes in (*self.cut, self.pending) for a in axes}
            grid = regrid({i: (self.extra(i), self.missing(i)) for i in group}, used)
            after = {i: [*self.cut[i][: self.keep(i)], *axes] for i, (_, axes) in grid.items()}
            if not after or any(self.sizes[i] % ways(tuple(axes)) for i, axes in after.items()):
                continue
            for i, (new, _) in grid.items():
                if new:
                    self.cut[i].extend(new)
                    self.emit("slice", new, i, i, 0.0)
            pairs = [(self.cut[i], after[i]) for i in group]
            axes = [a for a in dict.fromkeys(a for pair in pairs for of in pair for a in of) if moves(a, pairs)]
            for i in group:
                self.cut[i] = after[i]
            self.emit("ppermute", axes, group[0], group[0], float(self.itemsize * self.numel()))
            self.slices()

    def _plain(self, i: int) -> bool:
        """Whether all pieces of factor i are of one size, before and after."""
        have, want = self.sizes[i], self.into[i]
        if type(have) is not int or type(want) is not int:
            return False
        return have % ways(tuple(self.cut[i])) == 0 and want % ways(self.dst[i]) == 0

    def exchange_pieces(self) -> None:
        """Where a factor stays on its axes, but in other pieces: each device sends on what others are to hold."""
        for i in range(len(self.cut)):
            kept, extra, missing = self.keep(i), self.extra(i), self.missing(i)
            k = 0
            while k < min(len(extra), len(missing)) and extra[k] == missing[k]:
                k += 1
            both = kept + k
            while both > kept and not (
                nested(self.sizes[i], self.cut[i], both) and nested(self.into[i], self.dst[i], both)
            ):
                both -= 1
            if both == kept or self.sizes[i] == self.into[i]:
                continue
            if rest := self.cut[i][both:]:
                self._gather(i, rest)
            axes = self.cut[i][kept:]
            moved = _moved(self.sizes[i], self.into[i], tuple(self.cut[i]), kept)
            others = [(n, a) for j, (n, a) in enumerate(zip(self.sizes, self.frozen(), strict=True)) if j != i]
            row = math.prod(fullest(n, Axis.merge(a)) for n, a in others)
            self.sizes[i] = self.into[i]
            self.emit("all_to_all", axes, i, i, float(self.itemsize * moved * row))
            self.slices()

    def add_sums(self) -> None:
        if self.pending:
            n, axes, self.pending = ways(tuple(self.pending)), self.pending, []
            self.emit("all_reduce", axes, -1, -1, 2 * self.itemsize * self.numel() * (n - 1) / n)
            self.slices()

    def gather(self) -> None:
        for i in sorted(range(len(self.cut)), key=lambda i: ways(tuple(self.extra(i)))):
            if axes := self.extra(i):
                self._gather(i, axes)
                self.slices()
        self.slices()

    def _gather(self, i: int, axes: list[Axis]) -> None:
        n = ways(tuple(axes))
        del self.cut[i][len(self.cut[i]) - len(axes) :]
        self.emit("all_gather", axes, i, i, self.itemsize * self.numel() * (n - 1) / n)


def _moved(have: int, want: int, axes: Axes, kept: int) -> int:
    """The most elements that one device sends when the pieces of a factor over `axes` change from `have` to `want`.

    Over the first `kept` axes the pieces stay as they are.
    """
    (old, new), n = (edges(size, axes) for size in (have, want)), ways(axes[kept:])
    most = 0
    for i in range(len(old) - 1):
        stays = max(0, min(old[i + 1], new[i + 1]) - max(old[i], new[i]))
        assert old[i // n * n] == new[i // n * n], "what is exchanged stays in its group"
        most = max(most, old[i + 1] - old[i] - stays)
    return most


@cache
def edges(size: int, axes: Axes) -> tuple[int, ...]:
    """Where the pieces of `size` over `axes` start, and the end."""
    return (0, *accumulate(spans(size, Axis.merge(axes))))


@dataclass(frozen=True)
class Hop:
    """A step of a route: the factors that it works on, and the cut of the value's leaves after it."""

    step: Step
    dims: tuple[tuple[tuple[int, Axes], ...], ...]  # per dim, (size, axes) per fused factor, before the step
    after: Cut
    sizes: tuple[int, ...]  # of the leaves, after it


Leaves = tuple[tuple[int, ...], ...]  # per dim, the sizes of its leaves


def route(
    leaves: Leaves,
    itemsize: int,
    src: Cut,
    dst: Cut,
    pending: Axes = (),
    reduce: str = "sum",
    into: Leaves | None = None,
) -> tuple[Hop, ...]:
    """`plan` for a value whose dims are lists of `leaves`: neighbours that both cuts treat as one are moved as one."""
    return _route(leaves, itemsize, src, dst, pending, reduce, into or leaves)


@cache
def _route(
    leaves: Leaves, itemsize: int, src: Cut, dst: Cut, pending: Axes, reduce: str, into: Leaves
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
    now, sizes = fuse(src), fuse_sizes(flat)
    for step in plan(sizes, itemsize, now, fuse(dst), pending, reduce, fuse_sizes(ends)):
        feed = iter(zip(sizes, now, strict=True))
        before = tuple(tuple(next(feed) for _ in dim) for dim in groups)
        after = [*flat]
        for group, size in zip(flat_groups, step.sizes, strict=True):
            if len(group) == 1:
                after[group[0]] = size
        hops.append(Hop(step, before, split(step.result), tuple(after)))
        now, sizes = step.result, step.sizes
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


def seconds(steps: tuple[Step, ...] | tuple[Hop, ...]) -> float:
    """Estimated time of a plan or route."""
    return sum((s.step if isinstance(s, Hop) else s).seconds for s in steps)
