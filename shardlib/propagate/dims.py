"""Dims made of leaves: what is the same dim all over the program.

Every dim of every value is a list of leaves, major first. Unifying two dims makes them the same list: leaves of one
size become one, a larger leaf is split at the other's boundary. All leaves that were ever made one are a *class*.

Two dims can be unified only if their boundaries chain by divisibility: (2 6) and (4 3) become (2 2 3), but (2 3) and (3
2) have no common refinement, and then nothing happens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from shardlib.spread import spread

Leaf = int


class Dims:
    """Union-find over leaves that can be split."""

    def __init__(self) -> None:
        self._parent: list[Leaf] = []
        self._size: list[int] = []
        self._parts: list[tuple[Leaf, Leaf] | None] = []  # (major, minor) once split
        self._ways: list[frozenset[tuple[int, ...]]] = []  # cuts that a split must leave expressible

    def new(self, size: int) -> list[Leaf]:
        """A dim of its own; dims of size 1 have no leaves."""
        if size == 1:
            return []
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._parts.append(None)
        self._ways.append(frozenset())
        return [len(self._parent) - 1]

    def find(self, leaf: Leaf) -> Leaf:
        parent = self._parent
        while parent[leaf] != leaf:
            parent[leaf] = parent[parent[leaf]]
            leaf = parent[leaf]
        return leaf

    def leaves(self, dim: Iterable[Leaf]) -> list[Leaf]:
        """`dim` as it stands now: roots, split as far as anything needed them split."""
        out: list[Leaf] = []
        stack = list(dim)[::-1]
        while stack:
            leaf = self.find(stack.pop())
            parts = self._parts[leaf]
            if parts is None:
                out.append(leaf)
            else:
                stack += [parts[1], parts[0]]
        return out

    def size(self, leaf: Leaf) -> int:
        return self._size[self.find(leaf)]

    def lock(self, leaf: Leaf, ways: Sequence[int]) -> None:
        """Demand that splits of `leaf` keep a cut into `ways` (major first) expressible on the parts."""
        leaf = self.find(leaf)
        self._ways[leaf] |= {tuple(ways)}

    def refine(self, dim: Sequence[Leaf], sizes: Sequence[int]) -> list[list[Leaf]] | None:
        """Split `dim` at the boundaries of `sizes` (major first); the leaves of each part, or None if it cannot be."""
        dim = self.leaves(dim)
        parts = [self.new(n) for n in sizes]
        return parts if self.unify([leaf for p in parts for leaf in p], dim) else None

    def unify(self, a: Sequence[Leaf], b: Sequence[Leaf]) -> bool:
        """Make two dims one; False (and nothing done) if they have no common refinement."""
        left, right = self.leaves(a), self.leaves(b)
        if left == right:
            return True
        if 0 in (sizes := [*map(self.size, left)]) or 0 in map(self.size, right):
            # Nothing can be said of boundaries in an empty dim.
            if sizes != [*map(self.size, right)]:
                return False
        elif not self._refinable(left, right) or not self._repeats_fit(left, right):
            return False
        merged = self._merge(left, right)
        assert merged, "what can be refined was refined"
        return True

    def _merge(self, left: list[Leaf], right: list[Leaf]) -> bool:
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
                self._ways[x] |= self._ways[y]
                left.pop(), right.pop()
            elif not (
                self._split(x, self._size[y]) if self._size[x] > self._size[y] else self._split(y, self._size[x])
            ):
                return False
        return True

    def _refinable(self, left: Sequence[Leaf], right: Sequence[Leaf]) -> bool:
        """Whether there is a list of leaves that both can be split into."""
        chain = sorted(self._bounds(left) | self._bounds(right))
        if any(y % x for x, y in pairwise(chain)) or not (self._fits(left, chain) and self._fits(right, chain)):
            return False
        return math.prod(map(self.size, left)) == math.prod(map(self.size, right))

    def _repeats_fit(self, left: Sequence[Leaf], right: Sequence[Leaf]) -> bool:
        """A leaf that stands there twice is split at both places, which may not fit: tried out on a copy."""
        leaves = dict.fromkeys((*left, *right))
        if len(leaves) == len(left) + len(right):
            return True
        trial = Dims()
        copy = {leaf: trial.new(self.size(leaf))[0] for leaf in leaves}
        for leaf, same in copy.items():
            trial._ways[same] = self._ways[self.find(leaf)]
        return trial._merge([copy[x] for x in left], [copy[x] for x in right])

    def _halves(self, leaf: Leaf) -> tuple[Leaf, Leaf]:
        parts = self._parts[leaf]
        assert parts is not None
        return parts

    def _bounds(self, leaves: Sequence[Leaf]) -> set[int]:
        """Products of the sizes from the minor side: where the dim can be cut apart."""
        bounds, inner = {1}, 1
        for leaf in reversed(leaves):
            inner *= self.size(leaf)
            bounds.add(inner)
        return bounds

    def _fits(self, leaves: Sequence[Leaf], chain: Sequence[int]) -> bool:
        """Whether the locks of `leaves` allow splits at all of `chain`'s boundaries."""
        inner = 1
        for leaf in reversed(leaves):
            outer = inner * self.size(leaf)
            cuts = [c for c in chain if inner < c < outer]
            for ways in self._ways[self.find(leaf)] if cuts else ():
                edges = [inner, *cuts, outer]
                sizes = [y // x for x, y in pairwise(edges)][::-1]
                if spread(sizes, ways) is None:
                    return False
            inner = outer
        return True

    def _split(self, leaf: Leaf, minor: int) -> bool:
        major, rest = divmod(self._size[leaf], minor)
        shares = {ways: spread([major, minor], ways) for ways in self._ways[leaf]}
        if rest or None in shares.values():
            return False
        (major_leaf,), (minor_leaf,) = self.new(major), self.new(minor)
        self._parts[leaf] = (major_leaf, minor_leaf)
        for ways, share_of in shares.items():
            for part, share in zip((major_leaf, minor_leaf), share_of or (), strict=True):
                if share:
                    self.lock(part, [ways[i] for i in share])
        return True
