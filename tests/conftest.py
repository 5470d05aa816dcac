"""What holds for every test: one thread, random numbers that do not depend on which tests ran before, ranks in turn."""

from __future__ import annotations

import pytest
import torch

from shardlib.program import verify
from tests import ranks

torch.set_num_threads(1)  # the tensors are small; with more threads they wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one after the other, whatever runs beside them: ranks wait for each other."""
    for item in items:
        if item.get_closest_marker("ranks") is not None:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(autouse=True)
def _each(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    ranks.allowed = request.node.get_closest_marker("ranks") is not None


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are held to what torch says of their ops."""
    monkeypatch.setattr(verify, "STRICT", True)
