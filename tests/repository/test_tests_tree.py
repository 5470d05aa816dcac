"""The tree of tests: file names are unique and folders small, so that a reader finds a test by its name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
MOST_FILES = 25


def test_no_two_test_files_share_a_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_holds_too_many_files() -> None:
    counts = Counter(str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}
