"""Generated programs through Shardy and shardlib, one by one, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import get_context

import torch

from shardlib import ShardingError
from tests.validation.shardy.oracle import differences, our_shardings, ours, shardy, shardy_shardings
from tests.validation.shardy.programs import draw

_SLACK = 1 + 1e-6
_FASTER = 0.95


@dataclass
class Score:
    """What became of the programs of one group; of one program, where `programs` is 1."""

    programs: int = 1
    good: int = 0
    cheaper: int = 0
    ratios: list[float] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)

    def __add__(self, other: Score) -> Score:
        both = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Score(*(a + b for a, b in both))

    def __str__(self) -> str:
        return f"{self.good} of {self.programs} ({self.good / max(self.programs, 1):.1%})"


def agreement(seed: int) -> Score:
    """A program without conflicting annotations: every value has the sharding that Shardy gives it, or the program is
    markedly faster because a dim that nobody annotated took an axis which Shardy leaves unused there."""
    p = draw(seed, conflicts=False)
    if not (found := differences(p, shardy_shardings(p), our_shardings(p))):
        return Score(good=1)
    theirs, mine = shardy(p), ours(p)
    line = f"seed {seed}: {found[0]}; estimated {mine.seconds * 1e6:.3g} and {theirs.seconds * 1e6:.3g} us in all"
    return Score(explained=[line]) if mine.seconds <= theirs.seconds * _FASTER else Score(unexplained=[line])


def traffic(seed: int) -> Score:
    """A program with conflicting annotations: shardlib sends no more bytes than Shardy's reshards do."""
    p = draw(seed, conflicts=True)
    try:
        theirs, mine = shardy(p), ours(p)
    except ShardingError as error:
        return Score(unexplained=[f"seed {seed}: {str(error).splitlines()[0]}"])
    score = Score(good=mine.bytes <= theirs.bytes * _SLACK, cheaper=mine.seconds <= theirs.seconds * _SLACK)
    score.ratios = [mine.bytes / theirs.bytes] if theirs.bytes else []
    if not score.good:
        more = f"seed {seed}: {mine.bytes:,.0f} B, Shardy {theirs.bytes:,.0f} B; estimated {mine.seconds * 1e6:.3g}"
        more += f" and {theirs.seconds * 1e6:.3g} us in all"
        (score.explained if mine.seconds <= theirs.seconds else score.unexplained).append(more)
    return score


def scores(judge: Callable[[int], Score], seeds: Iterable[int], workers: int = 1) -> Score:
    """Those of all programs, in the order of their seeds."""
    if workers == 1:
        return sum(map(judge, seeds), Score(programs=0))
    with ProcessPoolExecutor(workers, get_context("spawn"), partial(torch.set_num_threads, 1)) as pool:
        return sum(pool.map(judge, seeds), Score(programs=0))
