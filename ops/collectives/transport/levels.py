"""Splits groups of ranks that span machines into groups inside machines and groups across them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

Cosets = tuple[tuple[int, ...], ...]  # all groups over the same axes; every rank is in exactly one


def find_levels(cosets: Cosets, machines: Mapping[int, str], near: int) -> tuple[Cosets, Cosets] | str:
    """Returns the groups inside machines and those across, each in the order of `cosets`, or why there are none.

    `machines` names the machine of each rank. The machine model says that `near` members of a group share one.

    Example:
        >>> find_levels(((0, 1, 2, 3),), {0: "a", 1: "a", 2: "b", 3: "b"}, 2)
        (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        >>> find_levels(((0, 1, 2, 3),), {0: "a", 1: "a", 2: "a", 3: "b"}, 2)
        'the machine model has 2 of each group on a machine, but ranks 0, 1, 2 share one'
        >>> find_levels(((0, 2, 1, 3),), {0: "a", 1: "a", 2: "b", 3: "b"}, 2)
        'ranks of a machine do not follow each other in the group 0, 2, 1, 3'
    """
    inner: list[tuple[int, ...]] = []
    outer: list[tuple[int, ...]] = []
    for group in cosets:
        rows = [tuple(ranks) for _, ranks in itertools.groupby(group, machines.__getitem__)]
        if len(rows) > len({machines[rank] for rank in group}):
            return f"ranks of a machine do not follow each other in the group {', '.join(map(str, group))}"
        if other := [row for row in rows if len(row) != near]:
            ranks = ", ".join(map(str, other[0]))
            share = f"ranks {ranks} share one" if len(other[0]) > 1 else f"rank {ranks} has one to itself"
            return f"the machine model has {near} of each group on a machine, but {share}"
        inner += rows
        outer += zip(*rows, strict=True)
    return tuple(inner), tuple(outer)
