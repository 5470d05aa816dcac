"""`python -m tests.validation.sweep`: run what is not in the file yet of the sweep, and print the table."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import itertools
import shlex
import sys
from pathlib import Path

import torch

from tests.validation.sweep.cell import MESHES, Cell, Result, run_cell, run_plain
from tests.validation.sweep.entries import SIZES, entries
from tests.validation.sweep.report import read, report, table, write
from tests.validation.sweep.trial import MODES
from tests.validation.sweep.workers import Lost, run_all


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m tests.validation.sweep", description=__doc__)
    p.add_argument("--out", type=Path, help="JSON lines, one a cell; cells that are there are not run again")
    p.add_argument("--only", action="append", metavar="NAME", help="an entry, or a pattern of entries; may be repeated")
    p.add_argument("--sizes", choices=SIZES, action="append")
    p.add_argument("--mesh", choices=MESHES, action="append")
    p.add_argument("--mode", choices=MODES, action="append")
    p.add_argument("--cap", type=int, default=Cell.cap, help="trials of a cell, beside in-place and out= forms")
    p.add_argument("--samples", type=int, default=Cell.samples, help="samples of an entry that these are spread over")
    p.add_argument("--seconds", type=float, default=Cell.seconds, help="limit of one cell; half is for new trials")
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--again", action="store_true", help="run what --out lists as not right once more")
    p.add_argument("--report", action="store_true", help="write tests/validation/sweep/REPORT.md and right.json")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if anything was wrong, raised a raw error, hung or crashed."""
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    names = [
        n for n in entries() if not options.only or any(fnmatch.fnmatchcase(n, pattern) for pattern in options.only)
    ]
    if not names:
        raise SystemExit(f"no entry of op_db is called {' or '.join(options.only)}")
    axes = (names, options.sizes or SIZES, options.mesh or MESHES, options.mode or MODES)
    limits = (options.cap, options.samples, options.seconds)
    cells = [Cell(*key, *limits) for key in itertools.product(*axes)]
    known = {r.key: r for r in read(options.out)} if options.out else {}
    if options.again:
        known = {key: r for key, r in known.items() if r.outcome in ("right", "untestable")}
    todo = [c for c in cells if c.key not in known]
    if todo:
        _warm_up()
    for i, (cell, done) in enumerate(
        run_all(run_cell, todo, workers=options.workers, seconds=options.seconds), start=1
    ):
        result = _lost(cell, done) if isinstance(done, Lost) else done
        known[cell.key] = result
        if options.out:
            write(options.out, result)
        if not options.only:
            print(
                f"{i}/{len(todo)} {' '.join(cell.key)}: {result.outcome} {result.seconds}s", flush=True, file=sys.stderr
            )
        else:
            print(f"{' '.join(cell.key)}: {result.outcome} {result.trials}")
            print("".join(f"    {note}\n" for note in result.notes), end="")
    gc.unfreeze()
    results = [known[c.key] for c in cells if c.key in known]
    print(table(results))
    if options.report:
        given = [Path(a).name if options.out and Path(a) == options.out else a for a in argv or sys.argv[1:]]
        report(results, "python -m tests.validation.sweep " + shlex.join(given))
    return int(any(r.outcome in ("wrong", "error", "crash", "timeout") for r in results))


def _lost(cell: Cell, done: Lost) -> Result:
    """What a cell is that gave no result: nothing can be said where plain torch gives none either."""
    ((_, alone),) = run_all(run_plain, [cell], workers=1, seconds=cell.seconds)
    if isinstance(alone, Lost):
        return Result(*cell.key, "untestable", f"plain torch: {alone.reason}")
    return Result(*cell.key, done.kind, done.reason)


def _warm_up() -> None:
    """What children would each import and fill in for themselves; nothing here is garbage for them to look through."""
    for mode in MODES:
        run_cell(Cell("sub", "even", "4", mode, cap=4, samples=2))
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    raise SystemExit(main())
