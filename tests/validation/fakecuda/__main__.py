"""`python -m tests.validation.fakecuda`: run all programs on fake GPUs and print what was seen.

With `--report` it is written down.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.models import w1
from tests.validation.fakecuda import programs
from tests.validation.fakecuda.watch import Seen

REPORT = Path(__file__).with_name("REPORT.md")
MODES = tuple(w1.modes(w1.TINY))
Run = Callable[[Seen], None]

_HEAD = """# Programs on fake GPUs

Every program runs on fake tensors of device cuda, on all virtual devices of a mesh or on one rank with a fake process
group for NCCL. Each op is looked at (devices, what makes the host wait, what is in flight), each variable compared with
what the program says of it, each result with what the plain call gives on that device. Written by
`python -m tests.validation.fakecuda --report`, with torch {torch}.

| group | programs | ops looked at | variables compared | results compared | collectives | waits | faults |
|---|---|---|---|---|---|---|---|
{rows}

Rules' samples: {samples} of {every} run; torch has no fake form of {plain} for a GPU, and there they are not run.
{refused} calls were refused. Ops that make the host wait, as the plain call does: {reads}.
"""


def groups() -> dict[str, list[tuple[str, Run]]]:
    """Every program by its group."""

    def sample(one: Any) -> Run:
        return lambda seen: programs.run_sample(seen, one, 2)

    def model(kind: Any, name: str, rank: int | None) -> Run:
        return lambda seen: kind(seen, name, rank)

    return {
        "rules' samples": [(s[0], sample(s)) for s in programs.samples()],
        "eager functions": [(n, model(programs.run_eager, n, r)) for n in programs.EAGER for r in (None, 3)],
        "W1": [(n, model(programs.run_w1, n, r)) for n in MODES for r in (None, 5)],
        "models": [(n, model(programs.run_model, n, r)) for n in programs.MODELS for r in (None, 5)],
    }


def run_all(only: str | None, step: int) -> Iterator[tuple[str, Seen]]:
    for group, items in groups().items():
        if only and only not in group:
            continue
        seen = Seen()
        for i, (name, run) in enumerate(items[:: step if group == "rules' samples" else 1]):
            try:
                run(seen)
            except Exception as error:  # noqa: BLE001 # one program's error is a fault, the others still run
                seen.fault(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            if i % 50 == 0:
                gc.collect()
                print(f"{group}: {i + 1}/{len(items)}, {len(seen.faults)} faults", file=sys.stderr, flush=True)
        yield group, seen


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if there was any fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.validation.fakecuda", description=__doc__)
    parser.add_argument("--report", action="store_true", help=f"write {REPORT.name}")
    parser.add_argument("--only", help="a group, or a part of its name")
    parser.add_argument("--step", type=int, default=1, help="run every n-th of the rules' samples")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = dict(run_all(options.only, options.step))
    for group, seen in every.items():
        for fault, n in Counter(seen.faults).items():
            print(f"{group}: {fault} ({n} times)")
    text = written(every)
    print(text)
    if options.report:
        REPORT.write_text(text)
    return int(any(seen.faults for seen in every.values()))


def written(every: dict[str, Seen]) -> str:
    names = ("ops", "variables", "results", "collectives", "waits")
    rows, total = [], Counter[str]()
    for group, seen in every.items():
        counts = seen.counts + Counter({"all": seen.counts["programs"] + seen.counts["eager calls"]})
        counts["faults"] = len(seen.faults)
        total.update(counts)
        rows.append(_row(group, counts, names))
    rows.append(_row("all", total, names))
    plain = {k: n for k, n in total.items() if k.startswith("no plain form")}
    reads = sorted({op for seen in every.values() for op in seen.plain})
    return _HEAD.format(
        torch=torch.__version__.partition("+")[0],
        rows="\n".join(rows),
        samples=total["samples"],
        every=total["samples"] + sum(plain.values()) + total["no rule"],
        plain=sum(plain.values()),
        refused=total["refused"],
        reads=", ".join(f"`{op}`" for op in reads) or "none",
    )


def _row(name: str, counts: Counter[str], names: tuple[str, ...]) -> str:
    return f"| {name} | " + " | ".join(f"{counts[n]:,}" for n in ("all", *names, "faults")) + " |"


if __name__ == "__main__":
    sys.exit(main())
