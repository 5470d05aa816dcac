"""What holds for every test: one thread, and random numbers that do not depend on which tests ran before."""

from __future__ import annotations

import pytest
import torch

from shardlib.program import verify

torch.set_num_threads(1)  # the tensors are small; with more threads they wait for each other


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are held to what torch says of their ops."""
    monkeypatch.setattr(verify, "STRICT", True)
