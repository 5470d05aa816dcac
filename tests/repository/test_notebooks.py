"""Every notebook runs from top to bottom."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.together
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHORT = 1  # so many of them are part of `make test`: the others compile models, most of them several in several ways
GALLERY = 7  # from this number on, notebooks are part of `make long`


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[Path, Any]:
    """The notebooks that tests were selected of, run; or why one did not run to its end."""
    given = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    chosen = {params["path"] for params in given if params.get("path") in NOTEBOOKS}
    return asyncio.run(_run(sorted(chosen)))


async def _run(paths: list[Path]) -> dict[Path, Any]:
    """One after the other in one kernel, which imports what they import once; names do not stay."""
    import nbformat  # here: the other tests are collected where no notebook runs
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    found: dict[Path, Any] = {}
    kernel = AsyncKernelManager(kernel_name="python3")
    try:
        for path in paths:
            found[path] = nbformat.read(path, as_version=4)
            client = NotebookClient(
                found[path], km=kernel, timeout=120, resources={"metadata": {"path": str(path.parent)}}
            )
            try:  # PYTHONPATH: so that a tree that is not installed serves too
                await client.async_execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
            except CellExecutionError as error:
                found[path] = error
            client.kc.execute("%reset -f")
            client.kc.stop_channels()
    finally:
        await kernel.shutdown_kernel(now=True)
    return found


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if i < SHORT else pytest.mark.slow if i + 1 < GALLERY else pytest.mark.long)
        for i, path in enumerate(NOTEBOOKS)
    ],
    ids=lambda path: path.stem,
)
def test_runs_and_says_what_it_said(path: Path, ran: dict[Path, Any]) -> None:
    """The outputs in the file, which readers see on the web, are those of today; pictures are there."""
    import nbformat

    if isinstance(ran[path], Exception):
        raise ran[path]
    before = [_outputs(cell) for cell in nbformat.read(path, as_version=4).cells]
    assert [_outputs(cell) for cell in ran[path].cells] == before
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
