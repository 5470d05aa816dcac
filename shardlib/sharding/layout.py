"""Layouts: where the elements of one value live on a mesh.

A layout has, for every dim, its factors (major first); a factor has a size and mesh axes (major first). Besides that a
value may be *pending*: each device holds an addend, and the value is their sum (or max, or min) over some axes.

Splitting is nested chunking. The first axis of a factor of size 10 on 4 devices gives 3, 3, 3, 1; a second axis of 2
cuts each of these to 2+1, 2+1, 2+1, 1+0. So each device may have its own local shape, known from its coordinates alone.
Where somebody chose the pieces, the factor's size is `Pieces` and is printed with them: `16@data=[5 3 8 0]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import torch
from einops import rearrange

from shardlib.core.errors import ShardingError
from shardlib.sharding.chunks import Pieces, Placed, even, fullest, over, span, spans
from shardlib.sharding.mesh.axis import Axis, Coords, ways
from shardlib.sharding.scanner import Scanner

__all__ = ["Axis", "Coords", "Dim", "Factor", "Layout", "PartialSum", "Pieces", "span"]

REDUCTIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Factor:
    """One component of a dim: `size` elements, cut over `axes`, major first; in chunks, or as `Pieces` say.

    Example:
        >>> data = Axis("data", 4)
        >>> str(Factor(Pieces((5, 3, 8, 0), (data,)), (data,))), str(Factor(Pieces((4, 4, 4, 4), (data,)), (data,)))
        ('16@data=[5 3 8 0]', '16@data')
    """

    size: int
    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.size, Placed):
            object.__setattr__(self, "size", over(self.size, self.axes))

    @property
    def ways(self) -> int:
        return ways(self.axes)

    @property
    def even(self) -> bool:
        return even(self.size, self.axes)

    @property
    def pieces(self) -> tuple[int, ...]:
        """How much of it every device along `axes` holds, major first."""
        return spans(self.size, self.axes)

    def __str__(self) -> str:
        if not self.axes:
            return str(self.size)
        names = " ".join(map(str, self.axes))
        text = f"{self.size}@{names}" if len(self.axes) == 1 else f"{self.size}@({names})"
        return f"{text}=[{' '.join(map(str, self.size.sizes))}]" if isinstance(self.size, Pieces) else text


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class PartialSum:
    """A reduction that has not happened yet: `kind` ("sum", "max" or "min") over `axes`.

    Of a value that is "owned" each device has some rows only, so that its sum takes zeros for the others.
    """

    axes: tuple[Axis, ...]
    kind: str = "sum"

    def __post_init__(self) -> None:
        if self.kind not in (*REDUCTIONS, "owned"):
            raise ShardingError(f"a value cannot be pending {self.kind!r}", remedy=f"one of {', '.join(REDUCTIONS)}")

    def __str__(self) -> str:
        names = " ".join(map(str, self.axes))
        body = names if len(self.axes) == 1 else f"({names})"
        return f"+{body}" if self.kind == "sum" else f"{self.kind}+{body}"


@dataclass(frozen=True)
class Layout:
    """Dims of factors, and pending reductions.

    Example:
        >>> tensor = Axis("tensor", 4)
        >>> layout = Layout(((Factor(3), Factor(8, (tensor,)), Factor(16)), (Factor(10),)))
        >>> str(layout)
        '(3 8@tensor 16), 10'
        >>> layout.shape, layout.local_shape({"tensor": 1})
        ((384, 10), (96, 10))
    """

    dims: tuple[Dim, ...]
    pending: tuple[PartialSum, ...] = ()

    @staticmethod
    def replicated(shape: Sequence[int]) -> Layout:
        return Layout(tuple((Factor(n),) for n in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    @cached_property
    def factors(self) -> Dim:
        return tuple(f for dim in self.dims for f in dim)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that cut this value (not the pending ones)."""
        return tuple(a for f in self.factors for a in f.axes)

    @cached_property
    def pending_axes(self) -> tuple[Axis, ...]:
        return tuple(a for p in self.pending for a in p.axes)

    @property
    def is_replicated(self) -> bool:
        return not self.axes and not self.pending

    @cached_property
    def canonical(self) -> Layout:
        """The same layout in its shortest form: neighboring factors whose pieces are pieces of their product melt.

        Example:
            >>> data = Axis("data", 4)
            >>> str(Layout(((Factor(8, (data,)), Factor(3)),)).canonical)
            '24@data'
        """
        dims = []
        for dim in self.dims:
            factors: list[Factor] = []
            empty = len(dim) > 1 and not all(f.size for f in dim)  # of nothing everybody has everything
            for f in (Factor(0),) if empty else dim:
                axes = tuple(a for a in f.axes if a.size > 1)
                last = factors[-1] if factors else None
                # Parts of one mesh axis that come together would cut as one, which on an uneven factor cuts elsewhere.
                apart = f.even or not (last and last.axes) or len(Axis.merge((last.axes[-1], axes[0]))) == 2
                if last and not axes and isinstance(last.size, Pieces):
                    factors[-1] = Factor(Pieces([n * f.size for n in last.size.sizes], last.axes), last.axes)
                elif last and last.size == 1 and not last.axes:
                    factors[-1] = Factor(f.size, Axis.merge(axes))
                elif last and ((not axes and last.even) or (last.ways == last.size and apart and _plain(last, f))):
                    factors[-1] = Factor(last.size * f.size, Axis.merge((*last.axes, *axes)))
                else:
                    factors.append(Factor(f.size, Axis.merge(axes)))
            dims.append(tuple(factors) or (Factor(1),))
        return Layout(tuple(dims), self.pending)

    @cached_property
    def chunked(self) -> Layout:
        """The same axes on the same factors, all cut in chunks: where the layout is, but for chosen pieces."""
        return Layout(tuple(tuple(Factor(int(f.size), f.axes) for f in dim) for dim in self.dims), self.pending)

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """The shape of what the device at `coords` holds."""
        sizes = ((span(f.size, f.axes, coords) for f in dim) for dim in self.dims)
        return tuple(math.prod(stop - start for start, stop in dim) for dim in sizes)

    def max_local_numel(self) -> int:
        """Elements on the device that holds most (the one at the origin)."""
        return math.prod(fullest(f.size, f.axes) for f in self.factors)

    def scatter(self, whole: torch.Tensor, coords: Coords) -> torch.Tensor:
        """The part of `whole` that the device at `coords` holds (pending sums: the origin holds all, others zeros)."""
        local = _rearranged(whole, self)
        for i, f in enumerate(self.factors):
            start, stop = span(f.size, f.axes, coords)
            if (start, stop) != (0, f.size):
                local = local.narrow(i, start, stop - start)
        local = local.reshape(self.local_shape(coords))
        for p in self.pending:
            if p.kind == "sum" and any(a.coord(coords) for a in p.axes):
                local = torch.zeros_like(local)
        return local

    def gather(self, shards: Sequence[tuple[Coords, torch.Tensor]]) -> torch.Tensor:
        """The whole tensor, from the local tensors of all devices (`(coords, local)` pairs, any order)."""
        first = shards[0][1]
        parts: dict[tuple[tuple[int, int], ...], dict[tuple[int, ...], torch.Tensor]] = {}
        for coords, local in shards:
            spans = tuple(span(f.size, f.axes, coords) for f in self.factors)
            parts.setdefault(spans, {}).setdefault(tuple(a.coord(coords) for a in self.pending_axes), local)
        whole = first.new_empty([f.size for f in self.factors])
        devices = ways(self.pending_axes)
        held = sum(math.prod(stop - start for start, stop in spans) for spans in parts)
        if held != whole.numel() or any(len(addends) != devices for addends in parts.values()):
            raise ShardingError(
                f"layout {self} cannot be gathered from {len(shards)} shards",
                [f"they hold {held} of {whole.numel()} elements" if held != whole.numel() else "addends are missing"],
                rule="gathering takes the shards of all devices",
            )
        for spans, addends in parts.items():
            value = _combine(list(addends.values()), self.pending)
            where = tuple(slice(*s) for s in spans)
            whole[where] = value.reshape([stop - start for start, stop in spans])
        return whole.reshape(self.shape)

    def __str__(self) -> str:
        dims = ", ".join(str(d[0]) if len(d) == 1 else f"({' '.join(map(str, d))})" for d in self.dims)
        pending = " ".join(map(str, self.pending))
        return f"{dims} {pending}".strip() if pending else dims

    @staticmethod
    def parse(text: str, axis_sizes: Mapping[str, int]) -> Layout:
        """Read what `str` prints; `axis_sizes` are the mesh's.

        Example:
            >>> text = "(3 8@tensor:(1)2 16), 10@(data tensor:(2)2)=[4 0 6 0] +pod"
            >>> str(Layout.parse(text, {"tensor": 4, "data": 2, "pod": 2})) == text
            True
        """

        scan = Scanner(text, "layout", rule=_RULE)
        dims: list[Dim] = []
        if scan.token == "(" or scan.token.isdecimal():
            dims.append(_read_dim(scan, axis_sizes))
            while scan.take(","):
                dims.append(_read_dim(scan, axis_sizes))
        pending = []
        while scan.token:
            kind = "sum" if scan.token == "+" else scan.name("a reduction")
            scan.expect("+", "'+' and the axes of a reduction must stand here")
            pending.append(PartialSum(_read_axes(scan, axis_sizes), kind))
        return Layout(tuple(dims), tuple(pending))


_RULE = (
    "a layout is dims separated by commas (8, 8@axis, 8@(a b), 8@axis=[5 3], or factors in parentheses), "
    "then reductions (+axis)"
)


def _read_dim(scan: Scanner, axis_sizes: Mapping[str, int]) -> Dim:
    return scan.one_or_more(lambda: _read_factor(scan, axis_sizes))


def _read_factor(scan: Scanner, axis_sizes: Mapping[str, int]) -> Factor:
    size = scan.number("a size")
    axes = _read_axes(scan, axis_sizes) if scan.take("@") else ()
    if not scan.take("="):
        return Factor(size, axes)
    pieces = scan.numbers("the pieces of a size, [5 3 8 0]")
    if len(pieces) != ways(axes) or sum(pieces) != size:
        scan.fail("there is a piece for every device along the axes, and they add up to the size")
    return Factor(Pieces(pieces, axes), axes)


def _read_axes(scan: Scanner, axis_sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    return scan.one_or_more(lambda: _read_axis(scan, axis_sizes))


def _read_axis(scan: Scanner, axis_sizes: Mapping[str, int]) -> Axis:
    if scan.is_name and scan.token not in axis_sizes:
        scan.fail(f"the mesh ({', '.join(f'{k}={n}' for k, n in axis_sizes.items())}) has no axis {scan.token!r}")
    name = scan.name("a mesh axis")
    if not scan.take(":"):
        return Axis(name, axis_sizes[name])
    scan.expect("(", "a part of an axis is written axis:(pre)size")
    pre = scan.number("the product of the more major parts")
    scan.expect(")", "a part of an axis is written axis:(pre)size")
    return Axis(name, scan.number("the size of the part"), pre, axis_sizes[name])


def _plain(*factors: Factor) -> bool:
    return not any(isinstance(f.size, Pieces) for f in factors)


def _rearranged(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`whole` viewed with one dim per factor, written as einops would: `(a b) c -> a b c`."""
    if all(len(d) == 1 for d in layout.dims):
        return whole
    pattern, sizes = _pattern(tuple(tuple(int(f.size) for f in d) for d in layout.dims))
    return rearrange(whole, pattern, **sizes)


@lru_cache(maxsize=4096)
def _pattern(dims: tuple[tuple[int, ...], ...]) -> tuple[str, dict[str, int]]:
    names = (f"f{i}" for i in itertools.count())
    groups = [[(next(names), n) for n in dim] for dim in dims]
    left = " ".join(f"({' '.join(n for n, _ in g)})" for g in groups)
    right = " ".join(n for g in groups for n, _ in g)
    return f"{left} -> {right}", {n: size for g in groups for n, size in g}


def _combine(addends: list[torch.Tensor], pending: Sequence[PartialSum]) -> torch.Tensor:
    kinds = {p.kind for p in pending} or {"sum"}
    if len(kinds) > 1:
        raise ShardingError(f"one value cannot be pending in two ways: {', '.join(sorted(kinds))}")
    return reduce(REDUCTIONS[kinds.pop()], addends)
