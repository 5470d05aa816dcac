"""What holds for every test: one thread, random numbers that do not depend on which tests ran before, ranks in turn."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are small; with more threads they wait for each other

# torch and the library are imported in functions: the process that hands tests out to others has no use for them.


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one after the other, whatever runs beside them: ranks wait for each other.

    Tests of a module that share what they make run in one process.
    Of the cases of a sampled test, every n-th (from `first` on) is part of `make test`, and the others of `make slow`.
    """
    import torch

    torch.set_num_threads(1)
    cases: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("ranks") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif item.get_closest_marker("together") is not None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
        if (sampled := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if (cases[test] - sampled.kwargs.get("first", 0)) % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1


def pytest_collection_finish() -> None:
    _settle()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What was imported, and what the tests of a few modules left, stays: later collections do not look at it again."""
    if nextitem is not None and nextitem.path != item.path and next(_left) % 4 == 0:
        _settle()


_left = itertools.count()  # modules


def _settle() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _each(request: pytest.FixtureRequest) -> None:
    import torch

    from shardlib.eager import recompile_warning
    from tests.helpers import ranks

    recompile_warning._lines.clear()
    recompile_warning._warned.clear()
    torch.default_generator.manual_seed(0)  # torch.manual_seed writes down the stack, too, for devices to come
    ranks.allowed = request.node.get_closest_marker("ranks") is not None


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are held to what torch says of their ops."""
    from shardlib.compiler.program import verify

    monkeypatch.setattr(verify, "STRICT", True)
