"""`python -m tests.shardy`: generated programs through Shardy and shardlib, compared."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardlib import ShardingError
from tests.shardy.oracle import differences, our_shardings, ours, shardy, shardy_shardings
from tests.shardy.programs import draw

REPORT = Path(__file__).with_name("REPORT.md")
_SLACK = 1 + 1e-6
_FASTER = 0.95


@dataclass
class Score:
    """What became of the programs of one group."""

    programs: int = 0
    good: int = 0
    cheaper: int = 0
    ratios: list[float] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.good} of {self.programs} ({self.good / max(self.programs, 1):.1%})"


def agreement(seeds: range) -> Score:
    """Programs without conflicting annotations: every value has the sharding that Shardy gives it, or the program is
    markedly faster because a dim that nobody annotated took an axis which Shardy leaves unused there."""
    score = Score()
    for seed in seeds:
        p = draw(seed, conflicts=False)
        score.programs += 1
        if not (found := differences(p, shardy_shardings(p), our_shardings(p))):
            score.good += 1
            continue
        theirs, mine = shardy(p), ours(p)
        times = f"estimated {mine.seconds * 1e6:.3g} and {theirs.seconds * 1e6:.3g} us in all"
        further = mine.seconds <= theirs.seconds * _FASTER
        (score.explained if further else score.unexplained).append(f"seed {seed}: {found[0]}; {times}")
    return score


def traffic(seeds: range) -> Score:
    """Programs with conflicting annotations: shardlib sends no more bytes than Shardy's reshards do."""
    score = Score()
    for seed in seeds:
        p = draw(seed, conflicts=True)
        score.programs += 1
        try:
            theirs, mine = shardy(p), ours(p)
        except ShardingError as error:
            score.unexplained.append(f"seed {seed}: {str(error).splitlines()[0]}")
            continue
        if mine.bytes <= theirs.bytes * _SLACK:
            score.good += 1
        else:
            more = f"seed {seed}: {mine.bytes:,.0f} B, Shardy {theirs.bytes:,.0f} B; estimated {mine.seconds * 1e6:.3g}"
            more += f" and {theirs.seconds * 1e6:.3g} us in all"
            (score.explained if mine.seconds <= theirs.seconds else score.unexplained).append(more)
        score.cheaper += mine.seconds <= theirs.seconds * _SLACK
        if theirs.bytes:
            score.ratios.append(mine.bytes / theirs.bytes)
    return score


def report(free: Score, conflicting: Score, seeds: range, seconds: float) -> Iterator[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    yield "# Shardy as an oracle"
    yield ""
    yield f"`python -m tests.shardy --first {seeds.start} --programs {len(seeds)} --report` on {datetime.date.today()},"
    yield f"torch {torch.__version__}, {versions}, {seconds:.0f} s. Planned only: nothing ran. Bytes are those of ring"
    yield "algorithms; Shardy's come from its own `sdy-insert-explicit-reshards` and `sdy-reshard-to-collectives`, with"
    yield "equal reshards merged."
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
    parser.add_argument("--report", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.programs)
    begin = time.monotonic()
    text = "\n".join(report(agreement(seeds), traffic(seeds), seeds, time.monotonic() - begin)) + "\n"
    print(text)
    if options.report:
        aside = REPORT.with_suffix(".new")
        aside.write_text(text)
        aside.rename(REPORT)


if __name__ == "__main__":
    main()
