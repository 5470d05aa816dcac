"""`python -m tests.validation.shardy`: generated programs through Shardy and shardlib, compared."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.validation.shardy.scores import Score, agreement, scores, traffic

REPORT = Path(__file__).with_name("REPORT.md")


def report(free: Score, conflicting: Score, seeds: range, seconds: float) -> Iterator[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    yield "# Shardy as an oracle"
    yield ""
    yield f"`python -m tests.validation.shardy --first {seeds.start} --programs {len(seeds)} --report` on"
    yield f"{datetime.date.today()}, torch {torch.__version__}, {versions}, {seconds:.0f} s. Planned only: nothing ran."
    yield "Bytes are those of ring algorithms; Shardy's come from its own `sdy-insert-explicit-reshards` and"
    yield "`sdy-reshard-to-collectives`, with equal reshards merged."
    yield ""
    yield "| programs | | |"
    yield "|---|---|---|"
    yield f"| no conflicting annotations | every value sharded as by Shardy | {free} |"
    yield f"| | not so, and at least 5 % less estimated time | {len(free.explained)} of {free.programs} |"
    yield f"| conflicting annotations | no more bytes than Shardy | {conflicting} |"
    yield f"| | no more estimated time than Shardy | {conflicting.cheaper} of {conflicting.programs} |"
    if conflicting.ratios:
        low, middle, high = statistics.quantiles(conflicting.ratios, n=4)
        yield f"| | bytes over Shardy's, median (quartiles) | {middle:.2f} ({low:.2f} - {high:.2f}) |"
    for title, lines in (
        ("Sharded differently, for no less estimated time", free.unexplained),
        ("More bytes, for less estimated time: arithmetic that Shardy replicates is shared out", conflicting.explained),
        (
            "Refused, or more bytes and more estimated time: the search ended in a local minimum",
            conflicting.unexplained,
        ),
    ):
        yield ""
        yield f"## {title}: {len(lines)}"
        yield ""
        yield from (f"* {line}" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--report", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.programs)
    begin = time.monotonic()
    free, conflicting = (scores(judge, seeds, options.workers) for judge in (agreement, traffic))
    text = "\n".join(report(free, conflicting, seeds, time.monotonic() - begin)) + "\n"
    print(text)
    if options.report:
        aside = REPORT.with_suffix(".new")
        aside.write_text(text)
        aside.rename(REPORT)


if __name__ == "__main__":
    main()
