"""The direct way from one cut to another, whatever the sizes: what is free first, then what moves the fewest bytes.

Slice what is free, scatter pending sums, exchange, reduce, gather last. Between other pieces of one factor over
the same axes, an all-to-all along its dim exchanges what changes hands.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from itertools import accumulate

from shardlib.sharding.chunks import fullest, nested, over, spans
from shardlib.sharding.mesh.axis import Axis, ways
from shardlib.sharding.reshard.permute_devices import moving, regrid
from shardlib.sharding.reshard.step import Axes, Cut, Leaves, Step, fits, local_numel


class Direct:
    """Where a value is on its way from `src`, with a reduction pending over `pending`, to `dst`.

    `into` are the sizes at the end; `parts` the sizes of the leaves that each factor is made of.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        src: Cut,
        dst: Cut,
        pending: Axes,
        reduce: str,
        into: tuple[int, ...],
        parts: Leaves,
    ) -> None:
        self.sizes, self.into, self.dst, self.parts = list(sizes), into, dst, parts
        self.itemsize, self.reduce = itemsize, reduce
        self.cut = [list(a) for a in src]
        self.pending = list(pending)
        self.steps: list[Step] = []

    def run(self) -> tuple[Step, ...]:
        """All steps of the way."""
        self.slices()
        self.scatter_sums()
        self.exchange_factors()
        self.permute_pieces()
        self.exchange_pieces()
        self.scatter_sums()
        self.add_sums()
        self.gather()
        assert self.frozen() == self.dst, f"reshard to {self.dst} stopped at {self.frozen()}"
        assert all(over(a, x) == over(b, x) for a, b, x in zip(self.sizes, self.into, self.dst, strict=True))
        return tuple(self.steps)

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
            finer = {i: [*self.cut[i], *new] for i, (new, _) in grid.items()}
            if not grid or not all(fits(self.parts[i], axes) for of in (finer, after) for i, axes in of.items()):
                continue
            for i, (new, _) in grid.items():
                if new:
                    self.cut[i] = finer[i]
                    self.emit("slice", new, i, i, 0.0)
            axes = moving([(self.cut[i], after[i]) for i in group])
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


@lru_cache(maxsize=1 << 14)
def edges(size: int, axes: Axes) -> tuple[int, ...]:
    """Where the pieces of `size` over `axes` start, and the end."""
    return (0, *accumulate(spans(size, Axis.merge(axes))))
