"""What the cells amount to: one line an entry and sizes, one table, the list of what is not right."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.validation.sweep.cell import WORST_FIRST, Cell, Result
from tests.validation.sweep.entries import SIZES

HERE = Path(__file__).parent

_HOW = """\
An entry counts by the worst of its cells: meshes (4) and (2, 2), eager and jitted. A cell is, if the command does not
say otherwise, {cap} trials spread over {samples} samples of the entry, and one more for each in-place and out= form of
two of them: values, shapes, dtypes and gradients against plain torch on one device, in float64 where the op has it. Ops
that draw random numbers are compared with the same program on a mesh of one device, after the same seed. Refused
entries raised a `ShardingError` in some trial at least, before anything ran; nothing that they computed was wrong."""


def write(path: Path, result: Result) -> None:
    """Append one cell, on a line of its own even where the last line was cut off."""
    with path.open("a+b") as file:
        if file.tell() and file.seek(-1, 2) and file.read() != b"\n":
            file.write(b"\n")
        file.write(json.dumps(asdict(result)).encode() + b"\n")


def read(path: Path) -> list[Result]:
    """All cells of a file, the latest of each; a last line that was cut off is not one."""
    found: dict[tuple[str, str, str, str], Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[result.key] = result
    return list(found.values())


def verdicts(results: Iterable[Result], sizes: str) -> dict[str, Result]:
    """Per entry, the worst of its cells; "untestable" only if all are. Op names without a rule are those of all."""
    worst: dict[str, Result] = {}
    replicated: dict[str, set[str]] = {}
    for r in results:
        if r.sizes == sizes:
            replicated.setdefault(r.entry, set()).update(r.replicated)
            before = worst.get(r.entry)
            if before is None or WORST_FIRST.index(r.outcome) < WORST_FIRST.index(before.outcome):
                worst[r.entry] = r
    return {name: Result(**{**asdict(r), "replicated": sorted(replicated[name])}) for name, r in worst.items()}


def table(results: Sequence[Result]) -> str:
    """Entries by outcome, even and uneven: what stands in the report, as Markdown."""
    both = {sizes: verdicts(results, sizes) for sizes in SIZES}
    rows = ["| | even | uneven |", "|---|---|---|"]

    def row(label: str, *kinds: str, of: bool = True) -> None:
        texts = []
        for found in both.values():
            n = sum(r.outcome in kinds for r in found.values())
            testable = sum(r.outcome != "untestable" for r in found.values())
            texts.append(f"{n} ({100 * n / testable:.1f}%)" if of and testable else f"{n}")
        rows.append(f"| {label} | {' | '.join(texts)} |")

    row("entries", *WORST_FIRST, of=False)
    row("testable", *(k for k in WORST_FIRST if k != "untestable"), of=False)
    row("all right", "right")
    row("refused, some or all", "refused")
    row("silently wrong", "wrong")
    row("raw errors", "error")
    row("crashed or hung", "crash", "timeout")
    counts = [
        (sum(bool(r.replicated) for r in f.values()), sum(r.outcome != "untestable" for r in f.values()))
        for f in both.values()
    ]
    texts = [f"{n} ({100 * n / max(of, 1):.1f}%)" for n, of in counts]
    rows.append(f"| some op replicated for want of a rule | {' | '.join(texts)} |")
    rows.append(
        f"| trials | {' | '.join(str(sum(sum(r.trials.values()) for r in results if r.sizes == s)) for s in SIZES)} |"
    )
    return "\n".join(rows)


def faults(results: Sequence[Result]) -> list[str]:
    """Everything that is not right, with its reason, the worst first."""
    lines = []
    for kind in WORST_FIRST:
        if kind == "right":
            continue
        found: dict[str, tuple[list[str], str]] = {}
        for sizes in SIZES:
            for name, r in verdicts(results, sizes).items():
                if r.outcome == kind:
                    found.setdefault(name, ([], r.reason))[0].append(f"{sizes} {r.mesh} {r.mode}")
        if found:
            lines += ["", f"### {kind}: {len(found)}", ""]
            lines += [f"* `{name}` ({', '.join(where)}): {reason}" for name, (where, reason) in sorted(found.items())]
    return lines


def without_rules(results: Sequence[Result]) -> list[str]:
    """Ops without a rule, with the entries that run them."""
    users: dict[str, set[str]] = {}
    for r in results:
        for op in r.replicated:
            users.setdefault(op, set()).add(r.entry)
    return [f"* `{op}`: {', '.join(sorted(names))}" for op, names in sorted(users.items())]


def report(results: Sequence[Result], command: str) -> None:
    """Write REPORT.md, and right.json: the entries that are all right, by sizes."""
    lines = [
        "# The OpInfo sweep",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, by `{command}`.",
        "",
        table(results),
        "",
        _HOW.format(cap=Cell.cap, samples=Cell.samples),
        "",
        "## What is not right",
        *faults(results),
        "",
        "## Ops that ran replicated for want of a rule",
        "",
        *(without_rules(results) or ["None."]),
    ]
    (HERE / "REPORT.md").write_text("\n".join(lines) + "\n")
    right = {s: sorted(n for n, r in verdicts(results, s).items() if r.outcome == "right") for s in SIZES}
    (HERE / "right.json").write_text(json.dumps({"torch": torch.__version__, **right}, indent=0) + "\n")
