"""Shows the progress of slow work in one line on a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AFTER, _EVERY = 3.0, 1.0  # seconds until the first progress line, and between updates


@contextmanager
def show_progress(describe: Callable[[], str]) -> Iterator[None]:
    """Shows `describe()` and the seconds so far in one line on stderr, if that is a terminal and the block takes 3 s.

    Of the ranks that torchrun starts, which share a terminal, only the first shows it. The environment variable
    `SHARDLIB_PROGRESS=0` turns it off.
    """
    is_shown = os.environ.get("SHARDLIB_PROGRESS") != "0" and os.environ.get("RANK", "0") == "0"
    if not is_shown or sys.stderr is None or not sys.stderr.isatty():
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
