"""What a part of the session finds out, kept line by line so that nothing is lost when its process dies or hangs.

A part runs in a process of its own. It says which case it begins and how the case ended; after a crash the next process
goes on behind it, and so does the next session over the same file: only what found no time is tried again. A figure has
one record under the case "", or a record for each of many cases.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

NO_TIME = "no time was left"
AGAIN = 75  # exit status: the device or the case is lost, but another process may go on behind it


class Outcome(NamedTuple):
    """How a case ended. `ok` is None where there is nothing to judge; `value` finds the worst of many cases."""

    ok: bool | None
    text: str
    value: float | None = None


@dataclass(frozen=True)
class Record:
    """A figure's case and how it ended; one that only began has no `ok` and no text."""

    figure: str
    case: str
    ok: bool | None
    text: str
    value: float | None = None
    began: bool = False


@dataclass
class Recorder:
    """The part's side: `attempt` runs cases, `note` keeps figures, `fact` keeps what stands above the table."""

    path: Path
    device: str = "cuda"
    quick: bool = False
    end: float = float("inf")  # time.monotonic() after which no case begins
    done: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done |= {(r.figure, r.case) for r in read(self.path)[0] if r.text != NO_TIME}

    def attempt(self, figure: str, case: str, run: Callable[[], Outcome], seconds: float = 30.0) -> None:
        """Run a case and keep how it ended; one of longer than `seconds`, or a lost device, ends the process."""
        if (figure, case) in self.done:
            return
        if time.monotonic() > self.end:
            self._put(Record(figure, case, None, NO_TIME))
            return
        self._put(Record(figure, case, None, "", began=True))
        with self._watched(figure, case, seconds):
            try:
                outcome = run()
                self._synchronize()
            except (RuntimeError, ValueError, AssertionError) as error:
                said = " ".join(str(error).split()) or type(error).__name__
                self._put(Record(figure, case, False, said[:300]))
                self._leave_if_lost()
                return
        self._put(Record(figure, case, outcome.ok, outcome.text, outcome.value))

    def note(self, figure: str, ok: bool | None, text: str, value: float | None = None) -> None:
        self._put(Record(figure, "", ok, text, value))

    def fact(self, name: str, text: str) -> None:
        self._write({"fact": name, "text": text})

    def absent(self, figures: Iterable[str], reason: str) -> None:
        """These figures cannot be measured here."""
        for figure in figures:
            self._write({"absent": figure, "text": reason})

    def _put(self, record: Record) -> None:
        if not record.began:
            self.done.add((record.figure, record.case))
        self._write(asdict(record))

    def _write(self, line: Mapping[str, Any]) -> None:
        _append(self.path, line)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _leave_if_lost(self) -> None:
        """After a fault in a kernel every later CUDA call of the process fails."""
        try:
            self._synchronize()
        except RuntimeError:
            sys.stdout.flush()
            os._exit(AGAIN)

    @contextmanager
    def _watched(self, figure: str, case: str, seconds: float) -> Any:
        def hang() -> None:
            self._put(Record(figure, case, False, f"did not end within {seconds:.0f} s"))
            os._exit(AGAIN)

        timer = threading.Timer(seconds, hang)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def read(path: Path) -> tuple[list[Record], dict[str, str], dict[str, str]]:
    """The records that ended, the last of every case; the facts; and why figures are absent."""
    records: dict[tuple[str, str], Record] = {}
    facts: dict[str, str] = {}
    absent: dict[str, str] = {}
    for said in _lines(path):
        if "fact" in said:
            facts[said["fact"]] = said["text"]
        elif "absent" in said:
            absent[said["absent"]] = said["text"]
        elif "case" in said and not said["began"]:
            records[said["figure"], said["case"]] = Record(**said)
    return list(records.values()), facts, absent


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # the process died while it wrote
            yield json.loads(line)


def ended(path: Path) -> set[str]:
    """The parts that came to their end, with time for all of their cases."""
    return {said["ended"] for said in _lines(path) if "ended" in said}


def end(path: Path, part: str) -> None:
    """Says that a part need not run again."""
    _append(path, {"ended": part})


def join(path: Path, identity: str, others: Sequence[Path]) -> str:
    """Makes `path` go on from itself and from other files of records; says what of them does not count, and why.

    Records count where they are of the same machine and sources, as `identity` tells them.
    """
    kept, left = [], []
    for file in (path, *others):
        lines = list(_lines(file))
        found = next(
            (said["identity"] for said in lines if "identity" in said), identity if not lines else "nobody knows"
        )
        if found == identity:
            kept += [said for said in lines if said not in kept]
        else:
            left.append(f"{file} is left out: it is of {found}, not of {identity}")
    content = [{"identity": identity}, *(said for said in kept if "identity" not in said)]
    if left and path.exists():
        path.replace(path.with_suffix(".old.jsonl"))
    path.write_text("".join(json.dumps(said) + "\n" for said in content))
    return "\n".join(left)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def close(path: Path, how: str, ok: bool | None = False) -> None:
    """After a process died: the case that it had begun and not ended gets a record that says so."""
    begun = None
    for said in _lines(path):
        if "case" in said:
            begun = Record(**said) if said["began"] else None
    if begun is not None:
        with path.open("a") as file:
            file.write("\n" + json.dumps(asdict(Record(begun.figure, begun.case, ok, how))) + "\n")


def summed_up(records: list[Record], best: bool = False) -> Outcome | None:
    """One outcome of all records of a figure; None when there is none, or no case was reached."""
    if not records or all(r.text == NO_TIME for r in records):
        return None
    if best:
        tried = {r.case: r.value for r in records if r.value is not None}
        if not tried:
            return Outcome(False, f"none of {len(records)} ran: {records[0].text[:120]}")
        said = ", ".join(f"{case}: {value:.3g}" for case, value in tried.items())
        said += "".join(f", {r.case}: not run ({r.text[:60]})" for r in records if r.value is None)
        return Outcome(None, f"{max(tried, key=lambda case: tried[case])} ({said})")
    if [r.case for r in records] == [""]:
        return Outcome(records[0].ok, records[0].text, records[0].value)
    failed = [r for r in records if r.ok is False]
    left = [r for r in records if r.ok is None]
    passed = len(records) - len(failed) - len(left)
    text = f"{passed} of {len(records)} cases pass"
    if left:
        text += f", {len(left)} not reached"
    if values := [(r.value, r.case) for r in records if r.value is not None]:
        text += "; worst {:.2f} ({})".format(*max(values))
    for r in failed[:2]:
        text += f"; {r.case}: {r.text[:120]}"
    if len(failed) > 2:
        text += f"; and {len(failed) - 2} more"
    return Outcome(False if failed else None if left else True, text)
