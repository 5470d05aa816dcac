"""One cell: all trials of an entry with one kind of sizes, on one mesh, in one mode."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from shardlib import Mesh
from tests.validation.sweep.entries import Case, cases
from tests.validation.sweep.placements import Placement, placements, specs
from tests.validation.sweep.trial import MODES, Oracle, Outcome, UntestableError, oracle, owned, trial

MESHES: dict[str, dict[str, int]] = {"4": {"x": 4}, "2x2": {"x": 2, "y": 2}}
_NOTES = 4  # faults of one kind that are kept
_LISTED = 64  # placements of one sample that trials are taken from


@dataclass(frozen=True)
class Cell:
    """What is swept, and how much: `cap` trials over `samples` samples, and one of each in-place and out= form.

    None is begun after half of `seconds`.
    """

    entry: str
    sizes: str
    mesh: str
    mode: str
    cap: int = 8
    samples: int = 5
    seconds: float = 60.0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.entry, self.sizes, self.mesh, self.mode


@dataclass
class Result:
    """How a cell came out; `trials` counts outcomes, `notes` are faults and refusals with the trial that shows them."""

    entry: str
    sizes: str
    mesh: str
    mode: str
    outcome: str = "untestable"
    reason: str = ""
    trials: dict[str, int] = field(default_factory=dict)
    replicated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.entry, self.sizes, self.mesh, self.mode


WORST_FIRST = ("crash", "wrong", "error", "timeout", "refused", "right", "untestable")


def run_cell(cell: Cell) -> Result:
    """Run every trial of a cell in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about ops and samples of its own
        start = time.perf_counter()
        result = Result(*cell.key)
        kept: Counter[str] = Counter()
        said: set[str] = set()
        replicated: dict[str, None] = {}
        for case, placement, outcome in _trials(cell, result, start):
            result.trials[outcome.kind] = result.trials.get(outcome.kind, 0) + 1
            replicated |= dict.fromkeys(outcome.replicated)
            if outcome.kind != "right" and outcome.why not in said and kept[outcome.kind] < _NOTES:
                said.add(outcome.why)
                kept[outcome.kind] += 1
                result.notes.append(f"{outcome.kind}: {outcome.why} | {_shown(case, placement)}")
        result.replicated = list(replicated)
        result.outcome = next((k for k in WORST_FIRST if result.trials.get(k)), "untestable")
        if result.outcome in ("right", "untestable"):
            result.reason = result.reason if not result.trials else ""
        else:
            result.reason = next(n for n in result.notes if n.startswith(result.outcome)).partition(": ")[2]
        result.seconds = round(time.perf_counter() - start, 2)
        return result


def run_plain(cell: Cell) -> int:
    """Plain torch alone on all samples of a cell; how many there are."""
    plain, others = cases(cell.entry, cell.sizes, cell.samples)
    for case in (*plain, *others):
        with contextlib.suppress(UntestableError):
            oracle(owned(case))
    return len(plain) + len(others)


def _trials(cell: Cell, result: Result, start: float) -> Iterator[tuple[Case, Placement, Outcome]]:
    """Round after round over the samples, then the in-place and out= forms."""
    mesh = Mesh(MESHES[cell.mesh])
    plain, others = cases(cell.entry, cell.sizes, cell.samples)
    result.reason = "it has no samples"
    share = math.ceil(cell.cap / max(len(plain), 1))
    first = MODES.index(cell.mode) * (cell.cap - 1)  # the modes try other placements
    turns = [itertools.islice(_turns(cell, result, case, first + i * share), share) for i, case in enumerate(plain)]
    rounds = (turn for some in itertools.zip_longest(*turns) for turn in some if turn is not None)
    forms = [itertools.islice(_turns(cell, result, case, first + i + 1), 1) for i, case in enumerate(others)]
    for case, reference, placement in itertools.chain(itertools.islice(rounds, cell.cap), *forms):
        if time.perf_counter() - start > cell.seconds / 2:
            return
        yield case, placement, trial(case, reference, mesh, cell.mode, specs(placement))


def _turns(cell: Cell, result: Result, case: Case, first: int) -> Iterator[tuple[Case, Oracle, Placement]]:
    """The placements of one case, beginning with the `first`."""
    try:
        case = owned(case)
        reference = oracle(case)
    except UntestableError as untestable:
        result.reason = str(untestable)
        return
    shapes = [x.shape for x in (*case.tensors, *reference.cotangents.values())]
    if not case.tensors:  # a factory: nothing is sharded but what a program makes of its result
        made = [x.shape for x in reference.leaves if isinstance(x, Tensor)]
        if cell.mode == "eager" or len(made) != 1:
            result.reason = "it has no tensor to place"
            return
        shapes = made
    where = placements(shapes, MESHES[cell.mesh], cell.sizes == "even", f"{cell.entry} {case.label}")
    listed = list(itertools.islice(where, _LISTED))
    first %= len(listed)
    for placement in listed[first:] + listed[:first]:
        yield case, reference, placement


def _shown(case: Case, placement: Placement) -> str:
    shapes = [str(list(x.shape)) for x in case.tensors]
    shapes += ["cotangent" if shapes else "result"] * (len(placement) - len(shapes))
    return f"{case.label}: " + ", ".join(f"{s} {p}" for s, p in zip(shapes, specs(placement), strict=True))
