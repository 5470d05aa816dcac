"""The session's table: on the terminal, and as a page to commit."""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.validation.gpu.figures import FIGURES
from tests.validation.gpu.records import Record, summed_up

COMMAND = "python -m tests.validation.gpu.session --out tests/validation/gpu"
DIGEST = "digest of cuda/"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One figure: `verdict` is met, missed, empty where there is no target, or not measured; `of` its card and day."""

    part: str
    figure: str
    target: str
    measured: str
    verdict: str
    of: str = ""


def rows(records: Sequence[Record], absent: Mapping[str, str], skipped: Mapping[str, str]) -> list[Row]:
    """A row for every figure; `absent` says why single figures are missing, `skipped` why whole parts are."""
    found = []
    for figure in FIGURES:
        outcome = summed_up([r for r in records if r.figure == figure.name], figure.best)
        if outcome is None:
            why = absent.get(figure.name) or skipped.get(figure.part) or "its part ended before it"
            found.append(Row(figure.part, figure.name, figure.target, f"{NOT_MEASURED}: {why}", NOT_MEASURED))
            continue
        verdict = {True: "met", False: "missed", None: ""}[outcome.ok] if figure.target or outcome.ok is False else ""
        found.append(Row(figure.part, figure.name, figure.target, outcome.text, verdict))
    known = {figure.name for figure in FIGURES}
    for name in sorted({r.figure for r in records} - known):  # nothing that was measured is lost
        outcome = summed_up([r for r in records if r.figure == name])
        if outcome is not None:
            found.append(Row("", name, "", outcome.text, "missed" if outcome.ok is False else ""))
    return found


def kept(table: Sequence[Row], facts: Mapping[str, str], day: str, page: str) -> list[Row]:
    """The table with what each row is of: a card, a day, kernels. What was not measured now, and what other cards did,
    is as the page before has it."""
    card, kernels = facts.get("GPU", ""), facts.get(DIGEST, "")[:8]
    before = defaultdict[str, dict[str, Row]](dict)
    for row in _read(page):
        before[row.figure][row.of.partition(",")[0]] = row
    found = []
    for row in table:
        rows = before[row.figure]
        if row.verdict != NOT_MEASURED:
            rows[card] = replace(row, of=f"{card}, {day}, {kernels}")
        found += [replace(x, part=row.part, target=row.target) for x in rows.values()] or [row]
    return found


def _read(page: str) -> Iterator[Row]:
    """What a page says was measured."""
    for line in page.splitlines():
        match [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]:
            case [figure, target, measured, "met" | "missed" | "" as verdict, of]:
                yield Row("", figure, target, measured, verdict, of)


def text(table: Sequence[Row], facts: Mapping[str, str], width: int = 44) -> str:
    """For the terminal: two columns and a verdict, one line a figure."""
    lines = [f"{name}: {said}" for name, said in facts.items()]
    for row in table:
        mark = {"met": "ok  ", "missed": "MISS", NOT_MEASURED: "-   "}.get(row.verdict, "    ")
        target = f"  [{row.target}]" if row.target and row.verdict == "missed" else ""
        lines.append(f"{mark} {row.figure:{width}} {row.measured}{target}")
    counts = {verdict: sum(row.verdict == verdict for row in table) for verdict in ("met", "missed", NOT_MEASURED)}
    lines.append(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return "\n".join(lines)


def page(table: Sequence[Row], facts: Mapping[str, str], day: str) -> str:
    """REPORT.md."""
    card = facts.get("GPU", "")
    head = (
        f"Measured on {day} on one {card}." if card else f"{day}: **not measured**. No figure below was ever measured."
    )
    lines = [
        "# Report of the GPU session",
        "",
        head,
        "The last column: the card, the day and the digest of cuda/ that a row is of. Above: the last call.",
        f"`{COMMAND}` makes this page on a machine with a CUDA GPU. A call takes 10 minutes; the next goes on.",
        "",
        "Speeds are medians with quartiles, contestants by turns in one process. Virtual ranks share one GPU: their",
        "figures say what kernels make of its memory, and nothing about NVLink. Targets of speed are for an H100.",
        "",
    ]
    if facts:
        lines += ["| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(said)} |" for name, said in facts.items()), ""]
    lines += ["| figure | target | measured | verdict | of |", "|---|---|---|---|---|"]
    lines += [
        f"| {' | '.join(map(_cell, (row.figure, row.target, row.measured, row.verdict, row.of)))} |" for row in table
    ]
    return "\n".join(lines) + "\n"


def _cell(said: str) -> str:
    return " ".join(said.replace("|", "\\|").split())


def write(path: Path, content: str) -> None:
    """All of it or nothing: a reader, or a crash, never sees half a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise
