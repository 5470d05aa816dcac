"""Every notebook runs from top to bottom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_says_what_it_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs in the file, which readers see on the web, are those of today; pictures are there."""
    import nbformat  # here: the other tests are collected where no notebook runs
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))  # so that a tree that is not installed serves too
    notebook = nbformat.read(path, as_version=4)
    before = [_outputs(cell) for cell in notebook.cells]
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    asyncio.run(client.async_execute())
    assert [_outputs(cell) for cell in notebook.cells] == before
    assert any(before)


def _outputs(cell: Any) -> list[str]:
    """Texts as they are, and of pictures that there is one; warnings go to stderr.

    What is printed comes in as many messages as it happens to.
    """
    found, printed = [], False
    for out in cell.get("outputs", []):
        data = out.get("data", {})
        if out.get("name") == "stderr":
            continue
        text = "a picture" if "image/png" in data else out.get("text") or data["text/plain"]
        if printed and "text" in out:
            found[-1] += text
        else:
            found.append(text)
        printed = "text" in out
    return found


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
