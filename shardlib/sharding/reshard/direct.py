"""Plans a reshard directly, for factors of any sizes: free steps first, then the ones that send the fewest bytes.

The order is: slice, scatter partial sums, exchange, reduce, gather. A factor that keeps its axes but changes its shard
sizes takes an all-to-all along its dim.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from functools import lru_cache
from itertools import accumulate

from shardlib.sharding.chunks import is_nested, largest_shard, restrict_size, shard_sizes
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.reshard.permute_devices import changed_axes, plan_permutation
from shardlib.sharding.reshard.step import Axes, FactorAxes, FactorSizes, Step, is_evenly_sharded, local_numel


class DirectPlanner:
    """Plans the steps of a value from `src`, with a partial sum over `pending`, to `dst`.

    `into` are the sizes at the end; `parts` the sizes of the factors that were fused into each factor.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        src: FactorAxes,
        dst: FactorAxes,
        pending: Axes,
        reduce: str,
        into: tuple[int, ...],
        parts: FactorSizes,
    ) -> None:
        self.sizes, self.into, self.dst, self.parts = list(sizes), into, dst, parts
        self.itemsize, self.reduce = itemsize, reduce
        self.cut = [list(a) for a in src]
        self.pending = list(pending)
        self.steps: list[Step] = []

    def run(self) -> tuple[Step, ...]:
        """Returns all steps."""
        self.slices()
        self.scatter_sums()
        self.exchange_factors()
        self.permute_shards()
        self.resize_shards()
        self.scatter_sums()
        self.add_sums()
        self.gather()
        assert self.frozen() == self.dst, f"reshard to {self.dst} stopped at {self.frozen()}"
        assert all(
            restrict_size(a, x) == restrict_size(b, x) for a, b, x in zip(self.sizes, self.into, self.dst, strict=True)
        )
        return tuple(self.steps)

    def frozen(self) -> FactorAxes:
        return tuple(tuple(a) for a in self.cut)

    def numel(self) -> int:
        return local_numel(tuple(self.sizes), self.frozen())

    def keep(self, i: int) -> int:
        """Counts the leading axes of factor i that can stay; shards after every step must be nested."""
        have, want, k = self.cut[i], self.dst[i], 0
        while k < len(have) and k < len(want) and have[k] == want[k]:
            k += 1
        while k and not self._stays(i, k):
            k -= 1
        return k

    def _stays(self, i: int, k: int) -> bool:
        have, want = self.sizes[i], self.into[i]
        same = have == want or restrict_size(have, tuple(self.cut[i][:k])) == restrict_size(want, self.dst[i][:k])
        return same and is_nested(have, self.cut[i], k) and is_nested(want, self.dst[i], k)

    def extra(self, i: int) -> list[Axis]:
        """Returns the axes that must leave factor i: those behind the prefix that it keeps."""
        return self.cut[i][self.keep(i) :]

    def missing(self, i: int) -> list[Axis]:
        return list(self.dst[i][self.keep(i) :])

    def emit(self, kind: str, axes: list[Axis], factor: int, to: int, nbytes: float) -> None:
        step = Step(kind, Axis.merge(axes), factor, to, self.frozen(), tuple(self.sizes), nbytes, self.reduce)
        self.steps.append(step)

    def extend(self, i: int, new: list[Axis]) -> None:
        """Shards factor i further, in its final shard sizes."""
        self.sizes[i] = self.into[i]
        self.cut[i].extend(new)

    def startable(self, i: int, ready: Collection[Axis]) -> list[Axis]:
        """Returns the axes among `ready` that factor i can take next and still have nested shards."""
        if self.keep(i) < len(self.cut[i]):
            return []
        want = self.dst[i][len(self.cut[i]) :]
        k = 0
        while k < len(want) and want[k] in ready:
            k += 1
        while k and not is_nested(self.into[i], self.dst[i], len(self.cut[i]) + k):
            k -= 1
        return list(want[:k])

    def slices(self) -> None:
        """Slices factors locally by axes that are free."""
        for i in range(len(self.cut)):
            if len(self.cut[i]) == len(self.dst[i]):
                continue
            free = {*self.dst[i]}.difference(self.pending, *self.cut)
            if new := self.startable(i, free):
                self.extend(i, new)
                self.emit("slice", new, i, i, 0.0)

    def scatter_sums(self) -> None:
        """Reduce-scatters partial sums onto factors that end over their axes."""
        for i in range(len(self.cut)):
            if self.pending and (new := self.startable(i, self.pending)):
                self.extend(i, new)
                for a in new:
                    self.pending.remove(a)
                self.emit("reduce_scatter", new, i, i, self.itemsize * self.numel() * (group_size(tuple(new)) - 1))
                self.slices()

    def exchange_factors(self) -> None:
        """Moves the minor axes of one factor to another one."""
        for i in range(len(self.cut)):
            moved = self.extra(i)
            for j in range(len(self.cut)):
                if not moved or j == i or self.extra(j) or self.missing(j)[: len(moved)] != moved:
                    continue
                kept = len(self.cut[i]) - len(moved)
                if not is_nested(self.sizes[i], self.cut[i], kept):
                    continue
                if not is_nested(self.into[j], self.dst[j], len(self.cut[j]) + len(moved)):
                    continue
                n = group_size(tuple(moved))
                del self.cut[i][kept:]
                self.extend(j, moved)
                self.emit("all_to_all", moved, i, j, self.itemsize * self.numel() * (n - 1) / n)
                moved = []
                self.slices()

    def permute_shards(self) -> None:
        """Sends whole shards to other devices: for factors that end in as many shards over other axes.

        Factors are first sliced further by free axes; superfluous axes stay, to be gathered later.
        """
        candidates = [i for i in range(len(self.cut)) if self.extra(i) and self.missing(i) and self._is_even(i)]
        for group in (candidates, *([i] for i in candidates if len(candidates) > 1)):
            if not all(self.extra(i) and self.missing(i) for i in group):
                continue
            used = {a for axes in (*self.cut, self.pending) for a in axes}
            grid = plan_permutation({i: (self.extra(i), self.missing(i)) for i in group}, used)
            after = {i: [*self.cut[i][: self.keep(i)], *axes] for i, (_, axes) in grid.items()}
            finer = {i: [*self.cut[i], *new] for i, (new, _) in grid.items()}
            if not grid or not all(
                is_evenly_sharded(self.parts[i], axes) for axes_of in (finer, after) for i, axes in axes_of.items()
            ):
                continue
            for i, (new, _) in grid.items():
                if new:
                    self.cut[i] = finer[i]
                    self.emit("slice", new, i, i, 0.0)
            axes = changed_axes([(self.cut[i], after[i]) for i in group], operator.attrgetter("size"))
            for i in group:
                self.cut[i] = after[i]
            self.emit("ppermute", axes, group[0], group[0], float(self.itemsize * self.numel()))
            self.slices()

    def _is_even(self, i: int) -> bool:
        """Returns whether all shards of factor i have one size, now and at the end."""
        have, want = self.sizes[i], self.into[i]
        if type(have) is not int or type(want) is not int:
            return False
        return have % group_size(tuple(self.cut[i])) == 0 and want % group_size(self.dst[i]) == 0

    def resize_shards(self) -> None:
        """Exchanges elements of factors that keep their axes but change their shard sizes."""
        for i in range(len(self.cut)):
            kept, extra, missing = self.keep(i), self.extra(i), self.missing(i)
            k = 0
            while k < min(len(extra), len(missing)) and extra[k] == missing[k]:
                k += 1
            both = kept + k
            while both > kept and not (
                is_nested(self.sizes[i], self.cut[i], both) and is_nested(self.into[i], self.dst[i], both)
            ):
                both -= 1
            if both == kept or self.sizes[i] == self.into[i]:
                continue
            if rest := self.cut[i][both:]:
                self._gather(i, rest)
            axes = self.cut[i][kept:]
            sent = _count_sent(self.sizes[i], self.into[i], tuple(self.cut[i]), kept)
            others = [(n, a) for j, (n, a) in enumerate(zip(self.sizes, self.frozen(), strict=True)) if j != i]
            row = math.prod(largest_shard(n, Axis.merge(a)) for n, a in others)
            self.sizes[i] = self.into[i]
            self.emit("all_to_all", axes, i, i, float(self.itemsize * sent * row))
            self.slices()

    def add_sums(self) -> None:
        if self.pending:
            n, axes, self.pending = group_size(tuple(self.pending)), self.pending, []
            self.emit("all_reduce", axes, -1, -1, 2 * self.itemsize * self.numel() * (n - 1) / n)
            self.slices()

    def gather(self) -> None:
        for i in sorted(range(len(self.cut)), key=lambda i: group_size(tuple(self.extra(i)))):
            if axes := self.extra(i):
                self._gather(i, axes)
                self.slices()
        self.slices()

    def _gather(self, i: int, axes: list[Axis]) -> None:
        n = group_size(tuple(axes))
        del self.cut[i][len(self.cut[i]) - len(axes) :]
        self.emit("all_gather", axes, i, i, self.itemsize * self.numel() * (n - 1) / n)


def _count_sent(have: int, want: int, axes: Axes, kept: int) -> int:
    """Counts the elements that the busiest device sends when shard sizes over `axes` change from `have` to `want`.

    Over the first `kept` axes the shards do not change.
    """
    (old, new), n = (shard_edges(size, axes) for size in (have, want)), group_size(axes[kept:])
    most = 0
    for i in range(len(old) - 1):
        stays = max(0, min(old[i + 1], new[i + 1]) - max(old[i], new[i]))
        assert old[i // n * n] == new[i // n * n], "elements are exchanged inside a group"
        most = max(most, old[i + 1] - old[i] - stays)
    return most


@lru_cache(maxsize=1 << 14)
def shard_edges(size: int, axes: Axes) -> tuple[int, ...]:
    """Returns the starts of the shards of `size` over `axes`, and the end."""
    return (0, *accumulate(shard_sizes(size, Axis.merge(axes))))
