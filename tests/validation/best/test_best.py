"""The table of programs with a hand-known best plan: `python -m tests.validation.best` prints it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.validation.best import Row
from tests.validation.best.rows import ROWS
from tests.validation.best.without import worse_without


@pytest.mark.sampled(11)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_within_five_percent_of_the_best(row: Row) -> None:
    assert not row.faults()
    assert bool(row.short) == bool(row.why), "what is short has a reason"


def test_names_differ() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_what_is_worse_or_better_than_said_is_a_fault() -> None:
    (row,) = (row for row in ROWS if row.name == "gradients added to 0")
    assert "bytes: 458,752" in dataclasses.replace(row, bytes=row.bytes * 0.9).faults()[0]
    assert "collectives: 1" in dataclasses.replace(row, collectives=0).faults()[0]
    assert "`short` says that it is not" in dataclasses.replace(row, short={"bytes": 2.0}).faults()[0]


@pytest.mark.long
def test_a_row_gets_worse_without_the_mechanism_that_it_needs() -> None:
    (row,) = (row for row in ROWS if row.name == "discounted returns, cut in time")
    assert {"bytes", "collectives"} <= worse_without(row, "offer_axes").keys()
    assert {"bytes", "collectives"} <= worse_without(row, "offer_axes,fill_by_masks").keys()
    assert worse_without(row, "fill_by_masks") == {}
    with pytest.raises(ValueError, match="no mechanism is called 'magic'; the names are align_chunks"):
        worse_without(row, "magic")
