"""The command: every architecture, each in a process of its own, and the report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.validation.pretrained import AXES, architectures, outcome

REPORT = Path(__file__).parent / "REPORT.md"
HEAD = """# Architectures of transformers through `sl.parallelize(model)`, nothing said

Written by `python -m tests.validation.pretrained --report`, with transformers {version} and torch {torch}, on virtual
devices ({axes}), each architecture small, from its own configuration, in float32. *Off* is the largest error of the
output, the loss and all gradients against one device, relative to the largest element. *Cut* counts parameters that the
model's own table (`tp_plan`) cuts and, where that says nothing of layers, those that `suggest` proposes. *Gathered* are
those of them that the plan gathers whole over the tensor axis: at these sizes (width 32) a weight is often fewer bytes
than the activations that it would save.

{right} of {every} are right; {wrong} are not; of {unbuilt} no small model runs on one device by this script.

| architecture | off | parameters | cut | gathered, or why there is no plan |
|---|---|---|---|---|
"""


def _apart(kind: str) -> dict[str, Any]:
    """The same in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.validation.pretrained", "--one", kind],
            capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"kind": kind, "error": "took more than 300 s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and found:
        return dict(json.loads(found[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return {"kind": kind, "error": f"its process died with {done.returncode}, out of memory"}
    start = max((i for i, line in enumerate(lines) if "Error: " in line), default=len(lines) - 1)
    return {"kind": kind, "error": " ".join(lines[start:])[:700]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Architectures of transformers, sharded by their own tables")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--one")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(outcome(options.one)))
        return
    kinds = options.only or list(architectures())
    rows = []
    with ThreadPoolExecutor(options.workers) as pool:
        for row in pool.map(_apart, kinds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.report:
        REPORT.write_text(_written(rows))


def _written(rows: Sequence[dict[str, Any]]) -> str:
    import transformers

    built = [row for row in rows if "worst" in row]
    right = [row for row in built if row["worst"] <= 1e-4]
    known = {"version": transformers.__version__, "torch": torch.__version__.partition("+")[0], "axes": AXES}
    counts = {"right": len(right), "every": len(built), "wrong": len(built) - len(right)}
    lines = [
        f"| {row['kind']} | {row['worst']:.0e} | {row['parameters']} | {row['cut']} | {_said(row)} |" for row in built
    ]
    rest = [f"* {row['kind']}: {row['error']}" for row in rows if "error" in row]
    head = HEAD.format(**known, **counts, unbuilt=len(rest))
    return head + "\n".join([*lines, "", "Not built, and what torch or transformers said last:", "", *rest, ""])


def _said(row: dict[str, Any]) -> str:
    return str(row.get("eager") or ", ".join(row.get("gathered", [])))


if __name__ == "__main__":
    main()
