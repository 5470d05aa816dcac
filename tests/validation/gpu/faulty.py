"""Parts that crash, hang and fail, for the test of what the session makes of them: run as a part's process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from tests.validation.gpu import session
from tests.validation.gpu.records import Outcome, Recorder
from tests.validation.gpu.session import Part


def _crash() -> Outcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Outcome(True, "")


def _hang() -> Outcome:
    time.sleep(60)
    return Outcome(True, "")


def _wrong() -> Outcome:
    raise RuntimeError("an illegal memory access")


def _unforeseen() -> Outcome:
    raise KeyError("nobody thought of this")


ENDINGS: dict[str, Callable[[], Outcome]] = {
    "good": lambda: Outcome(True, "equal", 0.25),
    "crash": _crash,
    "hang": _hang,
    "wrong": _wrong,
    "unforeseen": _unforeseen,
    "good too": lambda: Outcome(True, "equal", 0.5),
}


def faults(run: Recorder) -> None:
    for name, ending in ENDINGS.items():
        run.attempt("faults", name, ending, seconds=1.0)


if __name__ == "__main__":
    session.PARTS = (Part("faults", faults, 60, 1), Part("sleeper", lambda run: time.sleep(60), 60, 1))
    sys.exit(session.main())
