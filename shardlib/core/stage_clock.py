"""Times the stages of compilation, and shows progress on a terminal if they are slow."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
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
def show_progress(name: str, clock: StageClock) -> Iterator[None]:
    """Shows stage and seconds in one line on stderr, if that is a terminal and planning `name` takes over 3 s."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    speaker = threading.Thread(target=_write_progress, args=(name, clock, done), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def _write_progress(name: str, clock: StageClock, done: threading.Event) -> None:
    begin, wait, line = time.perf_counter(), _AFTER, ""
    while not done.wait(wait):
        seconds, wait = time.perf_counter() - begin, _EVERY
        before, line = len(line), f"shardlib plans {name}: {clock.stage}, {seconds:.0f} s"
        sys.stderr.write(f"\r{line:{before}}")
        sys.stderr.flush()
    if line:
        sys.stderr.write("\n")
        sys.stderr.flush()
