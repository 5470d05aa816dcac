"""The local form of ops that read a dim around every element, or in windows, and of gradients of windows.

Where results read what others have, a device gets it, runs the op on that, and drops what belongs to others. So the op
does at the ends of the whole dim what it always does there. A gradient goes the other way: the op is run on the
gradients of a device's own results, with zeros for all else, and what it makes for elements of others goes home.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import pytree
from shardlib.rules.halo import Range, extent, fetch_all, give_back, length, overlap, reframe
from shardlib.rules.nonempty import put
from shardlib.rules.rule import Labels, Local, Path, Reads
from shardlib.rules.shards import may_be_empty
from shardlib.rules.window import Pool, Window


@dataclass(frozen=True)
class Reach:
    """What a range of a dim of results reads of factor `source`, which has `size` elements; `count` are the results."""

    source: str
    size: int
    count: int
    needs: tuple[Callable[[Range], Range], ...]  # one behind the other
    frame: Callable[[Range], Range]  # what the op runs on, as the needs count, filled up with zeros
    made: Callable[[Range], Range]  # the results that it makes of that
    window: Window | None = None  # that slides along the source

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
        return Reach(source, size, size, needs, frame, frame)

    @staticmethod
    def windows(source: str, size: int, count: int, window: Window, *, ceil: bool = False) -> Reach:
        pool = Pool(window, size, count, ceil)
        return Reach(source, size, count, (lambda r: overlap((0, size), pool.need(r)),), pool.frame, pool.made, window)

    def fetched(self, x: Tensor, dim: int, mine: Range) -> Tensor:
        """A piece of an operand with all that a range of results reads."""
        parts = fetch_all(x, dim, (self.source,), [need(mine) for need in self.needs], "input")
        held = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        low = self.needs[0](mine)[0] if len(parts) == 1 else self.frame(mine)[0]
        return reframe(held, dim, (low, low + held.shape[dim]), self.frame(mine))

    def given_back(self, x: Tensor, dim: int, mine: Range) -> Tensor:
        """A device's piece of a gradient, of what all devices have made of those of their results."""
        (need,) = self.needs
        x = reframe(x, dim, self.frame(mine), need(mine))
        return give_back(x, dim, (self.source,), need(mine), self.size, name="gradient")


Run = Callable[[list[Any], dict[str, Any], Mapping[int, int]], Any]


@dataclass(frozen=True)
class Stencil:
    """An op whose results read so much, by the factors of results; each factor is a dim of its own wherever it is.

    * `back`: it is the gradient of such an op, and operand `like` says by its shape how large the result is.
    * `run`: what runs instead of the op, on its arguments; it is told where dims begin that are not here as a whole.
    """

    reach: Mapping[str, Reach]
    back: bool = False
    like: int | None = None
    run: Run | None = None

    @property
    def sources(self) -> dict[str, str]:
        return {r.source: f for f, r in self.reach.items()}

    @property
    def reads(self) -> dict[str, Reads]:
        """Where results lie in what they read."""
        return {
            r.source: r.window.laid(f, r.count) for f, r in self.reach.items() if r.window is not None and r.source != f
        }

    def local(self, local: Local) -> Any:
        here = {f: r for f, r in self.reach.items() if local.axes(f) or local.axes(r.source)}
        thin = [f for f in local.rule.loose if may_be_empty(local, f)]
        run = self.run or (lambda args, kwargs, _: local.call.target(*args, **kwargs))

        def form(*args: Any, **kwargs: Any) -> Any:
            piece = _Piece(self, here, {f: extent((f,), r.count) for f, r in here.items()}, thin)
            flat, tree = pytree.tree_flatten((args, kwargs))
            operands = iter(enumerate(local.rule.operands))
            for i, x in enumerate(flat):
                if isinstance(x, Tensor):
                    flat[i] = piece.given(x, *next(operands))
            given, named = pytree.tree_unflatten(flat, tree)
            given = list(given)
            for path, size in piece.counted(local.rule.ints):
                put(named if isinstance(path[0], str) else given, path, size)
            found = run(given, named, piece.begins)
            outs = list(found) if isinstance(found, tuple) else [found]
            outs = [piece.kept(x, labels) for x, labels in zip(outs, local.rule.results, strict=True)]
            return tuple(outs) if isinstance(found, tuple) else outs[0]

        return local.run(form, *local.args, **local.kwargs)


@dataclass(frozen=True)
class _Piece:
    """What one device runs the op on, for the results `mine`.

    Of the factors `thin`, of which it may have nothing, it takes one element that means nothing.
    """

    stencil: Stencil
    here: Mapping[str, Reach]  # those that are cut
    mine: Mapping[str, Range]
    thin: Sequence[str]
    begins: dict[int, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def _wide(self, labels: Labels) -> Iterator[tuple[int, Reach, Range]]:
        """The dims of a tensor that are read, or are gradients of what is."""
        sources = {r.source: f for f, r in self.here.items()}
        return ((dim, self.here[sources[f]], self.mine[sources[f]]) for dim, f in _along(labels, sources))

    def _windows(self, labels: Labels) -> Iterator[tuple[int, Reach, Range]]:
        """The dims of a tensor that read."""
        return ((dim, self.here[f], self.mine[f]) for dim, f in _along(labels, self.here))

    def given(self, x: Tensor, at: int, labels: Labels) -> Tensor:
        """An operand as the op gets it."""
        if at == self.stencil.like or not self.stencil.back:
            for dim, reach, mine in self._wide(labels):
                self.begins[dim] = reach.frame(mine)[0]
                x = _sized(x, dim, length(reach.frame(mine))) if self.stencil.back else reach.fetched(x, dim, mine)
        else:
            for dim, reach, mine in self._windows(labels):
                x = reframe(x, dim, mine, reach.made(mine))
        for dim, f in _along(labels, self.thin):
            n = self.sizes[f] = x.shape[dim]
            x = reframe(x, dim, (0, n), (0, max(n, 1)))
        return x

    def kept(self, x: Tensor, labels: Labels) -> Tensor:
        """A device's piece of a result of the op."""
        if self.stencil.back:
            for dim, reach, mine in self._wide(labels):
                x = reach.given_back(x, dim, mine)
        else:
            for dim, reach, mine in self._windows(labels):
                x = x.narrow(dim, mine[0] - reach.made(mine)[0], length(mine))
        for dim, f in _along(labels, self.thin):
            x = x.narrow(dim, 0, self.sizes[f])
        return x

    def counted(self, ints: Mapping[Path, tuple[int, Sequence[str]]]) -> Iterator[tuple[Path, int]]:
        """Arguments that count what the op gets of a dim, or makes."""
        for path, (k, factors) in ints.items():
            read = [length(reach.frame(mine)) for _, reach, mine in self._wide((tuple(factors),))]
            made = [length(reach.made(mine)) for _, reach, mine in self._windows((tuple(factors),))]
            for n in (made + read if self.stencil.back else read + made)[-1:]:
                yield path, k * n


def _sized(x: Tensor, dim: int, n: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], n, *x.shape[dim + 1 :]])


def _along(labels: Labels, factors: Container[str]) -> list[tuple[int, str]]:
    """The dims of these labels that are among the factors, which are these."""
    return [(dim, f) for dim, label in enumerate(labels) for f in label if f in factors]
