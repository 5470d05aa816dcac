"""Planted bugs in the CUDA collectives: each is caught by its kernel's scenario, which the sources themselves pass."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardlib.core.errors import CollectiveError
from tests.kernels import emulate
from tests.kernels.collectives import (
    BUGS,
    COPIED,
    GATHER,
    SOURCES,
    SUM,
    SUMMED,
    TO_ALL,
    build_of,
    check_apart,
    check_exchange,
    check_gather,
    check_multicast,
    check_sum,
    make_group,
    repeat_gather,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    emulate.prepare(build_of(op, planted) for op in SOURCES for planted in (False, True))


def _scenario_gather(bug: int) -> None:
    for form in COPIED:
        group = make_group(3, bug=bug)
        for askew, sizes in enumerate(([1, 0, 250], [33, 250, 47])):
            check_gather(group, sizes, torch.uint8, form, askew)
        if form != "packets":
            check_gather(group, [0, 4001, 700], torch.uint8, form)
    for form in ("packets", "staged", "direct", "mixed"):
        for seed in range(4):
            repeat_gather([0, 200, 70], form, seed, bug)
            repeat_gather([64, 64], form, seed, bug)
    check_multicast(bug, "gather")
    check_apart(bug)


def _scenario_all_to_all(bug: int) -> None:
    for form in COPIED:
        check_exchange(make_group(3, bug=bug), [[9, 40, 50], [60, 3, 17], [21, 0, 33]], torch.uint8, form)


def _scenario_sum(bug: int) -> None:
    for form, dtype in itertools.product(SUMMED, (torch.float32, torch.bfloat16)):
        check_sum(make_group(3, bug=bug), [37, 0, 60], dtype, form, 1)
    check_multicast(bug, "sum")


SCENARIOS = {GATHER: _scenario_gather, TO_ALL: _scenario_all_to_all, SUM: _scenario_sum}


@pytest.mark.parametrize("op", SOURCES)
def test_nothing_is_caught_where_nothing_is_wrong(op: str) -> None:
    SCENARIOS[op](0)
    SCENARIOS[op](len(BUGS) + 1)  # the source that holds the bugs, with none of them chosen


@pytest.mark.parametrize(("bug", "op"), [(i, row[1]) for i, row in enumerate(BUGS, 1)], ids=[row[0] for row in BUGS])
def test_a_planted_bug_is_caught(bug: int, op: str) -> None:
    with pytest.raises((AssertionError, CollectiveError)):  # an EmulationError is an AssertionError
        SCENARIOS[op](bug)
