"""The ways in which a proof cuts the dims of a rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.rules.rule import Rule
from shardlib.sharding.chunks import ShardSizes
from shardlib.sharding.mesh.axis import Axis

Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Cut:
    """One way of cutting: the axes over which factors are cut, and the pieces of those that are not cut in chunks."""

    axes: Mapping[str, Axes]
    pieces: Mapping[str, ShardSizes] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{f}@{'·'.join(map(str, axes))}" for f, axes in self.axes.items()]
        sizes = dict.fromkeys(f"{a.name}={a.axis_size}" for axes in self.axes.values() for a in axes)
        chosen = "".join(f", {f} in pieces of {' '.join(map(str, p.sizes))}" for f, p in self.pieces.items())
        return f"{', '.join(said)} on {', '.join(sizes)}{chosen}" if said else "nothing cut"


def cuts(rule: Rule, ways: Sequence[int] = (2, 3, 4)) -> Iterator[Cut]:
    """Every way of cutting that is tried: none, one factor, one factor over two axes, two factors."""
    tied = {**rule.rounds, **rule.follows}
    free = [f for f in rule.sizes if f not in rule.whole and f not in tied]
    a, b, second = Axis("a", 2), Axis("b", 3), Axis("b", 2)
    chunks = [*((Axis("a", n),) for n in ways), (a, second)]

    def lopsided(f: str) -> dict[str, ShardSizes]:
        n = rule.sizes[f]
        return {f: ShardSizes((n // 2 + 1, 0, n - n // 2 - 1), (b,))}

    yield Cut({})
    for f in free:
        yield from (Cut({f: axes}) for axes in chunks)
        if rule.sizes[f]:
            yield Cut({f: (b,)}, lopsided(f))
    yield from (Cut({f: (a,), g: (b,)}) for f, g in itertools.combinations(free, 2))
    for t, s in tied.items():
        yield from (Cut({t: axes, s: axes}) for axes in chunks)
        yield Cut({t: (a,), s: (a, b)})
        if rule.sizes[s] and rule.sizes[t]:
            yield Cut({t: (b,), s: (b,)}, lopsided(s))
            yield Cut({t: (b,), s: (b,)}, lopsided(s) | lopsided(t))
        yield from (Cut({t: (b,), s: (b,), f: (a,)}) for f in free if f != s)
