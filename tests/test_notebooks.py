"""Every notebook runs from top to bottom."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat  # here: the other tests are collected where no notebook runs
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))  # so that a tree that is not installed serves too
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    asyncio.run(client.async_execute())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
