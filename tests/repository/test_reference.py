"""Every public name has one entry in the reference, and an example that runs."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import shardlib as sl

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
_ENTRY = re.compile(r"^::: shardlib\.([\w.]+)\n    options:\n      heading: sl\.(\w+)$", re.M)
_BY_HAND = re.compile(r"^## `sl\.(\w+)`\n+.*?^```python\n", re.M | re.S)


def test_every_public_name_has_one_entry() -> None:
    texts = [page.read_text() for page in PAGES]
    entries = [name for text in texts for _, name in _ENTRY.findall(text)]
    entries += [name for text in texts for name in _BY_HAND.findall(text)]
    assert sorted(entries) == sorted(sl.__all__)


def test_an_entry_names_its_object() -> None:
    for page in PAGES:
        for path, name in _ENTRY.findall(page.read_text()):
            assert path.rpartition(".")[2] == name


@pytest.mark.parametrize("name", [name for name in sl.__all__ if name != "vmap"])  # that is torch's; its entry has code
def test_every_public_name_has_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(getattr(sl, name).__doc__), f"sl.{name} has no doctest"
