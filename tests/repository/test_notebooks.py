"""Every notebook runs from top to bottom, has a picture, and shows its outputs of today."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.together
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHORT = 1  # the first of them are part of `make test`; the others compile models, most of them in several ways


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[Path, Any]:
    """Runs the notebooks of the selected tests; has the error of one that did not run to its end."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {i.callspec.params["path"] for i in items if i.function is test_runs_and_says_what_it_said}
    return asyncio.run(_run(sorted(chosen)))


async def _run(paths: list[Path]) -> dict[Path, Any]:
    """One after the other in one kernel, which imports what they import once; names do not stay."""
    import nbformat  # here: the other tests are collected where no notebook runs
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    results: dict[Path, Any] = {}
    kernel = AsyncKernelManager(kernel_name="python3")
    try:
        for path in paths:
            results[path] = nbformat.read(path, as_version=4)
            client = NotebookClient(
                results[path], km=kernel, timeout=120, resources={"metadata": {"path": str(path.parent)}}
            )
            try:  # PYTHONPATH: so that a tree that is not installed serves too
                await client.async_execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
            except CellExecutionError as error:
                results[path] = error
            client.kc.execute("%reset -f")
            client.kc.stop_channels()
    finally:
        await kernel.shutdown_kernel(now=True)
    return results


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if i < SHORT else pytest.mark.long) for i, path in enumerate(NOTEBOOKS)],
    ids=lambda path: path.stem,
)
def test_runs_and_says_what_it_said(path: Path, ran: dict[Path, Any]) -> None:
    """The stored outputs, which readers see on the web, are those of today."""
    import nbformat

    if isinstance(ran[path], Exception):
        raise ran[path]
    before = [_outputs(cell) for cell in nbformat.read(path, as_version=4).cells]
    assert [_outputs(cell) for cell in ran[path].cells] == before
    assert any(before)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_have_a_picture_and_no_warning(path: Path) -> None:
    outputs = [out for cell in json.loads(path.read_text())["cells"] for out in cell.get("outputs", [])]
    assert any(map(_is_picture, outputs))
    assert not [out for out in outputs if out["output_type"] == "error" or out.get("name") == "stderr"]


def _is_picture(out: Any) -> bool:
    return any(kind.startswith("image/") for kind in out.get("data", {}))


def _outputs(cell: Any) -> list[str]:
    """Lists texts, and "a picture" for each picture, without warnings, which go to stderr.

    Prints of one cell arrive in any number of messages: they are joined.
    """
    texts: list[str] = []
    printed = False
    for out in cell.get("outputs", []):
        if out.get("name") == "stderr":
            continue
        text = "a picture" if _is_picture(out) else out.get("text") or out["data"]["text/plain"]
        if printed and "text" in out:
            texts[-1] += text
        else:
            texts.append(text)
        printed = "text" in out
    return texts


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
