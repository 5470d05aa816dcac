"""`python -m tests.validation.best [words of names]`: the table."""

from __future__ import annotations

import sys

from tests.validation.best import Row
from tests.validation.best.rows import ROWS


def said(row: Row) -> str:
    """A row as text."""
    found = row.measured()
    (work, best_work), (sent, best), (count, fewest) = (found[k] for k in ("work", "bytes", "collectives"))
    peak = f"{found['peak'][0] / found['peak'][1]:.2f}x" if "peak" in found else ""
    share = f"{sent / best:.2f}x" if best else ("-" if not sent else "inf")
    mark = "  <<" if row.faults() else ""
    figures = f"{work / best_work:6.2f}x {sent:13,.0f} {share:>8} {count:4} / {fewest:2} {peak:>7}"
    return f"{row.name:52} {figures}{mark} {row.why}"


def main(words: list[str]) -> None:
    print(f"{'program':52} {'work':>7} {'bytes':>13} {'of best':>8} {'messages':>9} {'peak':>7}")
    for row in ROWS:
        if not words or any(word in row.name for word in words):
            print(said(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
