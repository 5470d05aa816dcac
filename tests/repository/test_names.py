"""Packages whose names and sentences the lint accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardlib
from tests.repository.names_lint import offenders

ROOT = Path(shardlib.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_names_and_sentences(package: str) -> None:
    assert [line for path in sorted((ROOT / package).rglob("*.py")) for line in offenders(path)] == []


def test_the_lint_sees_what_it_forbids(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    lines = "\n".join(f"    x = {n}" for n in range(60))
    module.write_text(
        f'def told(found):\n    """Whether it is so."""\n    there = found  # what is made is what is told\n{lines}\n'
    )
    messages = [line.split(": ", 1)[1] for line in offenders(module)]
    assert messages == [
        "the module has no docstring",
        "`told` does not say what it names",
        "`told` has 63 lines; at most 60",
        "a docstring begins with 'Whether', not with a verb",
        "`found` does not say what it names",
        "`there` does not say what it names",
        "riddle: 'what is made is what'",
    ]
