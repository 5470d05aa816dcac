"""The page in Chromium, by mouse and keyboard; nothing is loaded, and nothing fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardlib as sl

from .plans import PLANS, plan_mlp, plan_module
from .test_write_page import ARGS, MESHES, product

pytestmark = pytest.mark.browser

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'shardlib[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "needs Chromium: no program chromium, chromium-browser or google-chrome is installed"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the page of a plan, of a diff, or of several meshes, once."""
    folder = tmp_path_factory.mktemp("pages")

    def write(name: str) -> Path:
        path = folder / f"{name}.html"
        if path.exists():
            return path
        if name == "diff":
            plan_mlp().diff(plan_mlp("ff@(tensor data)")).html(path, machine="h100")
        elif name == "meshes":
            step = sl.jit(product, in_specs=("rows@data _", "_ ff@tensor"))
            sl.compare_meshes(step, MESHES, "h100", ARGS, path=path)
        elif name == "layers":
            plan_module(12).html(path, machine="h100")
        else:
            PLANS[name]().html(path, machine="h100")
        return path

    return write


@pytest.fixture
def opened(browser: Any, written: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page; fails if it writes to the console, raises, or loads anything but itself."""
    faults: list[str] = []
    pages: list[Any] = []

    def open_page(name: str, **options: Any) -> Any:
        page = browser.new_page(viewport={"width": 1400, "height": 860}, **options)
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        path = written(name)
        page.on("request", lambda request: None if request.url == path.as_uri() else faults.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert faults == []


def texts(page: Any, selector: str) -> list[str]:
    return [" ".join(text.split()) for text in page.locator(selector).all_inner_texts()]


@pytest.mark.parametrize("name", [*PLANS, "diff", "meshes"])
def test_every_panel_opens(opened: Callable[..., Any], name: str) -> None:
    page = opened(name)
    for tab in page.locator("[role=tab]").all():
        tab.click()
        assert page.locator("[role=tab][aria-selected=true]").count() == 1
        assert page.locator("#panel").inner_text().strip()
    assert page.locator("#totals").inner_text().startswith("sent per device")


def test_groups_fold(opened: Callable[..., Any]) -> None:
    page = opened("layers")
    shut = page.locator("[role=treeitem]").count()
    layers = page.locator("[role=treeitem]", has_text="Sequential").first
    assert layers.get_attribute("aria-expanded") == "false"
    layers.click()
    assert page.locator("[role=treeitem]").count() > shut
    repeated = page.locator("[role=treeitem]", has_text=re.compile(r"2 \(Sequential\) \.\.\. 10 \(Sequential\)"))
    assert "x 9" in repeated.inner_text()
    page.locator("[role=treeitem]", has_text="Sequential").first.click()
    assert page.locator("[role=treeitem]").count() == shut
    page.get_by_text("Unfold all").click()
    assert page.locator("[role=treeitem][aria-expanded=false]").count() == 0
    page.get_by_text("Fold all", exact=True).click()
    assert page.locator("[role=treeitem][aria-expanded=true]").count() == 0


def test_keys_search_move_and_open(opened: Callable[..., Any]) -> None:
    page = opened("layers")
    page.keyboard.press("/")
    page.keyboard.type("model.7.0.weight")
    hits = texts(page, "#results .item")
    assert hits[0] == "model.*.0.weight input"  # twelve layers are one row
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#details h2").inner_text().startswith("model.*.0.weight")
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Layouts"
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    page.locator("[data-key=tab-program]").click()
    assert page.locator("#details h2").inner_text() == "Collectives"
    page.locator("[role=treeitem]").first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("[role=treeitem]").first.get_attribute("aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    assert page.locator("[role=treeitem]").first.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement === document.querySelectorAll('[role=treeitem]')[1]")


def test_a_search_without_a_match(opened: Callable[..., Any]) -> None:
    page = opened("mlp")
    page.keyboard.press("/")
    page.keyboard.type("(nothing[")
    assert texts(page, "#hits") == ["0 found"]


def test_filters(opened: Callable[..., Any]) -> None:
    page, plan = opened("mlp"), plan_mlp()
    page.get_by_label("collectives only").check()
    assert page.locator(".tree .node.message").count() == len(plan.collectives)
    assert page.locator(".tree .node:not(.group):not(.message)").count() == 0
    page.get_by_label("optimizer").uncheck()
    page.get_by_label("backward").uncheck()
    assert texts(page, ".tree .node.message .name") == ["all_reduce[tensor] mm_1", "all_reduce[data] mean"]
    assert page.locator("#source .chip").count() == 2
    page.get_by_label("forward").uncheck()
    assert "nothing is left" in page.locator("#panel").inner_text()
    for phase in ("forward", "backward", "optimizer"):
        page.get_by_label(phase).check()
    page.get_by_label("every call").check()
    steps = page.evaluate("PLANS[0].program.filter((row) => row.kind !== 'group').length")
    assert page.locator(".tree .node:not(.group)").count() == steps


def test_a_collective_is_explained(opened: Callable[..., Any]) -> None:
    page, plan = opened("mlp"), plan_mlp()
    page.locator("#source .chip", has_text="mm_1").click()
    details = page.locator("#details")
    assert details.locator("h2").inner_text() == "all_reduce[tensor] of mm_1"
    (reason,) = [c.reason for c in plan.collectives if c.value == "mm_1"]
    assert reason in details.inner_text()
    assert "made by mm_1 = mm(h, params[1])" in details.locator(".chain").inner_text()
    assert (
        "tensor shards ff, asked for by in_specs: params[0] embed ff@tensor" in details.locator(".chain").inner_text()
    )
    rows = [text for text in texts(page, "#details tbody tr") if "chosen" in text or "rejected" in text]
    assert any(re.search(r"ff chosen .* 3\.07 kB asked for by in_specs: params\[0\]", row) for row in rows)
    assert any(re.search(r"nothing rejected .* 67\.6 kB", row) for row in rows)
    assert page.locator("#source .chip.chosen").count() == page.locator(".tree .chosen").count() == 1
    details.locator(".facts .link").click()
    assert (
        details.locator("h2")
        .inner_text()
        .endswith(page.evaluate("String(current().lines[state.selected.index].number)"))
    )


def test_lines_show_bytes_and_repeated_work(opened: Callable[..., Any]) -> None:
    page, plan = opened("mlp"), plan_mlp()
    heat = page.evaluate("PLANS[0].heat.map((line) => [line.bytes, line.redundant])")
    assert sum(line[0] for line in heat) == plan.comm_bytes
    assert sum(line[1] for line in heat) == sum(r.flops for r in plan.redundant)
    assert page.locator("#source .heat i").count() == sum(x > 0 for line in heat for x in line)


def test_the_peak_lists_its_values(opened: Callable[..., Any]) -> None:
    page, plan = opened("layers"), plan_module(12)
    assert page.evaluate("Math.max(...PLANS[0].levels)") == plan.peak_memory
    page.locator("[data-key=tab-memory]").click()
    page.locator(".curve").click(position={"x": 3, "y": 100})
    assert re.search(r"at step \d of", page.locator("#panel h2").inner_text())
    page.locator("[data-key=peak]").click()
    assert page.locator("#panel h2").inner_text().endswith("at the peak")
    step = page.evaluate("PLANS[0].peak")
    assert page.evaluate(f"aliveAt(PLANS[0], {step}).reduce((sum, group) => sum + group.bytes, 0)") == plan.peak_memory
    rows = texts(page, "#panel tbody tr")
    assert any("an argument, or captured" in row for row in rows)
    assert any("read by" in row and "(backward at" in row for row in rows)
    page.locator("[data-key=step]").focus()
    page.keyboard.press("ArrowRight")
    assert f"at step {step + 1} of" in page.locator("#panel h2").inner_text()


def test_layouts_say_who_holds_what(opened: Callable[..., Any]) -> None:
    page = opened("uneven")
    page.locator("[data-key=tab-layouts]").click()
    widths = [float(rect.get_attribute("height")) for rect in page.locator("tbody tr").first.locator("rect").all()]
    assert [round(w / widths[0], 2) for w in widths] == [1, 1, 1, 0.33]  # 10 rows over 4 devices: 3, 3, 3, 1
    page.locator("tbody .item", has_text="x").first.hover()
    assert "data=3 has rows 9:10" in page.locator("#hover").inner_text()
    page.locator("tbody .item", has_text="w").first.click()
    assert "tensor=1 has ff 5:9" in page.locator("#details").inner_text()


def test_streams_and_their_download(opened: Callable[..., Any], tmp_path: Path) -> None:
    page, simulated = opened("layers"), plan_module(12).simulate("h100")
    page.locator("[data-key=tab-time]").click()
    assert "Messages that nothing hides" in page.locator("#panel").inner_text()
    before = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.get_by_text("Zoom in").click()
    assert page.evaluate("document.querySelector('canvas').toDataURL()") != before
    with page.expect_download() as download:
        page.get_by_text("Download for Perfetto").click()
    trace = json.loads(Path(download.value.path()).read_text())["traceEvents"]
    simulated.to_perfetto(tmp_path / "trace.json")
    expected = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    meta = [[e for e in events if e["ph"] == "M"] for events in (trace, expected)]
    assert meta[0] == meta[1]
    spans = [[(e["tid"], e["name"], e["args"]) for e in events if e["ph"] == "X"] for events in (trace, expected)]
    assert spans[0] == spans[1]
    for key in ("ts", "dur"):
        ours, theirs = ([e[key] for e in events if e["ph"] == "X"] for events in (trace, expected))
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert max(e["args"]["bytes"] for e in trace if e["ph"] == "C") == simulated.peak_memory


def test_a_diff_stands_side_by_side(opened: Callable[..., Any]) -> None:
    page, change = opened("diff"), plan_mlp().diff(plan_mlp("ff@(tensor data)"))
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Changes"
    assert page.locator(".sides .wide").count() == len(change.lines)
    figures = [text for text in texts(page, "#panel tbody tr") if text.startswith(("sent", "FLOPs"))]
    assert [re.split(r"\s{2,}", text)[0].split()[0] for text in figures] == ["sent", "FLOPs"]
    layouts = {row[0] for row in (*change.inputs, *change.outputs)}
    assert layouts <= set(texts(page, "#panel td.name"))
    heading = texts(page, "#totals")
    page.locator("#plans").select_option("0")
    assert texts(page, "#totals") != heading


def test_a_plan_is_selected_among_meshes(opened: Callable[..., Any]) -> None:
    page = opened("meshes")
    assert [text.split(" ")[:2] for text in texts(page, "#panel tbody tr")] == [
        ["data=4,", "tensor=1"],
        ["data=2,", "tensor=2"],
    ]
    page.locator("[data-key=plan-1]").click()
    assert page.locator("#plans").input_value() == "1"
    page.locator("[data-key=tab-layouts]").click()
    assert "ff=64@tensor" in page.locator("#panel").inner_text()
    page.locator("#plans").select_option("0")
    assert page.evaluate("current().mesh") == "data=4, tensor=1"


def test_dark_pages_have_another_background(opened: Callable[..., Any]) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    assert opened("mlp", color_scheme="dark").evaluate(color) != opened("mlp", color_scheme="light").evaluate(color)


def test_a_notebook_cell_runs_in_its_frame(browser: Any) -> None:
    page = browser.new_page()
    page.set_content(f"<!doctype html><body>{plan_mlp()._repr_html_()}</body>")
    frame = page.frame_locator("iframe")
    frame.locator("[data-key=tab-memory]").click()
    assert "at the peak" in frame.locator("#panel").inner_text()
    page.close()


def test_a_page_of_layers_is_small(written: Callable[[str], Path]) -> None:
    assert written("layers").stat().st_size < 300_000
