"""The README's code runs, and prints the plan that the README shows.

`python -m tests.repository.test_readme --write` puts the plan of today's code into the README.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_PLAN = re.compile(r"(?<=^```text\n)(.*?)(?=^```$)", re.M | re.S)


def _blocks() -> list[str]:
    return _PYTHON.findall(README.read_text())


def _printed(block: str) -> str:
    """What a block prints. It is compiled under a short file name, which plans show."""
    line = README.read_text().split(block)[0].count("\n")
    code = compile("\n" * line + block, "README.md", "exec")
    out, names = io.StringIO(), {"__name__": "readme"}
    torch.manual_seed(0)
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


@pytest.mark.parametrize("block", _blocks(), ids=lambda block: block.split("\n")[0])
def test_python_blocks_run(block: str) -> None:
    _printed(block)


def test_the_printed_plan_is_the_plan() -> None:
    shown: Any = _PLAN.search(README.read_text())
    assert shown is not None
    assert shown[1] == _printed(_blocks()[0]), "python -m tests.repository.test_readme --write"


def test_the_pictures_are_those_that_are_printed() -> None:
    (block,) = (block for block in _blocks() if "sl.visualize" in block)
    assert _printed(block) in _PLAN.findall(README.read_text())


def test_links_and_commands_exist() -> None:
    text, root = README.read_text(), README.parent
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (root / target).exists(), target
    targets = set(re.findall(r"^(\w+):", (root / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make (demo|test|bench|clean)", text)) <= targets


def _write() -> None:
    plan = _printed(_blocks()[0])
    README.write_text(_PLAN.sub(lambda _: plan, README.read_text(), count=1))
    print(plan)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.repository.test_readme --write")
    _write()
