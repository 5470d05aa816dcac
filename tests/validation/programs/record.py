"""A recorded campaign of random programs: `python -m tests.validation.programs`.

    python -m tests.validation.programs --examples 2000                    failures print the smallest script found
    python -m tests.validation.programs --examples 20000 --workers 2 --out fuzz.jsonl --report

Programs are known by their seeds. With `--out` each is a line of JSON, and what is there is not run again. Each runs in
a process of its own, so that a crash or a hang is an outcome. `--report` writes tests/validation/programs/REPORT.md
from what is there.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import shardlib  # noqa: F401  (imported before processes are forked)
from tests.validation.programs import draw
from tests.validation.programs.campaign import as_if_large, outcome, smallest
from tests.validation.sweep.workers import Lost, run_all

REPORT = Path(__file__).with_name("REPORT.md")


@dataclass(frozen=True)
class Line:
    """What became of one program."""

    seed: int
    kind: str
    detail: str = ""
    lines: int = 0
    collectives: int = 0
    replicated: tuple[str, ...] = ()
    script: str = ""  # of a failure, the smallest that was found


def run(seed: int, shrink: float = 20.0) -> Line:
    """Draw a program and run it every way there is."""
    p = draw(random.Random(seed))
    found = outcome(p)
    replicated = tuple(sorted({r.split(" at ")[0] for r in found.replicated}))
    script = smallest(p, found, shrink).script if found.failed else ""
    return Line(seed, found.kind, found.detail, len(p.lines), found.collectives, replicated, script)


def run_as_if_large(seed: int) -> Line:
    with as_if_large():
        return run(seed)


def read(path: Path) -> dict[int, Line]:
    """All programs of a file; a last line that was cut off is not one."""
    found: dict[int, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = Line(**json.loads(text))
        except json.JSONDecodeError:
            continue
        found[line.seed] = line
    return found


def summary(found: Iterable[Line]) -> Iterator[str]:
    """The score, as lines of Markdown."""
    found = sorted(found, key=lambda line: line.seed)
    kinds = collections.Counter(line.kind for line in found)
    yield "| programs | lines | collectives | same | refused | rounding decides | wrong | crash, hang |"
    yield "|---|---|---|---|---|---|---|---|"
    cells = [len(found), sum(x.lines for x in found), sum(x.collectives for x in found)]
    cells += [kinds[k] for k in ("same", "refused", "vague", "wrong")] + [kinds["crash"] + kinds["timeout"]]
    yield "| " + " | ".join(f"{n:,}" for n in cells) + " |"
    refusals = collections.Counter(x.detail.split("\n")[0][:100] for x in found if x.kind == "refused")
    replicated = collections.Counter(op for x in found for op in x.replicated)
    for title, counts in (("Refused", refusals), ("Run replicated for want of a rule", replicated)):
        if counts:
            yield f"\n{title}:\n"
            yield from (f"* {what}: {n}" for what, n in counts.most_common())
    for x in found:
        if x.kind not in ("same", "refused", "vague"):
            yield f"\nSeed {x.seed}, {x.kind}: {x.detail[:300]}\n\n```python\n{x.script}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of one program, shrinking included")
    parser.add_argument(
        "--out", type=Path, help="a line of JSON for each program; those that are there are not run again"
    )
    parser.add_argument("--large", action="store_true", help="plan as if tensors were large: bytes alone count")
    parser.add_argument("--report", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = run_as_if_large if options.large else run
    seeds = range(options.first, options.first + options.examples)
    known = {s: x for s, x in read(options.out).items() if s in seeds} if options.out else {}
    begin = time.monotonic()
    work(0)  # what children would each import and fill in for themselves
    todo = [s for s in seeds if s not in known]
    for seed, done in run_all(work, todo, workers=options.workers, seconds=options.seconds):
        line = known[seed] = Line(seed, done.kind, done.reason) if isinstance(done, Lost) else done
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        if line.kind not in ("same", "vague"):
            print(f"--- seed {seed} {line.kind}: {line.detail[:300]}\n{line.script}", flush=True)
    text = "\n".join(summary(known.values()))
    print(f"{text}\n{time.monotonic() - begin:.0f} s for {len(todo)} programs")
    if options.report:
        command = f"python -m tests.validation.programs --first {options.first} --examples {options.examples}"
        command += " --large" * options.large
        head = f"# Random programs\n\n`{command}`, {datetime.date.today()}, torch {torch.__version__}: one device"
        head += (
            " against virtual\ndevices, values and gradients in float64, and the bytes that ran against the plan's.\n"
        )
        aside = REPORT.with_suffix(".new")
        aside.write_text(f"{head}\n{text}\n")
        aside.rename(REPORT)
