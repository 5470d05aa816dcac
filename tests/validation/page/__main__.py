"""The page of Llama 70B on 4,096 devices: seconds to write, to open, to search and to unfold, and its size.

`python -m tests.validation.page` prints one line of JSON. It needs playwright and Chromium, and opens the page in a
window of 1400 x 860. `--images docs/images` also writes the pictures of three pages for the documents; it needs pillow.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.compiler.plan.page.plans import plan_mlp
from tests.validation.benchmarks.planning import plan_llama_70b

SIZE = {"width": 1400, "height": 860}

# Seconds from a change to the end of the layout that follows.
TIMED = """(change) => {
    const start = performance.now();
    change();
    document.body.offsetHeight;
    return performance.now() - start;
}"""
SEARCH = "() => { byId('search').value = 'layers.57.self_attn'; drawResults(); }"
UNFOLD = "() => document.querySelector('[role=treeitem][aria-expanded=false]').click()"
UNFOLD_ALL = "() => document.querySelector('[data-key=unfold]').click()"


def timed(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """A result, its seconds, and the seconds of this process's CPU time."""
    start, cpu = time.perf_counter(), time.process_time()
    return make(), time.perf_counter() - start, time.process_time() - cpu


def measure(folder: Path, browser: Any) -> dict[str, float]:
    """Writes the page, and times it in a browser; each figure in the page is the least of three."""
    path, make = folder / "llama.html", plan_llama_70b()
    plan, _, planned_cpu = timed(make)
    _, first, first_cpu = timed(lambda: plan.html(path, machine="h100"))
    _, again, again_cpu = timed(lambda: plan.html(path, machine="h100"))
    figures: dict[str, list[float]] = {"open": [], "search": [], "unfold": [], "unfold all": []}
    for _ in range(3):
        page = browser.new_page(viewport=SIZE)
        figures["open"].append(timed(lambda page=page: page.goto(path.as_uri()))[1])
        for name, change in {"search": SEARCH, "unfold": UNFOLD, "unfold all": UNFOLD_ALL}.items():
            figures[name].append(page.evaluate(f"({TIMED})({change})") / 1e3)
        page.close()
    written = {"written": first, "written cpu": first_cpu, "again": again, "again cpu": again_cpu}
    best = {name: min(seconds) for name, seconds in figures.items()}
    return {"planned cpu": planned_cpu} | written | best | {"MB": path.stat().st_size / 1e6}


def draw(folder: Path, images: Path, browser: Any) -> None:
    """Writes the pictures of an MLP with a collective's reasons, of Llama's memory, and of a diff."""
    from PIL import Image

    plan_mlp().html(folder / "mlp.html", machine="h100")
    plan_mlp().diff(plan_mlp("ff@(tensor data)")).html(folder / "diff.html", machine="h100")
    clicks = {"mlp": ["#source .chip >> nth=0"], "llama": ["[data-key=tab-memory]", "[data-key=peak]"], "diff": []}
    for name, selectors in clicks.items():
        page = browser.new_page(viewport=SIZE)
        page.goto((folder / f"{name}.html").as_uri())
        for selector in selectors:
            page.click(selector)
        image = Image.open(io.BytesIO(page.screenshot()))
        image.quantize(256).save(images / f"plan_page_{name}.png", optimize=True)
        page.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path)
    images = parser.parse_args().images
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        print(json.dumps({key: round(value, 3) for key, value in measure(Path(name), browser).items()}))
        if images is not None:
            images.mkdir(parents=True, exist_ok=True)
            draw(Path(name), images, browser)
        browser.close()


if __name__ == "__main__":
    main()
