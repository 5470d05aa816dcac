"""The local form of ops that read a dim around every element, or in windows: a device gets that of the others.

It runs the op on what its results read, and drops what belongs to others. So the op does at the ends of the whole dim
what it always does there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import pytree
from shardlib.rules.halo import Range, extent, fetch_all, length, overlap, reframe, sent
from shardlib.rules.rule import Halo, Labels, Local
from shardlib.rules.window import Pool, Window


@dataclass(frozen=True)
class Reach:
    """What a range of a dim of results reads of factor `source`, which has `size` elements; `count` are the results."""

    source: str
    size: int
    count: int
    needs: tuple[Callable[[Range], Range], ...]  # one behind the other
    frame: Callable[[Range], Range]  # what the op runs on, as the needs count, filled up with zeros
    skipped: Callable[[Range], int]  # how many results it makes of that in front of the range

    @staticmethod
    def around(word: str, source: str, size: int, before: int, after: int) -> Reach:
        """So many elements to both sides; of a `ring` those at the other end, too. A range of nothing needs nothing."""
        rings = word == "ring"

        def reads(r: Range) -> Range:
            return (r[0] - before, r[1] + after) if length(r) else r

        def need(turn: int) -> Callable[[Range], Range]:
            return lambda r: overlap((0, size), (reads(r)[0] - turn, reads(r)[1] - turn))

        def frame(r: Range) -> Range:
            return ((reads if rings else need(0))(r)) if length(r) else (r[0], r[0] + 1)

        needs = tuple(need(turn) for turn in ((-size, 0, size) if rings else (0,)))
        return Reach(source, size, size, needs, frame, lambda r: r[0] - frame(r)[0])

    @staticmethod
    def windows(source: str, size: int, count: int, window: Window) -> Reach:
        pool = Pool(window, size, count)
        return Reach(source, size, count, (lambda r: overlap((0, size), pool.need(r)),), pool.frame, pool.skipped)

    def fetched(self, x: Tensor, dim: int, mine: Range) -> Tensor:
        """A piece of an operand with all that a range of results reads."""
        parts = fetch_all(x, dim, (self.source,), [need(mine) for need in self.needs], "input")
        held = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        low = self.needs[0](mine)[0] if len(parts) == 1 else self.frame(mine)[0]
        return reframe(held, dim, (low, low + held.shape[dim]), self.frame(mine))


def stencil(reach: Mapping[str, Reach]) -> Callable[[Local], Any]:
    """The local form of an op whose results read so much; each factor is a dim of its own wherever it is."""
    sources = {r.source: f for f, r in reach.items()}

    def local(local: Local) -> Any:
        def form(*args: Any, **kwargs: Any) -> Any:
            flat, tree = pytree.tree_flatten((args, kwargs))
            operands, mine = iter(local.rule.operands), {f: extent((f,), r.count) for f, r in reach.items()}
            for i, x in enumerate(flat):
                for dim, f in _along(next(operands), sources) if isinstance(x, Tensor) else ():
                    flat[i] = reach[sources[f]].fetched(flat[i], dim, mine[sources[f]])
            args, kwargs = pytree.tree_unflatten(flat, tree)
            found = local.call.target(*args, **kwargs)
            outs = list(found) if isinstance(found, tuple) else [found]
            for i, labels in enumerate(local.rule.results):
                for dim, f in _along(labels, reach):
                    outs[i] = outs[i].narrow(dim, reach[f].skipped(mine[f]), length(mine[f]))
            return tuple(outs) if isinstance(found, tuple) else outs[0]

        return local.run(form, *local.args, **local.kwargs)

    return local


def halos(reach: Mapping[str, Reach], operands: Sequence[Labels]) -> list[Halo]:
    """What it sends of these operands."""
    sources = {r.source: r for r in reach.values()}
    return [
        Halo(f, i, True, sent(sources[f].size, sources[f].count, *sources[f].needs))
        for i, labels in enumerate(operands)
        for _, f in _along(labels, sources)
    ]


def _along(labels: Labels, factors: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The dims of these labels that are among the factors, which are these."""
    return [(dim, f) for dim, label in enumerate(labels) for f in label if f in factors]
