"""What compiling does to the process around it: the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shardlib.core import context
from shardlib.core.context import paused_gc


class Link:
    """In a circle with itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """What the test run froze may be searched meanwhile."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()
    if frozen:
        gc.freeze()


@pytest.mark.long
def test_what_compiling_makes_is_not_searched_for_garbage_at_once() -> None:
    gc.collect()
    before = [of["collections"] for of in gc.get_stats()]
    with paused_gc():
        assert not gc.isenabled()
        made: list[list[int]] = [[] for _ in range(2 * context._MANY)]
    assert gc.isenabled()
    made += [[], []]
    assert [of["collections"] for of in gc.get_stats()] == before


@pytest.mark.long
def test_garbage_of_compiling_goes_with_the_next_full_collection() -> None:
    with paused_gc():
        made: list[list[int]] = [[] for _ in range(2 * context._MANY)]
        seen = weakref.ref(Link())
    assert seen() is not None
    gc.collect()
    assert seen() is None
    assert made[0] == []


def test_what_a_user_froze_stays_so() -> None:
    mine = [Link()]
    gc.freeze()
    with paused_gc():
        made: list[list[int]] = [[] for _ in range(2 * context._MANY)]
    assert all(x is not mine for x in gc.get_objects()), "these are what is not frozen"
    assert len(made) == 2 * context._MANY


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with paused_gc():
        pass
    assert not gc.isenabled()
