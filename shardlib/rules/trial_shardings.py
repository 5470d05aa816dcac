"""The shardings of an op's factors that a proof tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.rules.rule import Rule
from shardlib.sharding.chunks import ShardSizes
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard import Axes


@dataclass(frozen=True)
class TrialSharding:
    """The mesh axes of each sharded factor, and the sizes of shards that are not chunks."""

    axes: Mapping[str, Axes]
    shards: Mapping[str, ShardSizes] = field(default_factory=dict)

    def __str__(self) -> str:
        factors = [f"{f}@{'·'.join(map(str, axes))}" for f, axes in self.axes.items()]
        sizes = dict.fromkeys(f"{a.name}={a.axis_size}" for axes in self.axes.values() for a in axes)
        chosen = "".join(f", {f} in shards of {' '.join(map(str, p.sizes))}" for f, p in self.shards.items())
        return f"{', '.join(factors)} on {', '.join(sizes)}{chosen}" if factors else "nothing sharded"


def trial_shardings(rule: Rule, ways: Sequence[int] = (2, 3, 4)) -> Iterator[TrialSharding]:
    """Yields the shardings to try: of no factor, one factor, one factor over two axes, and two factors."""
    tied = rule.ties.required
    free = [f for f in rule.sizes if f not in rule.whole and f not in tied]
    a, b, second = Axis("a", 2), Axis("b", 3), Axis("b", 2)
    chunks = [*((Axis("a", n),) for n in ways), (a, second)]

    def lopsided(f: str) -> dict[str, ShardSizes]:
        n = rule.sizes[f]
        return {f: ShardSizes((n // 2 + 1, 0, n - n // 2 - 1), (b,))}

    yield TrialSharding({})
    for f in free:
        yield from (TrialSharding({f: axes}) for axes in chunks)
        if rule.sizes[f]:
            yield TrialSharding({f: (b,)}, lopsided(f))
    yield from (TrialSharding({f: (a,), g: (b,)}) for f, g in itertools.combinations(free, 2))
    for t, s in tied.items():
        yield from (TrialSharding({t: axes, s: axes}) for axes in chunks)
        yield TrialSharding({t: (a,), s: (a, b)})
        if rule.sizes[s] and rule.sizes[t]:
            yield TrialSharding({t: (b,), s: (b,)}, lopsided(s))
            yield TrialSharding({t: (b,), s: (b,)}, lopsided(s) | lopsided(t))
        yield from (TrialSharding({t: (b,), s: (b,), f: (a,)}) for f in free if f != s)
