"""The seconds that each stage of something takes, and a line on a terminal where that is long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_AFTER, _EVERY = 3.0, 1.0  # seconds until somebody who waits is told, and between further words
_STAGES = {"": "trace", "trace": "normalize", "normalize": "rules", "rules": "propagate", "propagate": "lower"}


class Clock:
    """`seconds` by stage; the time since the last stop is that of the stage that stops."""

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
        """The stage that runs now.

        Example:
            >>> clock = Clock()
            >>> clock.stop("trace")
            >>> clock.stage
            'normalize'
        """
        return _STAGES.get(self._stopped, "passes")


@contextmanager
def notice(name: str, clock: Clock) -> Iterator[None]:
    """Where planning `name` takes more than 3 s, write its stage and seconds in one line on stderr, if a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    speaker = threading.Thread(target=_speak, args=(name, clock, done), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def _speak(name: str, clock: Clock, done: threading.Event) -> None:
    begin, wait, line = time.perf_counter(), _AFTER, ""
    while not done.wait(wait):
        seconds, wait = time.perf_counter() - begin, _EVERY
        before, line = len(line), f"shardlib plans {name}: {clock.stage}, {seconds:.0f} s"
        sys.stderr.write(f"\r{line:{before}}")
        sys.stderr.flush()
    if line:
        sys.stderr.write("\n")
        sys.stderr.flush()
