"""Fills the template of the page: one file with data, styles and code, which loads nothing."""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlib.compiler.plan.page.plan_data import PlanData
from shardlib.compiler.plan.page.tables import Strings
from shardlib.core.context import paused_gc
from shardlib.core.errors import ShardingError
from shardlib.sharding.mesh.machine import Machine

if TYPE_CHECKING:
    from shardlib.compiler.plan.diff import PlanDiff
    from shardlib.compiler.plan.plan import Plan

LARGEST_CELL = 1_000_000  # characters of a page inside a notebook
_SCRIPTS = ("elements.js", "panels.js", "streams.js", "page.js")  # in this order
_HEIGHT = 640  # pixels of a notebook's frame


@paused_gc()
def page_data(
    plans: Sequence[Plan], machine: Machine | str | None = None, change: PlanDiff | None = None
) -> dict[str, Any]:
    """Returns the data of a page; `machine` (None: the one of each plan's mesh, if any) is simulated."""
    strings = Strings()
    contents = []
    for plan in plans:
        at = plan.mesh.machine if machine is None else machine
        contents.append(PlanData(plan, None if at is None else Machine.convert(at), strings).data())
    return {"plans": contents, "diff": None if change is None else change.to_dict(), "strings": strings.texts}


def page_text(
    title: str, plans: Sequence[Plan], machine: Machine | str | None = None, change: PlanDiff | None = None
) -> str:
    """Returns the HTML of one or several plans."""
    data = json.dumps(page_data(plans, machine, change), separators=(",", ":"), ensure_ascii=False)
    folder = files(__package__)
    parts = {
        "TITLE": html.escape(title),
        "STYLE": folder.joinpath("page.css").read_text("utf-8"),
        "DATA": data.replace("<", "\\u003c"),  # so that no text of the user ends the script
        "CODE": "\n".join(folder.joinpath(name).read_text("utf-8") for name in _SCRIPTS),
    }
    before, *rest = folder.joinpath("template.html").read_text("utf-8").split("{{")
    return before + "".join(parts[name] + text for name, text in (part.split("}}", 1) for part in rest))


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Writes a page aside, and moves it to its place. Raises `ShardingError` that names a path that cannot be written.

    Example:
        >>> write_page("/no/such/folder/plan.html", "")
        Traceback (most recent call last):
        ...
        shardlib.ShardingError: the page cannot be written to '/no/such/folder/plan.html':
          * FileNotFoundError: No such file or directory
        Remedy: name a file in a folder that exists and that this process may write, such as "plan.html"
    """
    try:
        target = Path(path)
        aside = target.with_name(f"{target.name}.part")
        try:
            aside.write_text(text, "utf-8")
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _write_error(path, f"{type(error).__name__}: {reason}") from error


def check_writable(path: Path) -> None:
    """Raises the error of `write_page` if no file can be written at `path`; leaves nothing there."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir():
        raise _write_error(path, "it is a folder" if path.is_dir() else f"the folder {folder} does not exist")
    try:  # as `write_page` does; `os.access` would allow /proc
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _write_error(path, f"this process cannot write there: {error.strerror}") from error


def _write_error(path: str | os.PathLike[str], fault: str) -> ShardingError:
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    return ShardingError(
        f"the page cannot be written to {name!r}",
        [fault],
        remedy='name a file in a folder that exists and that this process may write, such as "plan.html"',
    )


def notebook_cell(plan: Plan, largest: int = LARGEST_CELL) -> str:
    """Returns the page in a frame for notebooks; above `largest` characters the totals, and how to write the page."""
    text = page_text(plan.heading, [plan])
    if len(text) > largest:
        note = 'plan.html("plan.html") writes the page of this plan, which is too large for a notebook'
        summary = "\n\n".join((plan.heading, plan.summary(), note))
        return f"<pre>{html.escape(summary)}</pre>"
    frame = f"width:100%;height:{_HEIGHT}px;border:1px solid #8888"
    return f'<iframe title="{html.escape(plan.heading)}" style="{frame}" srcdoc="{html.escape(text)}"></iframe>'
