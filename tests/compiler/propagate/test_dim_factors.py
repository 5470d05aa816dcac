"""Dims made of leaves: unifying, refining and locking, by example and against what must always hold."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.compiler.propagate.dim_factors import DimFactor, FactorClasses
from shardlib.sharding.split_axes import split_axes


def sizes(dims: FactorClasses, dim: list[DimFactor]) -> list[int]:
    return [dims.size(leaf) for leaf in dims.resolve(dim)]


def made(dims: FactorClasses, *parts: int) -> list[DimFactor]:
    return [leaf for n in parts for leaf in dims.new(n)]


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        ([12], [12], [12]),
        ([12], [3, 4], [3, 4]),
        ([2, 6], [4, 3], [2, 2, 3]),
        ([8, 3], [2, 12], [2, 4, 3]),
        ([1, 6], [6], [6]),
        ([2, 3], [3, 2], None),
        ([12], [10], None),
        ([6, 4], [4, 6], None),
        ([0], [0], [0]),
        ([0, 4], [0], None),
        ([4], [0], None),
    ],
)
def test_unify(left: list[int], right: list[int], common: list[int] | None) -> None:
    dims = FactorClasses()
    a, b = made(dims, *left), made(dims, *right)
    assert dims.unify(a, b) == (common is not None)
    if common is None:
        assert (sizes(dims, a), sizes(dims, b)) == (left, right), "nothing is done"
    else:
        assert sizes(dims, a) == common
        assert dims.resolve(a) == dims.resolve(b)


def test_a_split_is_seen_by_everybody() -> None:
    dims = FactorClasses()
    a, b, c = made(dims, 12), made(dims, 12), made(dims, 12)
    assert dims.unify(a, b)
    assert dims.unify(b, c)
    assert [sizes(dims, part) for part in dims.refine(a, [3, 4]) or []] == [[3], [4]]
    assert sizes(dims, c) == [3, 4]
    assert dims.refine(c, [2, 6]) is None
    assert [sizes(dims, part) for part in dims.refine(c, [3, 2, 2]) or []] == [[3], [2], [2]]
    assert sizes(dims, a) == [3, 2, 2]


def test_a_leaf_twice_in_one_dim() -> None:
    """flatten(x + x.t()): both halves are the same 6, so where one is split, both are."""
    dims = FactorClasses()
    (six,) = dims.new(6)
    assert dims.unify([six, six], made(dims, 18, 2))
    assert sizes(dims, [six]) == [3, 2]
    (six,) = dims.new(6)
    other = made(dims, 2, 3, 3, 2)
    assert not dims.unify([six, six], other), "a boundary at 2 splits the 6, so one at 12 comes in, and 18 is there"
    assert (sizes(dims, [six]), sizes(dims, other)) == ([6], [2, 3, 3, 2])


@pytest.mark.parametrize(
    ("size", "ways", "parts", "fits"),
    [
        (12, [2], [4, 3], True),  # 2 of the 4
        (12, [2, 2], [4, 3], True),
        (12, [2, 2, 3], [4, 3], True),
        (12, [2], [3, 4], False),  # half of 12 is no part of three
        (12, [3], [3, 4], True),
        (5, [2], [5], True),  # uneven, and not split
        (10, [2, 2], [2, 5], False),  # 10 over 4 is 3 3 3 1
    ],
)
def test_a_lock_keeps_a_cut_expressible(size: int, ways: list[int], parts: list[int], fits: bool) -> None:
    dims = FactorClasses()
    a, b = made(dims, size), made(dims, *parts)
    dims.lock(a[0], ways)
    assert dims.unify(a, b) == fits
    if fits:
        assert split_axes(sizes(dims, a), ways) is not None
    c = made(dims, size)
    assert dims.unify(c, a), "the lock travels with the class"
    assert sizes(dims, c) == (parts if fits else [size])


class _Story:
    """Dims, what is locked, and the sizes that dims had when they were made."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.dims = rng, FactorClasses()
        self.made: list[tuple[list[DimFactor], int]] = []
        self.locks: list[tuple[list[DimFactor], list[int]]] = []

    def pick(self) -> list[DimFactor]:
        if not self.made or self.rng.random() < 0.3:
            parts = [self.rng.choice([1, 2, 2, 3, 4, 5, 6, 8, 12]) for _ in range(self.rng.randint(1, 3))]
            self.made.append((made(self.dims, *parts), math.prod(parts)))
            return self.made[-1][0]
        (dim, n), (more, m) = self.rng.choice(self.made), self.rng.choice(self.made)
        if n * m <= 500 and self.rng.random() < 0.3:  # a dim that holds others, twice perhaps
            dim = [*dim, *more]
            self.made.append((dim, n * m))
        return dim

    def step(self) -> None:
        dims, kind = self.dims, self.rng.randrange(4)
        before = [dims.resolve(d) for d, _ in self.made]
        if kind == 0:
            dim = self.pick()
            leaves = dims.resolve(dim)
            ways = [self.rng.choice([2, 3]) for _ in range(self.rng.randint(1, 2))]
            if leaves:
                dims.lock(leaves[0], ways)
                self.locks.append(([leaves[0]], ways))
        elif kind == 1:
            dim = self.pick()
            n = math.prod(sizes(dims, dim))
            k = self.rng.choice([k for k in range(1, n + 1) if n % k == 0])
            parts = dims.refine(dim, [k, n // k])
            if parts is not None:
                assert [math.prod(sizes(dims, part)) for part in parts] == [k, n // k]
                assert [x for part in parts for x in dims.resolve(part)] == dims.resolve(dim)
        else:
            a, b = self.pick(), self.pick()
            before = [dims.resolve(d) for d, _ in self.made]
            if dims.unify(a, b):
                assert dims.resolve(a) == dims.resolve(b)
                assert dims.unify(b, a)
            else:
                assert [dims.resolve(d) for d, _ in self.made] == before, "a refusal changes nothing"
        for dim, n in self.made:
            assert math.prod(sizes(dims, dim)) == n
        for dim, ways in self.locks:
            assert split_axes(sizes(dims, dim), ways) is not None, (sizes(dims, dim), ways)


@pytest.mark.long
@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_what_always_holds(rng: random.Random) -> None:
    story = _Story(rng)
    for _ in range(12):
        story.step()


@pytest.mark.parametrize("seed", range(60))
def test_long_stories(seed: int) -> None:
    story = _Story(random.Random(seed))
    for _ in range(40):
        story.step()
