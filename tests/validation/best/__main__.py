"""`python -m tests.validation.best [words] [--without NAME]`: the table, or the rows that suffer without NAME.

`tests/validation/best/without.py` says which mechanisms have names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.validation.best import Row
from tests.validation.best.rows import ROWS
from tests.validation.best.without import worse_without


def format_row(row: Row) -> str:
    """A row of the table as text."""
    measured = row.measured()
    (work, best_work), (sent, best), (count, fewest) = (measured[k] for k in ("work", "bytes", "collectives"))
    peak = f"{measured['peak'][0] / measured['peak'][1]:.2f}x" if "peak" in measured else ""
    share = f"{sent / best:.2f}x" if best else ("-" if not sent else "inf")
    mark = "  <<" if row.faults() else ""
    figures = f"{work / best_work:6.2f}x {sent:13,.0f} {share:>8} {count:4} / {fewest:2} {peak:>7}"
    return f"{row.name:52} {figures}{mark} {row.why}"


def print_table(rows: Sequence[Row]) -> None:
    print(f"{'program':52} {'work':>7} {'bytes':>13} {'of best':>8} {'messages':>9} {'peak':>7}")
    for row in rows:
        print(format_row(row), flush=True)


def print_worse(rows: Sequence[Row], name: str) -> None:
    """Print the rows that get worse without a mechanism."""
    count = 0
    for row in rows:
        if worse := worse_without(row, name):
            count += 1
            changes = (f"{figure} {before:,.6g} -> {after:,.6g}" for figure, (before, after) in worse.items())
            print(f"{row.name:52} {', '.join(changes)}", flush=True)
    print(f"{count} of {len(rows)} rows get worse without {name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.validation.best")
    parser.add_argument("words", nargs="*", help="print only rows whose name contains one of these")
    parser.add_argument("--without", metavar="NAME", help="leave out rewrites, heuristics or passes (commas)")
    args = parser.parse_args()
    rows = [row for row in ROWS if not args.words or any(word in row.name for word in args.words)]
    if args.without is None:
        print_table(rows)
    else:
        print_worse(rows, args.without)


if __name__ == "__main__":
    main()
