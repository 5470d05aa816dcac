"""The code of the README and of `docs/` runs, and prints what the documents show.

`python -m tests.repository.test_readme --write [docs/plans.md ...]` writes what today's code prints into the documents.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import RankError, run_ranks

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSIDE = [*sorted((ROOT / "shardlib").rglob("README.md")), ROOT / "ops/README.md"]
_TOP = ("shardlib", "ops", "cuda", "tests", "docs", "notebooks")
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_SCRIPT = re.compile(r"^```py\n(.*?)^```$", re.M | re.S)
_TEXT = re.compile(r"(?<=^```text\n)(.*?)(?=^```$)", re.M | re.S)
_LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)


def _printed(document: Path, block: str) -> str:
    """Runs a block and returns its output. Plans show the document's name as the file of the code."""
    text = document.read_text()
    linecache.cache[document.name] = len(text), None, text.splitlines(keepends=True), document.name
    code = compile("\n" * text.split(block)[0].count("\n") + block, document.name, "exec")
    out, names = io.StringIO(), {"__name__": "document"}
    torch.manual_seed(0)
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


_BLOCKS = [(path, block) for path in DOCUMENTS for block in _PYTHON.findall(path.read_text())]


@pytest.mark.parametrize(
    ("document", "block"), _BLOCKS, ids=[f"{path.name}-{i}" for i, (path, _) in enumerate(_BLOCKS)]
)
def test_python_blocks_run(document: Path, block: str) -> None:
    """A text block that directly follows a block of Python, but for one sentence, is the output of that block."""
    output, text = _printed(document, block), document.read_text()
    if (span := _output_span(text, block)) is not None:
        assert text[slice(*span)] == output, "python -m tests.repository.test_readme --write"


def _output_span(text: str, block: str) -> tuple[int, int] | None:
    """Returns where a document shows the output of a block, if it does."""
    start = text.index(block) + len(block)
    match = _TEXT.search(text, start)
    between = text[start : match.start()] if match else ""
    return match.span() if match and "\n```python" not in between and "\n#" not in between else None


_SCRIPTS = [(path, script) for path in DOCUMENTS for script in _SCRIPT.findall(path.read_text())]


@pytest.mark.ranks
@pytest.mark.parametrize(("document", "script"), _SCRIPTS, ids=lambda value: getattr(value, "name", ""))
def test_scripts_of_ranks_end_with_their_error(document: Path, script: str) -> None:
    """A block of `py` is a script of two ranks; the text behind it is the error of both, with digests left out."""
    with pytest.raises(RankError) as raised:
        run_ranks(_run_script, 2, script)
    text = document.read_text()
    shown = text[slice(*(_output_span(text, script) or ()))]
    for rank in (0, 1):
        assert re.sub(r"\[[0-9a-f]{8}\]", "[...]", f"{raised.value.errors[rank]}\n") == shown


def _run_script(script: str) -> None:
    exec(script, {"__name__": "document"})


@pytest.mark.parametrize("document", [*DOCUMENTS, *INSIDE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_commands_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    links = _LINK.findall(_CODE.sub("", text))
    missing = [target + anchor for target, anchor in links if _is_broken(document, target, anchor)]
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


def _is_broken(document: Path, target: str, anchor: str) -> bool:
    path = document.parent / target if target else document
    return not path.exists() or (anchor != "" and anchor[1:] not in _anchors(path.read_text()))


def _anchors(text: str) -> set[str]:
    """Returns the anchors of a document's headings, as forges and the site name them."""
    headings = re.findall(r"^#+ (.*?) *$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    references = {f"shardlib.{name}" for name in re.findall(r"^::: shardlib\.([\w.]+)", text, re.M)}
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | references


def test_the_readme_is_a_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


def _write(documents: list[Path]) -> None:
    for document, block in _BLOCKS:
        if document in documents and _output_span(document.read_text(), block) is not None:
            output, text = _printed(document, block), document.read_text()
            start, end = _output_span(text, block) or (0, 0)
            if text[start:end] != output:
                document.write_text(text[:start] + output + text[end:])
                print(document.name, output, sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit("python -m tests.repository.test_readme --write [documents]")
    _write([Path(name).resolve() for name in sys.argv[2:]] or DOCUMENTS)
