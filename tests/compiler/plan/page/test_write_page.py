"""The file of a page: complete in itself, safe for any text, written whole or not at all."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.compiler.plan.page.write_page import notebook_cell, page_text, write_page

from .plans import plan_mlp


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    plan_mlp().html(tmp_path / "plan.html", machine="h100")
    text = (tmp_path / "plan.html").read_text()
    assert not re.search(r"""\b(src|href)\s*=\s*["']|@import|url\(|fetch\(|import\(""", text)
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # a namespace
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


def test_texts_of_the_user_end_no_script() -> None:
    with sl.Mesh(data=2):
        plan = sl.jit(lambda tree: tree["</script><b>"].sum(), in_specs=({"</script><b>": "rows@data"},)).plan(
            {"</script><b>": torch.ones(4)}
        )
    text = page_text("a < b", [plan])
    assert text.count("</script>") == 2
    assert "<title>a &lt; b</title>" in text
    assert any("</script><b>" in string for string in data_of(text)["strings"])


PLACES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing folder": (lambda folder: folder / "none" / "plan.html", "FileNotFoundError"),
    "a folder": (lambda folder: folder, "IsADirectoryError"),
    "a file as folder": (lambda folder: folder / "file" / "plan.html", "NotADirectoryError"),
    "long name": (lambda folder: str(folder / ("x" * 300)), "OSError"),
    "no name": (lambda folder: "", "ValueError|IsADirectoryError"),
    "no path": (lambda folder: 3, "TypeError"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_path_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    make, reason = PLACES[place]
    path = make(tmp_path)
    before = sorted(p.name for p in tmp_path.parent.iterdir())
    with pytest.raises(sl.ShardingError) as error:
        plan_mlp().html(path)
    assert re.fullmatch(
        rf"the page cannot be written to {re.escape(repr(str(path)) if isinstance(path, Path) else repr(path))}:\n"
        rf"  \* ({reason}): .+\n"
        r'Remedy: name a file in a folder that exists and that this process may write, such as "plan.html"',
        str(error.value),
    )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert sorted(p.name for p in tmp_path.parent.iterdir()) == before


def test_a_text_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(sl.ShardingError, match="UnicodeEncodeError"):
        write_page(tmp_path / "plan.html", "\ud800")
    assert [*tmp_path.iterdir()] == []


def test_an_old_page_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text("old")
    plan_mlp().html(path)
    assert data_of(path.read_text())["plans"][0]["heading"] == plan_mlp().heading


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    plan = plan_mlp()
    cell = plan._repr_html_()
    match = re.fullmatch(r'<iframe title="[^"]*" style="[^"]*" srcdoc="([^"]*)"></iframe>', cell)
    assert match is not None
    assert html.unescape(match[1]) == page_text(plan.heading, [plan])


def test_a_notebook_shows_the_totals_of_a_large_plan() -> None:
    plan = plan_mlp()
    cell = html.unescape(notebook_cell(plan, largest=1000))
    assert plan.summary() in cell
    assert 'plan.html("plan.html") writes the page' in cell
    assert len(cell) < 1000


def test_a_diff_has_both_plans(tmp_path: Path) -> None:
    before, after = plan_mlp(), plan_mlp("ff@(tensor data)")
    change = before.diff(after)
    change.html(tmp_path / "change.html", machine="h100")
    data = data_of((tmp_path / "change.html").read_text())
    assert data["diff"] == json.loads(json.dumps(change.to_dict()))
    assert "plans" not in data["diff"]
    assert [plan["heading"] for plan in data["plans"]] == [before.heading, after.heading]
    assert [{name: x for name, x, *_ in plan["totals"]}["sent per device"] for plan in data["plans"]] == [
        before.comm_bytes,
        after.comm_bytes,
    ]


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


MESHES = [sl.Mesh.abstract(data=4, tensor=1), sl.Mesh.abstract(data=2, tensor=2)]
ARGS = torch.empty(64, 32, device="meta"), torch.empty(32, 64, device="meta")


def test_meshes_are_compared_on_one_page(tmp_path: Path) -> None:
    step = sl.jit(product, in_specs=("rows@data _", "_ ff@tensor"))
    path = tmp_path / "meshes.html"
    comparison = sl.compare_meshes(step, MESHES, "h100", ARGS, path=path)
    data = data_of(path.read_text())
    assert [plan["mesh"] for plan in data["plans"]] == ["data=4, tensor=1", "data=2, tensor=2"]
    for plan, own in zip(comparison.plans, data["plans"], strict=True):
        totals = {name: x for name, x, *_ in own["totals"]}
        assert (totals["peak memory"], totals["FLOPs per device"]) == (plan.peak_memory, plan.flops)
        assert totals["simulated step"] == pytest.approx(plan.simulate("h100").seconds)
    heads = ["mesh", "devices", "sent per device", "FLOPs per device", "peak memory", "simulated step"]
    assert re.split(r"  +", str(comparison).splitlines()[1]) == [*heads, "exposed communication"]


@pytest.mark.parametrize(
    ("step", "meshes", "args", "words"),
    [
        (product, MESHES, ARGS, "which has no plan"),
        (sl.jit(product), [], ARGS, "no mesh"),
        (sl.jit(product), MESHES[0], ARGS, "one mesh, no list of them"),
        (sl.jit(product), MESHES, ARGS[0], "a tensor of shape [64, 32] as args"),
    ],
)
def test_arguments_that_cannot_be_compared(step: Any, meshes: Any, args: Any, words: str) -> None:
    with pytest.raises(sl.ShardingError, match=r"compare_meshes\(\.\.\.\) got") as error:
        sl.compare_meshes(step, meshes, args=args)
    assert words in str(error.value)
    assert "Remedy: compare_meshes(sl.jit(step)" in str(error.value)
