"""Short runs of what `tests.validation.stress.threads` and `tests.validation.stress.memory_growth` do for long."""

from __future__ import annotations

import pytest

from shardlib.jit.jit import RetraceWarning
from tests.validation.stress import memory_growth, threads


@pytest.mark.long
@pytest.mark.filterwarnings(f"ignore::{RetraceWarning.__module__}.RetraceWarning")
def test_threads_with_modes_of_their_own_are_right() -> None:
    right, wrong = threads.campaign(4, seconds=1.5)
    assert wrong == []
    assert len(right) == 4


@pytest.mark.long
def test_programs_that_go_leave_nothing() -> None:
    seen, retraces = memory_growth.campaign(110, every=10)  # the first 64 programs of a function are kept
    (start, _, before), (end, _, after) = seen[-3], seen[-1]
    assert retraces == 0, "a changing number"
    assert (after - before) / (end - start) < 250, "a program alone is thousands of objects; torch 2.11 keeps 150"
