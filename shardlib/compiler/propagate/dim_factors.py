"""Dims made of leaves: what is the same dim all over the program.

Every dim of every value is a list of leaves, major first. Unifying two dims makes them the same list: leaves of one
size become one, a larger leaf is split at the other's boundary. All leaves that were ever made one are a *class*.

Two dims can be unified only if their boundaries chain by divisibility: (2 6) and (4 3) become (2 2 3), but (2 3) and (3
2) have no common refinement, and then nothing happens.

A class has one size: where pieces of it are chosen, all that is the same dim is cut there. The first choice stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count, pairwise

from shardlib.sharding.chunks import ShardSizes, UnchunkedSize
from shardlib.sharding.split_axes import split_axes

DimFactor = int
Lock = tuple[tuple[int, ...], ShardSizes | None]  # ways (major first), and the pieces where they are chosen


class Dims:
    """Union-find over leaves that can be split."""

    def __init__(self) -> None:
        self._parent: list[DimFactor] = []
        self._size: list[int] = []
        self._parts: list[tuple[DimFactor, DimFactor] | None] = []  # (major, minor) once split
        self._locks: list[frozenset[Lock]] = []  # cuts that a split must leave expressible
        self._pieces: dict[
            DimFactor, tuple[int, ShardSizes]
        ] = {}  # of classes with chosen pieces: (its rank, the size)
        self.order = count()  # ranks for `choose`, in the order of the annotations
        self.refused: dict[DimFactor, None] = {}  # what would have been split, if locks had allowed it

    def new(self, size: int) -> list[DimFactor]:
        """A dim of its own; dims of size 1 have no leaves."""
        if size == 1:
            return []
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._parts.append(None)
        self._locks.append(frozenset())
        return [len(self._parent) - 1]

    def find(self, leaf: DimFactor) -> DimFactor:
        parent = self._parent
        while parent[leaf] != leaf:
            parent[leaf] = parent[parent[leaf]]
            leaf = parent[leaf]
        return leaf

    def leaves(self, dim: Iterable[DimFactor]) -> list[DimFactor]:
        """`dim` as it stands now: roots, split as far as anything needed them split."""
        out = [self.find(leaf) for leaf in dim]
        if all(map(self._is_whole, out)):
            return out
        stack, out = out[::-1], []
        while stack:
            leaf = self.find(stack.pop())
            parts = self._parts[leaf]
            if parts is None:
                out.append(leaf)
            else:
                stack += [parts[1], parts[0]]
        return out

    def _is_whole(self, leaf: DimFactor) -> bool:
        return self._parts[leaf] is None

    def size(self, leaf: DimFactor) -> int:
        """Its size; `ShardSizes` where the class has chosen ones, or as it was placed."""
        leaf = self.find(leaf)
        return self._pieces[leaf][1] if leaf in self._pieces else self._size[leaf]

    def place(self, leaf: DimFactor, size: UnchunkedSize) -> None:
        """Say where a class is cut for which nobody has chosen pieces; no leaf is split any more."""
        self._size[self.find(leaf)] = size

    def lock(self, leaf: DimFactor, ways: Sequence[int], pieces: ShardSizes | None = None) -> None:
        """Demand that splits of `leaf` keep a cut into `ways` (major first), or `pieces`, expressible on the parts."""
        leaf = self.find(leaf)
        self._locks[leaf] |= {(tuple(ways), pieces)}

    @property
    def chosen(self) -> bool:
        """Returns whether any class has chosen pieces."""
        return bool(self._pieces)

    def choose(self, leaf: DimFactor, pieces: ShardSizes, rank: int) -> None:
        """Cut the class of `leaf` into `pieces`, unless a choice of lower `rank` stands."""
        leaf = self.find(leaf)
        self._pieces[leaf] = min(self._pieces.get(leaf, (rank, pieces)), (rank, pieces), key=lambda choice: choice[0])

    def refine(self, dim: Sequence[DimFactor], sizes: Sequence[int]) -> list[list[DimFactor]] | None:
        """Split `dim` at the boundaries of `sizes` (major first); the leaves of each part, or None if it cannot be."""
        dim = self.leaves(dim)
        parts = [self.new(int(n)) for n in sizes]
        return parts if self.unify([leaf for p in parts for leaf in p], dim) else None

    def unify(self, a: Sequence[DimFactor], b: Sequence[DimFactor]) -> bool:
        """Make two dims one; False (and nothing done) if they have no common refinement."""
        left, right = self.leaves(a), self.leaves(b)
        if left == right:
            return True
        if len(left) == len(right) == 1 and self._size[left[0]] == self._size[right[0]]:
            return self._merge(left, right)
        if 0 in (sizes := [self._size[x] for x in left]) or 0 in (self._size[x] for x in right):
            # Nothing can be said of boundaries in an empty dim.
            if sizes != [self._size[x] for x in right]:
                return False
        elif not self._refinable(left, right) or not self._repeats_fit(left, right):
            return False
        merged = self._merge(left, right)
        assert merged, "what can be refined was refined"
        return True

    def _merge(self, left: list[DimFactor], right: list[DimFactor]) -> bool:
        """Make the two lists one, from the minor side; False, half done, where a leaf cannot be split as it must."""
        while left and right:
            x, y = self.find(left[-1]), self.find(right[-1])
            if x == y:
                left.pop(), right.pop()
            elif self._parts[x] is not None:
                left[-1:] = self._halves(x)  # split meanwhile, through another occurrence of the same leaf
            elif self._parts[y] is not None:
                right[-1:] = self._halves(y)
            elif self._size[x] == self._size[y]:
                self._parent[y] = x
                self._locks[x] |= self._locks[y]
                if y in self._pieces:
                    rank, pieces = self._pieces.pop(y)
                    self.choose(x, pieces, rank)
                left.pop(), right.pop()
            elif not (
                self._split(x, self._size[y]) if self._size[x] > self._size[y] else self._split(y, self._size[x])
            ):
                return False
        return True

    def _refinable(self, left: Sequence[DimFactor], right: Sequence[DimFactor]) -> bool:
        """Returns whether there is a list of leaves that both can be split into."""
        chain = sorted(self._bounds(left) | self._bounds(right))
        if any(y % x for x, y in pairwise(chain)):
            return False
        if math.prod(map(self.size, left)) != math.prod(map(self.size, right)):
            return False
        return self._fits(left, chain) and self._fits(right, chain)

    def _repeats_fit(self, left: Sequence[DimFactor], right: Sequence[DimFactor]) -> bool:
        """A leaf that stands there twice is split at both places, which may not fit: tried out on a copy."""
        leaves = dict.fromkeys((*left, *right))
        if len(leaves) == len(left) + len(right):
            return True
        trial = Dims()
        copy = {leaf: trial.new(int(self.size(leaf)))[0] for leaf in leaves}
        for leaf, same in copy.items():
            trial._locks[same] = self._locks[self.find(leaf)]
        return trial._merge([copy[x] for x in left], [copy[x] for x in right])

    def _halves(self, leaf: DimFactor) -> tuple[DimFactor, DimFactor]:
        parts = self._parts[leaf]
        assert parts is not None
        return parts

    def _bounds(self, leaves: Sequence[DimFactor]) -> set[int]:
        """Products of the sizes from the minor side: where the dim can be cut apart."""
        bounds, inner = {1}, 1
        for leaf in reversed(leaves):
            inner *= self.size(leaf)
            bounds.add(inner)
        return bounds

    def _fits(self, leaves: Sequence[DimFactor], chain: Sequence[int]) -> bool:
        """Returns whether the locks of `leaves` allow splits at all of `chain`'s boundaries."""
        inner = 1
        for leaf in reversed(leaves):
            outer = inner * self.size(leaf)
            cuts = [c for c in chain if inner < c < outer]
            for lock in self._locks[self.find(leaf)] if cuts else ():
                edges = [inner, *cuts, outer]
                sizes = [y // x for x, y in pairwise(edges)][::-1]
                if shares(sizes, lock) is None:
                    self.refused[leaf] = None
                    return False
            inner = outer
        return True

    def _split(self, leaf: DimFactor, minor: int) -> bool:
        major, rest = divmod(self._size[leaf], minor)
        parted = [shares([major, minor], lock) for lock in self._locks[leaf]]
        if rest or None in parted:
            return False
        (major_leaf,), (minor_leaf,) = self.new(major), self.new(minor)
        self._parts[leaf] = (major_leaf, minor_leaf)
        for locks in parted:
            for part, (ways, pieces) in zip((major_leaf, minor_leaf), locks or (), strict=True):
                if ways:
                    self.lock(part, ways, pieces)
        if leaf in self._pieces:
            rank, chosen = self._pieces.pop(leaf)
            if isinstance(size := divided(chosen, minor), ShardSizes):
                self.choose(major_leaf, size, rank)
        return True


def shares(sizes: Sequence[int], lock: Lock) -> list[Lock] | None:
    """What is left of a cut for each of the parts of `sizes` (major first) of what it cuts; None if it has no place.

    Chosen pieces are made of whole rows of the minor parts: then they are pieces of the major part.

    Example:
        >>> from shardlib.sharding.mesh.axis import Axis
        >>> pieces = ShardSizes((20, 12, 32, 0), (Axis("data", 4),))
        >>> [size.sizes for _, size in shares([16, 4], ((2, 2), pieces)) if size]
        [(5, 3, 8, 0)]
        >>> shares([8, 8], ((2, 2), pieces)) is None
        True
    """
    ways, pieces = lock
    if pieces is None:
        found = split_axes(sizes, ways)
        return None if found is None else [(tuple(ways[i] for i in share), None) for share in found]
    size = divided(pieces, math.prod(sizes[1:]))
    if size is None:
        return None
    return [(ways, size if isinstance(size, ShardSizes) else None), *(((), None) for _ in sizes[1:])]


def divided(size: ShardSizes, by: int) -> int | None:
    """The size of what `size` has `by` elements of each; None if a piece ends inside one."""
    if by == 0 or any(n % by for n in size.sizes):
        return None
    return ShardSizes.make_size([n // by for n in size.sizes], size.axes)
