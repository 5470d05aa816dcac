"""Times the stages of compilation, and shows the progress of slow work on a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AFTER, _EVERY = 3.0, 1.0  # seconds until the first progress line, and between updates
_STAGES = {"": "trace", "trace": "normalize", "normalize": "rules", "rules": "propagate", "propagate": "lower"}


class StageClock:
    """Records `seconds` by stage; `stop` ends a stage that began at the last stop."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()
        self._stopped = ""

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = self.seconds.get(stage, 0.0) + now - self._last, now
        self._stopped = stage

    @property
    def stage(self) -> str:
        return _STAGES.get(self._stopped, "passes")


@contextmanager
def show_progress(describe: Callable[[], str]) -> Iterator[None]:
    """Shows `describe()` and the seconds so far in one line on stderr, if that is a terminal and the block takes 3 s.

    The environment variable `SHARDLIB_PROGRESS=0` turns it off.
    """
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("SHARDLIB_PROGRESS") == "0":
        yield
        return
    done = threading.Event()
    speaker = threading.Thread(target=_write_progress, args=(describe, done), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def _write_progress(describe: Callable[[], str], done: threading.Event) -> None:
    begin, wait, line = time.perf_counter(), _AFTER, ""
    while not done.wait(wait):
        seconds, wait = time.perf_counter() - begin, _EVERY
        before, line = len(line), f"shardlib {describe()}, {seconds:.0f} s"
        sys.stderr.write(f"\r{line:{before}}")
        sys.stderr.flush()
    if line:
        sys.stderr.write("\n")
        sys.stderr.flush()
