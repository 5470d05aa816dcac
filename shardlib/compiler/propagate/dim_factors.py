"""Dims made of factors: which dims are the same all over the program.

Every dim of every value is a list of factors, major first. Unifying two dims makes them the same list: factors of one
size become one, and a larger factor is split at the other's boundary. All factors that were ever unified are a *class*.

Two dims can be unified only if their boundaries chain by divisibility: (2 6) and (4 3) become (2 2 3), but (2 3) and (3
2) have no common refinement, and stay as they were.

A class has one size. Where a layout chooses its shard sizes, these hold wherever the class occurs; the first choice
stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count, pairwise

from shardlib.sharding.chunks import ShardSizes, UnchunkedSize
from shardlib.sharding.split_axes import split_axes

DimFactor = int
Lock = tuple[tuple[int, ...], ShardSizes | None]  # ways (major first), and the shard sizes where they are chosen


class FactorClasses:
    """Holds all factors: a union-find, in which they can be split."""

    def __init__(self) -> None:
        self._parent: list[DimFactor] = []
        self._size: list[int] = []
        self._parts: list[tuple[DimFactor, DimFactor] | None] = []  # (major, minor) once split
        self._locks: list[frozenset[Lock]] = []  # shardings that a split must leave expressible
        self._chosen: dict[DimFactor, tuple[int, ShardSizes]] = {}  # of classes: the rank of the choice, and the size
        self._order = count()  # ranks for `choose`, in the order of the annotations
        self.refused: dict[DimFactor, None] = {}  # factors that locks kept from being split

    def new(self, size: int) -> list[DimFactor]:
        """Returns a new dim of one factor, or of none for size 1."""
        if size == 1:
            return []
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._parts.append(None)
        self._locks.append(frozenset())
        return [len(self._parent) - 1]

    def find(self, factor: DimFactor) -> DimFactor:
        parent = self._parent
        while parent[factor] != factor:
            parent[factor] = parent[parent[factor]]
            factor = parent[factor]
        return factor

    def resolve(self, dim: Iterable[DimFactor]) -> list[DimFactor]:
        """Returns the present factors of `dim`: the representatives of classes, split as far as any dim needed it."""
        out = [self.find(factor) for factor in dim]
        if all(map(self._is_whole, out)):
            return out
        stack, out = out[::-1], []
        while stack:
            factor = self.find(stack.pop())
            parts = self._parts[factor]
            if parts is None:
                out.append(factor)
            else:
                stack += [parts[1], parts[0]]
        return out

    def _is_whole(self, factor: DimFactor) -> bool:
        return self._parts[factor] is None

    def size(self, factor: DimFactor) -> int:
        """Returns the size of a factor: `ShardSizes` where its class has chosen ones, or the size of `place`."""
        factor = self.find(factor)
        return self._chosen[factor][1] if factor in self._chosen else self._size[factor]

    def place(self, factor: DimFactor, size: UnchunkedSize) -> None:
        """Sets the shards of a class without chosen sizes; no factor may be split later."""
        self._size[self.find(factor)] = size

    def lock(self, factor: DimFactor, ways: Sequence[int], chosen: ShardSizes | None = None) -> None:
        """Demands that splits of `factor` keep a sharding in `ways` (major first), or `chosen` sizes, expressible."""
        factor = self.find(factor)
        self._locks[factor] |= {(tuple(ways), chosen)}

    @property
    def chosen(self) -> bool:
        """Returns whether any class has chosen shard sizes."""
        return bool(self._chosen)

    def choose(self, factor: DimFactor, sizes: ShardSizes) -> None:
        """Gives the class of `factor` these shard sizes, unless an earlier choice stands."""
        self._choose(factor, sizes, next(self._order))

    def _choose(self, factor: DimFactor, sizes: ShardSizes, rank: int) -> None:
        factor = self.find(factor)
        before = self._chosen.get(factor, (rank, sizes))
        self._chosen[factor] = min(before, (rank, sizes), key=lambda choice: choice[0])

    def refine(self, dim: Sequence[DimFactor], sizes: Sequence[int]) -> list[list[DimFactor]] | None:
        """Splits `dim` at the boundaries of `sizes`, major first; returns each part's factors, or None if it cannot."""
        dim = self.resolve(dim)
        parts = [self.new(int(n)) for n in sizes]
        return parts if self.unify([factor for p in parts for factor in p], dim) else None

    def unify(self, a: Sequence[DimFactor], b: Sequence[DimFactor]) -> bool:
        """Unifies two dims; returns False, and changes nothing, if they have no common refinement."""
        left, right = self.resolve(a), self.resolve(b)
        if left == right:
            return True
        if len(left) == len(right) == 1 and self._size[left[0]] == self._size[right[0]]:
            return self._merge(left, right)
        if 0 in (sizes := [self._size[x] for x in left]) or 0 in (self._size[x] for x in right):
            # An empty dim has no boundaries.
            if sizes != [self._size[x] for x in right]:
                return False
        elif not self._refinable(left, right) or not self._repeats_fit(left, right):
            return False
        merged = self._merge(left, right)
        assert merged, "two dims with a common refinement were not unified"
        return True

    def _merge(self, left: list[DimFactor], right: list[DimFactor]) -> bool:
        """Unifies two lists, from the minor side; returns False, with half of it done, where a split is refused."""
        while left and right:
            x, y = self.find(left[-1]), self.find(right[-1])
            if x == y:
                left.pop(), right.pop()
            elif self._parts[x] is not None:
                left[-1:] = self._halves(x)  # split meanwhile, through another occurrence of the same factor
            elif self._parts[y] is not None:
                right[-1:] = self._halves(y)
            elif self._size[x] == self._size[y]:
                self._parent[y] = x
                self._locks[x] |= self._locks[y]
                if y in self._chosen:
                    rank, sizes = self._chosen.pop(y)
                    self._choose(x, sizes, rank)
                left.pop(), right.pop()
            elif not (
                self._split(x, self._size[y]) if self._size[x] > self._size[y] else self._split(y, self._size[x])
            ):
                return False
        return True

    def _refinable(self, left: Sequence[DimFactor], right: Sequence[DimFactor]) -> bool:
        """Returns whether there is a list of factors that both can be split into."""
        chain = sorted(self._bounds(left) | self._bounds(right))
        if any(y % x for x, y in pairwise(chain)):
            return False
        if math.prod(map(self.size, left)) != math.prod(map(self.size, right)):
            return False
        return self._fits(left, chain) and self._fits(right, chain)

    def _repeats_fit(self, left: Sequence[DimFactor], right: Sequence[DimFactor]) -> bool:
        """Returns whether the dims can be unified although a factor occurs twice, and is split at both places."""
        factors = dict.fromkeys((*left, *right))
        if len(factors) == len(left) + len(right):
            return True
        trial = FactorClasses()
        copy = {factor: trial.new(int(self.size(factor)))[0] for factor in factors}
        for factor, same in copy.items():
            trial._locks[same] = self._locks[self.find(factor)]
        return trial._merge([copy[x] for x in left], [copy[x] for x in right])

    def _halves(self, factor: DimFactor) -> tuple[DimFactor, DimFactor]:
        parts = self._parts[factor]
        assert parts is not None
        return parts

    def _bounds(self, factors: Sequence[DimFactor]) -> set[int]:
        """Returns the products of the sizes from the minor side: the boundaries of factors."""
        bounds, inner = {1}, 1
        for factor in reversed(factors):
            inner *= self.size(factor)
            bounds.add(inner)
        return bounds

    def _fits(self, factors: Sequence[DimFactor], chain: Sequence[int]) -> bool:
        """Returns whether the locks of `factors` allow splits at all of `chain`'s boundaries."""
        inner = 1
        for factor in reversed(factors):
            outer = inner * self.size(factor)
            inside = [c for c in chain if inner < c < outer]
            for lock in self._locks[self.find(factor)] if inside else ():
                edges = [inner, *inside, outer]
                sizes = [y // x for x, y in pairwise(edges)][::-1]
                if divide_lock(sizes, lock) is None:
                    self.refused[factor] = None
                    return False
            inner = outer
        return True

    def _split(self, factor: DimFactor, minor: int) -> bool:
        major, rest = divmod(self._size[factor], minor)
        parted = [divide_lock([major, minor], lock) for lock in self._locks[factor]]
        if rest or None in parted:
            return False
        (major_factor,), (minor_factor,) = self.new(major), self.new(minor)
        self._parts[factor] = (major_factor, minor_factor)
        for locks in parted:
            for part, (ways, sizes) in zip((major_factor, minor_factor), locks or (), strict=True):
                if ways:
                    self.lock(part, ways, sizes)
        if factor in self._chosen:
            rank, chosen = self._chosen.pop(factor)
            if isinstance(size := divide_size(chosen, minor), ShardSizes):
                self._choose(major_factor, size, rank)
        return True


def divide_lock(sizes: Sequence[int], lock: Lock) -> list[Lock] | None:
    """Divides the sharding of a factor among parts of it, with these sizes, major first; None if it does not fit.

    Chosen shards that consist of whole rows of the minor parts are shards of the major part.

    Example:
        >>> from shardlib.sharding.mesh.axis import Axis
        >>> chosen = ShardSizes((20, 12, 32, 0), (Axis("data", 4),))
        >>> [size.sizes for _, size in divide_lock([16, 4], ((2, 2), chosen)) if size]
        [(5, 3, 8, 0)]
        >>> divide_lock([8, 8], ((2, 2), chosen)) is None
        True
    """
    ways, chosen = lock
    if chosen is None:
        parts = split_axes(sizes, ways)
        return None if parts is None else [(tuple(ways[i] for i in part), None) for part in parts]
    size = divide_size(chosen, math.prod(sizes[1:]))
    if size is None:
        return None
    return [(ways, size if isinstance(size, ShardSizes) else None), *(((), None) for _ in sizes[1:])]


def divide_size(size: ShardSizes, by: int) -> int | None:
    """Returns the size in rows of `by` elements; None if a shard ends inside a row."""
    if by == 0 or any(n % by for n in size.sizes):
        return None
    return ShardSizes.make_size([n // by for n in size.sizes], size.axes)
