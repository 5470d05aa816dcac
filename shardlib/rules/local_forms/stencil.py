"""The local form of ops that read a dim around every element, or in windows, of gradients of these, and of ops that
refuse empty dims.

Where results read what others have, a device gets it, runs the op on that, and drops what belongs to others. So the op
does at the ends of the whole dim what it always does there. A gradient goes the other way: the op is run on the
gradients of a device's own results, with zeros for all else, and what it makes for elements of others goes home. A
result that reads, or its gradient, may be a block of elements: `(h r)`, of which `h` is cut. Of what a device has
nothing, it takes one element of zeros, which results lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import pytree, schema_of
from shardlib.primitives.manual_ops import resized
from shardlib.rules.local_forms.halo import Range, extent, fetch, give_back, length, overlap, reframe
from shardlib.rules.local_forms.helpers import may_be_empty, share
from shardlib.rules.local_forms.window import Window
from shardlib.rules.rule import Labels, Local, Path, Reads


@dataclass(frozen=True)
class Reach:
    """What a range of a dim of results reads of factor `source`, which has `size` elements; `count` are the results."""

    source: str
    size: int
    count: int
    needs: tuple[Callable[[Range], Range], ...]  # one behind the other
    frame: Callable[[Range], Range]  # what the op runs on, as the needs count, filled up with zeros
    made: Callable[[Range], Range]  # the results that it makes of that
    lies: Callable[[str], tuple[str, Reads]] | None = None  # by the results' factor, which one lies where in the other
    dim: int | None = None  # the dim of operands that is read; None: where the source stands

    @staticmethod
    def around(word: str, source: str, size: int, before: int, after: int) -> Reach:
        """So many elements to both sides; of a `ring` those at the other end, too. A range of nothing needs nothing."""
        rings = word == "ring"

        def reads(r: Range) -> Range:
            return (r[0] - before, r[1] + after) if length(r) else r

        def need(turn: int) -> Callable[[Range], Range]:
            return lambda r: overlap((0, size), (reads(r)[0] - turn, reads(r)[1] - turn))

        def frame(r: Range) -> Range:
            return (reads if rings else need(0))(r) if length(r) else _one_at_least(r)

        needs = tuple(need(turn) for turn in ((-size, 0, size) if rings else (0,)))
        return Reach(source, size, size, needs, frame, frame)

    @staticmethod
    def windows(source: str, size: int, count: int, window: Window, *, ceil: bool = False) -> Reach:
        """Windows of an op that pads itself; where it rounds up (`ceil`), none begins behind that padding."""
        stride, pad, span = window.stride, window.padding, window.span

        def need(r: Range) -> Range:
            """Which inputs a range of results reads."""
            low, high = window.reads(r)
            return (max(low, 0), min(high, size)) if length(r) else (low, high)

        def first(r: Range) -> int:
            """The first result that the op makes on a frame: it has no padding in front of a device's own, and a window
            fits in where one fits in the whole."""
            before = max(-(-pad // stride), r[0] - max(size - span, 0) // stride)
            return r[0] - min(r[0], before) if length(r) else r[0]

        def frame(r: Range) -> Range:
            """The inputs that the op is run on, of which those in `need` matter for a device's own results."""
            low, high = need(r)
            if not length(r):
                return low, high
            return first(r) * stride, max(high, min(first(r) * stride + span, size))

        def made(r: Range) -> Range:
            """The results that the op makes there."""
            n = length(frame(r))
            room = n + 2 * pad - span
            many = (-(-room // stride) if ceil else room // stride) + 1
            if ceil and (many - 1) * stride >= n + pad:
                many -= 1
            return first(r), first(r) + many

        lies = lambda f: (source, window.laid(f, count))
        return Reach(source, size, count, (lambda r: overlap((0, size), need(r)),), frame, made, lies)

    @staticmethod
    def blocks(source: str, size: int, count: int, window: Window) -> Reach:
        """Windows around blocks, which lie side by side; where they reach over the ends, the op knows what to do."""
        n = window.stride

        def reads(r: Range) -> Range:
            return window.reads(r) if length(r) else _scaled(r, n)

        def made(r: Range) -> Range:
            """What the op makes of whole blocks, of which those in `need` matter."""
            low, high = reads(r)
            return _one_at_least((max(min(low // n, r[0]), 0), min(max(-(-high // n), r[1]), count)))

        lies = lambda f: (source, window.laid(f, count))
        need = lambda r: overlap((0, size), reads(r))
        return Reach(source, size, count, (need,), lambda r: _scaled(made(r), n), made, lies)

    @staticmethod
    def sliding(window: Window, source: str, size: int, count: int, *, back: bool, every: bool, **how: Any) -> Reach:
        """Windows, with zeros where they reach over the ends; `back` says that they are the source, and what they lie
        over is the results: `every` one of these, or those that some window has. A source of size 1 has no name.

        Kernels refuse to make nothing: where there is nothing, a device has one element that means nothing.
        """

        def need(r: Range) -> Range:
            return window.readers(r, size) if back else overlap((0, size), window.reads(r))

        def frame(r: Range) -> Range:
            if not back:
                return window.reads(r)
            return window.over(need(r), r) if every else _one_at_least(need(r))

        def made(r: Range) -> Range:
            return window.reads(frame(r)) if back else _one_at_least(r)

        def lies(f: str) -> tuple[str, Reads]:
            return (f, window.laid(source, size)) if back else (source, window.laid(f, count))

        return Reach(source, size, count, (need,), frame, made, lies, **how)

    def fetched(self, x: Tensor, dim: int, mine: Range, name: str) -> Tensor:
        """A piece of an operand with all that a range of results reads."""
        parts = fetch(x, dim, (self.source,) if self.source else (), [need(mine) for need in self.needs], name)
        held = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        low = self.needs[0](mine)[0] if len(parts) == 1 else self.frame(mine)[0]
        return reframe(held, dim, (low, low + held.shape[dim]), self.frame(mine))

    def given_back(self, x: Tensor, dim: int, mine: Range) -> Tensor:
        """A device's piece of a gradient, of what all devices have made of those of their results."""
        (need,) = self.needs
        x = reframe(x, dim, self.frame(mine), need(mine))
        return give_back(x, dim, (self.source,), need(mine), self.size, name="gradient")


Run = Callable[[Local, dict[str, Any], Mapping[int, int]], Any]


@dataclass(frozen=True)
class Stencil:
    """An op whose results read so much, by the factors of results; what is read is a dim of its own wherever it is.

    * `back`: it is the gradient of such an op, and operand `like` says by its shape how large the result is.
    * `read`: the operand that is read, called `name`; others have what the op makes. None: all are read.
    * `run`: what runs instead of the op, on its arguments by their names; it is told where dims begin that are not here
      as a whole.
    """

    reach: Mapping[str, Reach]
    back: bool = False
    like: int | None = None
    run: Run | None = None
    read: int | None = None
    name: str = "input"

    @property
    def sources(self) -> dict[str, str]:
        return {r.source: f for f, r in self.reach.items() if r.source}

    @property
    def reads(self) -> dict[str, Reads]:
        """Where results lie in what they read."""
        return dict(r.lies(f) for f, r in self.reach.items() if r.lies and r.source not in ("", f))

    def local(self, local: Local) -> Any:
        return local.run(self.form(local), *local.args, **local.kwargs)

    def form(self, local: Local) -> Callable[..., Any]:
        """What a device runs, as a function of the op's arguments."""
        here = {f: r for f, r in self.reach.items() if any(map(local.axes, {f, r.source} - {""}))}
        alike = local.rule.local_factors - self.reach.keys() - self.sources.keys()
        thin = {f for f in alike if may_be_empty(local, f)}
        run = self.run or (lambda _, given, __: local.call.target(**given))
        names = [a.name for a in schema_of(local.call.target).arguments]

        def form(*args: Any, **kwargs: Any) -> Any:
            piece = _Piece(self, here, {f: extent((f,), r.count) for f, r in here.items()}, thin)
            flat, tree = pytree.tree_flatten(dict(zip(names, args, strict=False)) | kwargs)
            operands = iter(enumerate(local.rule.operands))
            for i, x in enumerate(flat):
                if isinstance(x, Tensor):
                    flat[i] = piece.given(x, *next(operands))
            given = pytree.tree_unflatten(flat, tree)
            for (first, *rest), size in piece.counted(local.rule.ints):
                put(given, (names[first] if isinstance(first, int) else first, *rest), size)
            found = run(local, given, piece.begins)
            outs = list(found) if isinstance(found, tuple) else [found]
            made = zip(outs, local.rule.results, strict=True)
            outs = [None if x is None else piece.kept(x, labels) for x, labels in made]
            return tuple(outs) if isinstance(found, tuple) else outs[0]

        return form


def nonempty(local: Local, **then: Any) -> Any:
    """The op itself, where a device may have nothing on one element of zeros; it is told `then`, too."""
    target = local.call.target
    if not any(may_be_empty(local, f) for f in local.rule.local_factors):
        return local.op(target, *local.args, **local.kwargs)
    return Stencil({}, run=lambda _, given, __: target(**given, **then)).local(local)


@dataclass(frozen=True)
class _Piece:
    """What one device runs the op on, for the results `mine`: of the factors `thin` it may have nothing."""

    stencil: Stencil
    here: Mapping[str, Reach]  # those that are cut
    mine: Mapping[str, Range]
    thin: Container[str]
    begins: dict[int, int] = field(default_factory=dict)

    def _wide(self, labels: Labels) -> Iterator[tuple[int, Reach, Range]]:
        """The dims of a tensor that are read, or are gradients of what is."""
        for f, reach in self.here.items():
            for dim, label in enumerate(labels):
                if dim == reach.dim or (reach.dim is None and reach.source in label):
                    yield dim, reach, self.mine[f]

    def _windows(self, labels: Labels) -> Iterator[tuple[int, Range, Range]]:
        """The dims of a tensor that read: what is this device's, and what the op makes."""
        for dim, f in _along(labels, self.here):
            n, mine = _held(labels[dim][1:]), self.mine[f]  # elements for one of the major factor
            yield dim, _scaled(mine, n), _scaled(self.here[f].made(mine), n)

    def given(self, x: Tensor, at: int, labels: Labels) -> Tensor:
        """An operand as the op gets it."""
        how = self.stencil
        if at == how.like or (not how.back and how.read in (None, at)):
            for dim, reach, mine in self._wide(labels):
                self.begins[dim] = reach.frame(mine)[0]
                x = resized(x, dim, length(reach.frame(mine))) if how.back else reach.fetched(x, dim, mine, how.name)
        else:
            for dim, mine, made in self._windows(labels):
                x = reframe(x, dim, mine, made)
        for dim, _ in _along(labels, self.thin):
            x = reframe(x, dim, (0, x.shape[dim]), (0, math.prod(map(self._taken, labels[dim]))))
        return x

    def kept(self, x: Tensor, labels: Labels) -> Tensor:
        """A device's piece of a result of the op."""
        if self.stencil.back:
            for dim, reach, mine in self._wide(labels):
                x = reach.given_back(x, dim, mine)
        else:
            for dim, mine, made in self._windows(labels):
                x = reframe(x, dim, made, mine)
        for dim, _ in _along(labels, self.thin):
            x = x.narrow(dim, 0, _held(labels[dim]))
        return x

    def counted(self, ints: Mapping[Path, tuple[int, Sequence[str]]]) -> Iterator[tuple[Path, int]]:
        """Arguments that count what the op gets of a dim, or makes."""
        return ((path, k * math.prod(map(self._taken, factors))) for path, (k, factors) in ints.items())

    def _taken(self, factor: str) -> int:
        """How much the op is given of a factor, or makes."""
        if factor in self.here:
            return length(self.here[factor].made(self.mine[factor]))
        for f, reach in self.here.items():
            if reach.source == factor:
                return length(reach.frame(self.mine[f]))
        n = share(factor)
        return max(n, 1) if factor in self.thin else n


def put(arguments: Any, path: Path, value: Any) -> None:
    """Set the argument that sits there."""
    *outer, last = path
    for step in outer:
        arguments = arguments[step]
    arguments[last] = value


def _held(label: Sequence[str]) -> int:
    """How much the device has of a dim."""
    return math.prod(map(share, label))


def _one_at_least(r: Range) -> Range:
    return r[0], max(r[1], r[0] + 1)


def _scaled(r: Range, n: int) -> Range:
    return r[0] * n, r[1] * n


def _along(labels: Labels, factors: Container[str]) -> list[tuple[int, str]]:
    """The dims of these labels that are among the factors, which are these."""
    return [(dim, f) for dim, label in enumerate(labels) for f in label if f in factors]
