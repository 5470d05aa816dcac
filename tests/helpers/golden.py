"""Golden texts: files that a test compares, and rewrites where `GOLDEN=write` is in the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WRITE = os.environ.get("GOLDEN") == "write"


def assert_golden(path: Path, text: str) -> None:
    """Compares a text with a file line by line."""
    if WRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if not path.exists():
        pytest.fail(f"{path} does not exist; write it with GOLDEN=write, and read it before you commit it")
    expected = path.read_text()
    assert text.splitlines() == expected.splitlines(), f"{path} differs; GOLDEN=write accepts the new text"
