"""The local form of ops that read a dim around every element or in windows, and of ops that refuse empty dims.

A device fetches what its results read, runs the op on it, and drops the results that belong to others. So the op treats
the ends of the whole dim as it always does. For a gradient the device runs the op on the gradients of its own results,
with zeros for all others, and sends what the op computes for elements of others to their owners. A dim that reads, or
its gradient, may be a block of elements: `(h r)`, where `h` is sharded. Where a device's shard is empty, the op runs
on one element of zeros, and the form drops that result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import pytree, schema_of
from shardlib.primitives.manual_ops import new_resized
from shardlib.rules.local_forms.halo import Range, add_to_owners, crop_or_pad, fetch, intersect, length, shard_range
from shardlib.rules.local_forms.helpers import may_be_empty, shard_size
from shardlib.rules.local_forms.window import Window
from shardlib.rules.rule import Labels, LocalBuilder, Path, WindowMap


@dataclass(frozen=True)
class Reach:
    """The elements of factor `source` (`size` of them) that a range of a dim of results (`count`) reads.

    * `needs`: the ranges that a range of results reads; the form fetches them, and concatenates them in this order.
    * `frame`: the range of inputs that the op runs on, in the same coordinates; the form fills it up with zeros.
    * `computed`: the range of results that the op computes from this frame.
    * `window_map`: the `windows` entry of the rule, given the factor of the results.
    * `dim`: the dim of the operand that is read; None if it is the dim of `source`.
    """

    source: str
    size: int
    count: int
    needs: tuple[Callable[[Range], Range], ...]
    frame: Callable[[Range], Range]
    computed: Callable[[Range], Range]
    window_map: Callable[[str], tuple[str, WindowMap]] | None = None
    dim: int | None = None

    @staticmethod
    def around(word: str, source: str, size: int, before: int, after: int) -> Reach:
        """Reads `before` and `after` elements around each one; in a `ring` those at the other end of the dim too.

        An empty range reads nothing.
        """
        rings = word == "ring"

        def reads(r: Range) -> Range:
            return (r[0] - before, r[1] + after) if length(r) else r

        def need(turn: int) -> Callable[[Range], Range]:
            return lambda r: intersect((0, size), (reads(r)[0] - turn, reads(r)[1] - turn))

        def frame(r: Range) -> Range:
            return (reads if rings else need(0))(r) if length(r) else _at_least_one(r)

        needs = tuple(need(turn) for turn in ((-size, 0, size) if rings else (0,)))
        return Reach(source, size, size, needs, frame, frame)

    @staticmethod
    def windows(source: str, size: int, count: int, window: Window, *, ceil: bool = False) -> Reach:
        """Reads windows, for an op that pads itself.

        With `ceil` the op rounds up, but starts no window in the padding after the dim.
        """
        stride, pad, span = window.stride, window.padding, window.span

        def need(r: Range) -> Range:
            low, high = window.reads(r)
            return (max(low, 0), min(high, size)) if length(r) else (low, high)

        def first(r: Range) -> int:
            """Returns the first result that the op computes from a frame.

            The frame has no padding in front of a device's own results, and fits a window where the whole dim does.
            """
            before = max(-(-pad // stride), r[0] - max(size - span, 0) // stride)
            return r[0] - min(r[0], before) if length(r) else r[0]

        def frame(r: Range) -> Range:
            low, high = need(r)
            if not length(r):
                return low, high
            return first(r) * stride, max(high, min(first(r) * stride + span, size))

        def computed(r: Range) -> Range:
            n = length(frame(r))
            room = n + 2 * pad - span
            results = (-(-room // stride) if ceil else room // stride) + 1
            if ceil and (results - 1) * stride >= n + pad:
                results -= 1
            return first(r), first(r) + results

        to_map = lambda f: (source, window.window_map(f, count))
        return Reach(source, size, count, (lambda r: intersect((0, size), need(r)),), frame, computed, to_map)

    @staticmethod
    def blocks(source: str, size: int, count: int, window: Window) -> Reach:
        """Reads windows around adjacent blocks, for an op that handles windows that reach over the ends."""
        n = window.stride

        def reads(r: Range) -> Range:
            return window.reads(r) if length(r) else _scale(r, n)

        def computed(r: Range) -> Range:
            """Returns the results of all blocks that a window touches."""
            low, high = reads(r)
            return _at_least_one((max(min(low // n, r[0]), 0), min(max(-(-high // n), r[1]), count)))

        to_map = lambda f: (source, window.window_map(f, count))
        need = lambda r: intersect((0, size), reads(r))
        return Reach(source, size, count, (need,), lambda r: _scale(computed(r), n), computed, to_map)

    @staticmethod
    def sliding(
        window: Window, source: str, size: int, count: int, *, back: bool, every: bool, **options: Any
    ) -> Reach:
        """Reads windows, with zeros where they reach over the ends.

        With `back`, the windows are the source, and the results are the elements under them: all of these with
        `every`, else those under some window. A source of size 1 has no name. Kernels refuse to compute nothing, so an
        empty shard computes one element, which the form drops.
        """

        def need(r: Range) -> Range:
            return window.readers(r, size) if back else intersect((0, size), window.reads(r))

        def frame(r: Range) -> Range:
            if not back:
                return window.reads(r)
            return window.covering(need(r), r) if every else _at_least_one(need(r))

        def computed(r: Range) -> Range:
            return window.reads(frame(r)) if back else _at_least_one(r)

        def to_map(f: str) -> tuple[str, WindowMap]:
            return (f, window.window_map(source, size)) if back else (source, window.window_map(f, count))

        return Reach(source, size, count, (need,), frame, computed, to_map, **options)

    def fetch_frame(self, x: Tensor, dim: int, mine: Range, name: str) -> Tensor:
        """Extends the shard of an operand to the frame that this device's results (`mine`) need."""
        parts = fetch(x, dim, (self.source,) if self.source else (), [need(mine) for need in self.needs], name)
        joined = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        low = self.needs[0](mine)[0] if len(parts) == 1 else self.frame(mine)[0]
        return crop_or_pad(joined, dim, (low, low + joined.shape[dim]), self.frame(mine))

    def add_frames(self, x: Tensor, dim: int, mine: Range) -> Tensor:
        """Sums the gradients that all devices computed on their frames; returns this device's shard."""
        (need,) = self.needs
        x = crop_or_pad(x, dim, self.frame(mine), need(mine))
        return add_to_owners(x, dim, (self.source,), need(mine), self.size, name="gradient")


# Takes the local form, the op's arguments by name, and the offset of each dim that starts inside the whole.
Run = Callable[[LocalBuilder, dict[str, Any], Mapping[int, int]], Any]


@dataclass(frozen=True)
class Stencil:
    """An op whose results read `reach`, by the factors of results. A factor that is read is always a dim of its own.

    * `back`: the op is the gradient of such an op; the shape of operand `like` gives the size of the result.
    * `read`: the position of the operand that is read, which plans call `name`; None if all operands are read. Other
      operands have the dims of results.
    * `run`: runs instead of the op.
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
    def windows(self) -> dict[str, WindowMap]:
        """The `windows` of the rule."""
        return dict(r.window_map(f) for f, r in self.reach.items() if r.window_map and r.source not in ("", f))

    def local(self, local: LocalBuilder) -> Any:
        return local.run(self.form(local), *local.args, **local.kwargs)

    def form(self, local: LocalBuilder) -> Callable[..., Any]:
        """Returns the local form as a function of the op's arguments."""
        sharded = {f: r for f, r in self.reach.items() if any(map(local.axes, {f, r.source} - {""}))}
        others = local.rule.local.factors - self.reach.keys() - self.sources.keys()
        thin = {f for f in others if may_be_empty(local, f)}
        run = self.run or (lambda _, arguments, __: local.call.target(**arguments))
        names = [a.name for a in schema_of(local.call.target).arguments]

        def form(*args: Any, **kwargs: Any) -> Any:
            shard = _Shard(self, sharded, {f: shard_range((f,), r.count) for f, r in sharded.items()}, thin)
            flat, tree = pytree.tree_flatten(dict(zip(names, args, strict=False)) | kwargs)
            operands = iter(enumerate(local.rule.operands))
            for i, x in enumerate(flat):
                if isinstance(x, Tensor):
                    flat[i] = shard.extend_operand(x, *next(operands))
            arguments = pytree.tree_unflatten(flat, tree)
            for (first, *rest), size in shard.size_arguments(local.rule.ints):
                set_argument(arguments, (names[first] if isinstance(first, int) else first, *rest), size)
            results = run(local, arguments, shard.begins)
            outs = list(results) if isinstance(results, tuple) else [results]
            labeled = zip(outs, local.rule.results, strict=True)
            outs = [None if x is None else shard.crop_result(x, labels) for x, labels in labeled]
            return tuple(outs) if isinstance(results, tuple) else outs[0]

        return form


def nonempty(local: LocalBuilder, **extra: Any) -> Any:
    """Runs the op itself, on one element of zeros where a shard is empty; `extra` are further arguments of it."""
    target = local.call.target
    if not any(may_be_empty(local, f) for f in local.rule.local.factors):
        return local.op(target, *local.args, **local.kwargs)
    return Stencil({}, run=lambda _, arguments, __: target(**arguments, **extra)).local(local)


@dataclass(frozen=True)
class _Shard:
    """The op's operands and results on one device, whose results are the ranges `mine`.

    `sharded` are the reaches that are sharded; along the factors `thin` the shard may be empty. `begins` collects the
    offset of each dim that starts inside the whole.
    """

    stencil: Stencil
    sharded: Mapping[str, Reach]
    mine: Mapping[str, Range]
    thin: Container[str]
    begins: dict[int, int] = field(default_factory=dict)

    def _read_dims(self, labels: Labels) -> Iterator[tuple[int, Reach, Range]]:
        """Returns the dims of a tensor that results read, or that are gradients of such."""
        for f, reach in self.sharded.items():
            for dim, label in enumerate(labels):
                if dim == reach.dim or (reach.dim is None and reach.source in label):
                    yield dim, reach, self.mine[f]

    def _reading_dims(self, labels: Labels) -> Iterator[tuple[int, Range, Range]]:
        """Returns the dims of a tensor that read: this device's range, and the range that the op computes."""
        for dim, f in _dims_with(labels, self.sharded):
            n, mine = _local_size(labels[dim][1:]), self.mine[f]  # elements per element of the major factor
            yield dim, _scale(mine, n), _scale(self.sharded[f].computed(mine), n)

    def extend_operand(self, x: Tensor, position: int, labels: Labels) -> Tensor:
        """Returns the operand as the op takes it."""
        stencil = self.stencil
        if position == stencil.like or (not stencil.back and stencil.read in (None, position)):
            for dim, reach, mine in self._read_dims(labels):
                frame = reach.frame(mine)
                self.begins[dim] = frame[0]
                if stencil.back:
                    x = new_resized(x, dim, length(frame))
                else:
                    x = reach.fetch_frame(x, dim, mine, stencil.name)
        else:
            for dim, mine, computed in self._reading_dims(labels):
                x = crop_or_pad(x, dim, mine, computed)
        for dim, _ in _dims_with(labels, self.thin):
            x = crop_or_pad(x, dim, (0, x.shape[dim]), (0, math.prod(map(self._op_size, labels[dim]))))
        return x

    def crop_result(self, x: Tensor, labels: Labels) -> Tensor:
        """This device's shard of a result of the op."""
        if self.stencil.back:
            for dim, reach, mine in self._read_dims(labels):
                x = reach.add_frames(x, dim, mine)
        else:
            for dim, mine, computed in self._reading_dims(labels):
                x = crop_or_pad(x, dim, computed, mine)
        for dim, _ in _dims_with(labels, self.thin):
            x = x.narrow(dim, 0, _local_size(labels[dim]))
        return x

    def size_arguments(self, ints: Mapping[Path, tuple[int, Sequence[str]]]) -> Iterator[tuple[Path, int]]:
        """Returns the arguments that hold sizes of what the op takes or computes."""
        return ((path, k * math.prod(map(self._op_size, factors))) for path, (k, factors) in ints.items())

    def _op_size(self, factor: str) -> int:
        """Returns the size of a factor as the op takes or computes it."""
        if factor in self.sharded:
            return length(self.sharded[factor].computed(self.mine[factor]))
        for f, reach in self.sharded.items():
            if reach.source == factor:
                return length(reach.frame(self.mine[f]))
        n = shard_size(factor)
        return max(n, 1) if factor in self.thin else n


def set_argument(arguments: Any, path: Path, value: Any) -> None:
    *outer, last = path
    for step in outer:
        arguments = arguments[step]
    arguments[last] = value


def _local_size(label: Sequence[str]) -> int:
    return math.prod(map(shard_size, label))


def _at_least_one(r: Range) -> Range:
    return r[0], max(r[1], r[0] + 1)


def _scale(r: Range, n: int) -> Range:
    return r[0] * n, r[1] * n


def _dims_with(labels: Labels, factors: Container[str]) -> list[tuple[int, str]]:
    """Returns the dims whose labels contain one of these factors, with that factor."""
    return [(dim, f) for dim, label in enumerate(labels) for f in label if f in factors]
