"""Layouts: where the elements of one value live on a mesh.

A layout lists the factors of every dim (major first); a factor has a size and mesh axes (major first). A value may also
be a *partial sum*: each device holds an addend, and the value is their sum (or max, or min) over some axes.

Sharding is nested chunking. A factor of size 10 over an axis of 4 devices has shards of 3, 3, 3, 1; a second axis of 2
splits these into 2+1, 2+1, 2+1, 1+0. So each device may have its own local shape, a function of its coordinates alone.
Where the user chose the shard sizes, the factor's size is `ShardSizes` and prints them: `16@data=[5 3 8 0]`.
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
from shardlib.sharding.chunks import (
    ShardSizes,
    UnchunkedSize,
    is_even,
    largest_shard,
    restrict_size,
    shard_range,
    shard_sizes,
)
from shardlib.sharding.mesh.axis import Axis, Coords, group_size
from shardlib.sharding.scanner import Scanner

__all__ = ["Axis", "Coords", "Dim", "Factor", "Layout", "PartialSum", "ShardSizes", "shard_range"]

REDUCTIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Factor:
    """One component of a dim: `size` elements, sharded over `axes` (major first), in chunks or in chosen `ShardSizes`.

    Example:
        >>> data = Axis("data", 4)
        >>> [str(Factor(ShardSizes(sizes, (data,)), (data,))) for sizes in ((5, 3, 8, 0), (4, 4, 4, 4))]
        ['16@data=[5 3 8 0]', '16@data']
    """

    size: int
    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.size, UnchunkedSize):
            object.__setattr__(self, "size", restrict_size(self.size, self.axes))

    @property
    def ways(self) -> int:
        return group_size(self.axes)

    @property
    def is_even(self) -> bool:
        return is_even(self.size, self.axes)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The shard size of every device along `axes`, major first."""
        return shard_sizes(self.size, self.axes)

    def __str__(self) -> str:
        if not self.axes:
            return str(self.size)
        names = " ".join(map(str, self.axes))
        text = f"{self.size}@{names}" if len(self.axes) == 1 else f"{self.size}@({names})"
        return f"{text}=[{' '.join(map(str, self.size.sizes))}]" if isinstance(self.size, ShardSizes) else text


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class PartialSum:
    """A reduction over `axes` that is still to be done: `kind` is "sum", "max", "min" or "owned".

    A value that is "owned" is a sum: each device computed some rows only, and its other rows count as zeros.
    """

    axes: tuple[Axis, ...]
    kind: str = "sum"

    def __post_init__(self) -> None:
        if self.kind not in (*REDUCTIONS, "owned"):
            raise ShardingError(f"{self.kind!r} is no kind of partial sum", remedy=f"one of {', '.join(REDUCTIONS)}")

    def __str__(self) -> str:
        names = " ".join(map(str, self.axes))
        body = names if len(self.axes) == 1 else f"({names})"
        return f"+{body}" if self.kind == "sum" else f"{self.kind}+{body}"


@dataclass(frozen=True)
class Layout:
    """The dims of a value as factors, and its partial sums (`pending`).

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
        """The axes that shard this value, without those of partial sums."""
        return tuple(a for f in self.factors for a in f.axes)

    @cached_property
    def pending_axes(self) -> tuple[Axis, ...]:
        return tuple(a for p in self.pending for a in p.axes)

    @property
    def is_replicated(self) -> bool:
        return not self.axes and not self.pending

    @cached_property
    def canonical(self) -> Layout:
        """The same layout in its shortest form: neighboring factors merge if the shards of their product are theirs.

        Example:
            >>> data = Axis("data", 4)
            >>> str(Layout(((Factor(8, (data,)), Factor(3)),)).canonical)
            '24@data'
        """
        dims = []
        for dim in self.dims:
            factors: list[Factor] = []
            empty = len(dim) > 1 and not all(f.size for f in dim)  # every device has all of an empty dim
            for f in (Factor(0),) if empty else dim:
                axes = tuple(a for a in f.axes if a.size > 1)
                last = factors[-1] if factors else None
                # Adjacent parts of one mesh axis merge into one axis, which shards an uneven factor differently.
                stays_nested = f.is_even or not (last and last.axes) or len(Axis.merge((last.axes[-1], axes[0]))) == 2
                if last and not axes and isinstance(last.size, ShardSizes):
                    factors[-1] = Factor(ShardSizes([n * f.size for n in last.size.sizes], last.axes), last.axes)
                elif last and last.size == 1 and not last.axes:
                    factors[-1] = Factor(f.size, Axis.merge(axes))
                elif last and (
                    (not axes and last.is_even) or (last.ways == last.size and stays_nested and _is_chunked(last, f))
                ):
                    factors[-1] = Factor(last.size * f.size, Axis.merge((*last.axes, *axes)))
                else:
                    factors.append(Factor(f.size, Axis.merge(axes)))
            dims.append(tuple(factors) or (Factor(1),))
        return Layout(tuple(dims), self.pending)

    @cached_property
    def chunked(self) -> Layout:
        """The same axes on the same factors, all sharded in chunks instead of chosen shard sizes."""
        return Layout(tuple(tuple(Factor(int(f.size), f.axes) for f in dim) for dim in self.dims), self.pending)

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """The shape of the shard at `coords`."""
        sizes = ((shard_range(f.size, f.axes, coords) for f in dim) for dim in self.dims)
        return tuple(math.prod(stop - start for start, stop in dim) for dim in sizes)

    def max_local_numel(self) -> int:
        """The number of elements of the largest shard."""
        return math.prod(largest_shard(f.size, f.axes) for f in self.factors)

    def scatter(self, whole: torch.Tensor, coords: Coords) -> torch.Tensor:
        """Returns the shard of `whole` at `coords`; of a partial sum, the origin holds the value and others zeros."""
        local = _unflatten_factors(whole, self)
        for i, f in enumerate(self.factors):
            start, stop = shard_range(f.size, f.axes, coords)
            if (start, stop) != (0, f.size):
                local = local.narrow(i, start, stop - start)
        local = local.reshape(self.local_shape(coords))
        for p in self.pending:
            if p.kind == "sum" and any(a.coord(coords) for a in p.axes):
                local = torch.zeros_like(local)
        return local

    def gather(self, shards: Sequence[tuple[Coords, torch.Tensor]]) -> torch.Tensor:
        """Returns the whole tensor from the shards of all devices: `(coords, shard)` pairs in any order.

        Raises `ShardingError` if shards or addends are missing.
        """
        first = shards[0][1]
        parts: dict[tuple[tuple[int, int], ...], dict[tuple[int, ...], torch.Tensor]] = {}
        for coords, local in shards:
            ranges = tuple(shard_range(f.size, f.axes, coords) for f in self.factors)
            parts.setdefault(ranges, {}).setdefault(tuple(a.coord(coords) for a in self.pending_axes), local)
        whole = first.new_empty([f.size for f in self.factors])
        devices = group_size(self.pending_axes)
        held = sum(math.prod(stop - start for start, stop in ranges) for ranges in parts)
        if held != whole.numel() or any(len(addends) != devices for addends in parts.values()):
            raise ShardingError(
                f"layout {self} cannot be gathered from {len(shards)} shards",
                [f"they hold {held} of {whole.numel()} elements" if held != whole.numel() else "addends are missing"],
                rule="gathering takes the shards of all devices",
            )
        for ranges, addends in parts.items():
            value = _reduce_addends(list(addends.values()), self.pending)
            where = tuple(slice(*r) for r in ranges)
            whole[where] = value.reshape([stop - start for start, stop in ranges])
        return whole.reshape(self.shape)

    def __str__(self) -> str:
        dims = ", ".join(str(d[0]) if len(d) == 1 else f"({' '.join(map(str, d))})" for d in self.dims)
        pending = " ".join(map(str, self.pending))
        return f"{dims} {pending}".strip() if pending else dims

    @staticmethod
    def parse(text: str, axis_sizes: Mapping[str, int]) -> Layout:
        """Parses the text that `str` prints; `axis_sizes` are the mesh's.

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
    pieces = scan.numbers("the shard sizes, [5 3 8 0]")
    if len(pieces) != group_size(axes) or sum(pieces) != size:
        scan.fail("there is a shard size for every device along the axes, and they add up to the size")
    return Factor(ShardSizes(pieces, axes), axes)


def _read_axes(scan: Scanner, axis_sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    return scan.one_or_more(lambda: _read_axis(scan, axis_sizes))


def _read_axis(scan: Scanner, axis_sizes: Mapping[str, int]) -> Axis:
    if scan.is_name and scan.token not in axis_sizes:
        scan.fail(f"the mesh ({', '.join(f'{k}={n}' for k, n in axis_sizes.items())}) has no axis {scan.token!r}")
    name, pre, size = scan.axis()
    return Axis(name, axis_sizes[name] if size is None else size, pre, axis_sizes[name])


def _is_chunked(*factors: Factor) -> bool:
    return not any(isinstance(f.size, ShardSizes) for f in factors)


def _unflatten_factors(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Views `whole` with one dim per factor, in einops' notation: `(a b) c -> a b c`."""
    if all(len(d) == 1 for d in layout.dims):
        return whole
    pattern, sizes = _einops_pattern(tuple(tuple(int(f.size) for f in d) for d in layout.dims))
    return rearrange(whole, pattern, **sizes)


@lru_cache(maxsize=4096)
def _einops_pattern(dims: tuple[tuple[int, ...], ...]) -> tuple[str, dict[str, int]]:
    names = (f"f{i}" for i in itertools.count())
    groups = [[(next(names), n) for n in dim] for dim in dims]
    left = " ".join(f"({' '.join(n for n, _ in g)})" for g in groups)
    right = " ".join(n for g in groups for n, _ in g)
    return f"{left} -> {right}", {n: size for g in groups for n, size in g}


def _reduce_addends(addends: list[torch.Tensor], pending: Sequence[PartialSum]) -> torch.Tensor:
    kinds = {p.kind for p in pending} or {"sum"}
    if len(kinds) > 1:
        raise ShardingError(f"one value cannot have two kinds of partial sums: {', '.join(sorted(kinds))}")
    return reduce(REDUCTIONS[kinds.pop()], addends)
