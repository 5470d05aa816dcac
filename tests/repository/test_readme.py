"""The code of the README and of `docs/` runs, and prints what the documents show.

`python -m tests.repository.test_readme --write` writes what today's code prints into the documents.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSIDE = [*sorted((ROOT / "shardlib").rglob("README.md")), ROOT / "ops/README.md"]
_TOP = ("shardlib", "ops", "cuda", "tests", "docs", "notebooks")
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_TEXT = re.compile(r"(?<=^```text\n)(.*?)(?=^```$)", re.M | re.S)


def _printed(document: Path, block: str) -> str:
    """Runs a block and returns its output. Plans show the document's name as the file of the code."""
    line = document.read_text().split(block)[0].count("\n")
    code = compile("\n" * line + block, document.name, "exec")
    out, names = io.StringIO(), {"__name__": "document"}
    torch.manual_seed(0)
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


_BLOCKS = [(path, block) for path in DOCUMENTS for block in _PYTHON.findall(path.read_text())]


@pytest.mark.parametrize(
    ("document", "block"), _BLOCKS, ids=[f"{path.name}-{block[:200].split(chr(10))[3]}" for path, block in _BLOCKS]
)
def test_python_blocks_run(document: Path, block: str) -> None:
    """A text block that directly follows a block of Python, but for one sentence, is the output of that block."""
    output = _printed(document, block)
    if (shown := _output_of(document, block)) is not None:
        assert shown == output, "python -m tests.repository.test_readme --write"


def _output_of(document: Path, block: str) -> str | None:
    after = document.read_text().split(block, 1)[1]
    match = _TEXT.search(after)
    between = after[: match.start()] if match else ""
    return match[0] if match and "\n```python" not in between and "\n#" not in between else None


@pytest.mark.parametrize("document", [*DOCUMENTS, *INSIDE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_commands_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    missing = [t for t in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if not (document.parent / t).exists()]
    paths = re.findall(r"`((?:shardlib|ops|cuda|tests|docs|notebooks)/[\w./-]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    if document in INSIDE:  # these name files of their own folder
        own = [path for path in re.findall(r"`([\w/]+\.py|\w[\w/]*/)`", text) if path.split("/")[0] not in _TOP]
        missing += [path for path in own if not (document.parent / path).exists()]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    missing += [
        f"make {name}"
        for name in re.findall(r"^make (\w+)|`make (\w+)", text)
        for name in name
        if name not in {*targets, ""}
    ]
    assert missing == []


def test_the_readme_is_a_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


def _write() -> None:
    for document, block in _BLOCKS:
        output = _printed(document, block)
        if (shown := _output_of(document, block)) not in (None, output):
            assert shown is not None
            document.write_text(document.read_text().replace(shown, output))
            print(document.name, output, sep="\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.repository.test_readme --write")
    _write()
