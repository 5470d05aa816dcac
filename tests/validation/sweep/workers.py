"""Work in child processes, forked from one that has imported everything: a crash or a hang is an outcome."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Lost:
    """A job that gave no result: it ran out of time (`kind` "timeout") or its process died ("crash")."""

    kind: str
    reason: str


def run_all(
    work: Callable[[Job], Done], jobs: Iterable[Job], *, workers: int, seconds: float
) -> Iterator[tuple[Job, Done | Lost]]:
    """Every job with its result, as they come, `workers` at a time and `seconds` of wall clock for each."""
    queue = iter(jobs)
    running: dict[Connection, _Child[Job, Done]] = {}
    try:
        while True:
            while len(running) < workers and (job := next(queue, None)) is not None:
                child = _Child(work, job, time.monotonic() + seconds)
                running[child.end] = child
            if not running:
                return
            first = min(child.deadline for child in running.values())
            wait(list(running), timeout=max(first - time.monotonic(), 0))
            for end, child in list(running.items()):
                if (done := child.result(seconds)) is not None:
                    del running[end]
                    yield child.job, done
    finally:
        for child in running.values():
            child.stop()


class _Child(Generic[Job, Done]):
    def __init__(self, work: Callable[[Job], Done], job: Job, deadline: float) -> None:
        self.job, self.deadline = job, deadline
        self.end, theirs = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_child, args=(work, job, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def result(self, seconds: float) -> Done | Lost | None:
        """What the job gave; None while it runs."""
        done: Done | Lost
        if self.end.poll():
            try:
                done = self.end.recv()
            except EOFError:
                self.process.join()
                done = Lost("crash", _death(self.process.exitcode or 0))
        elif time.monotonic() >= self.deadline:
            done = Lost("timeout", f"not done after {seconds:g} s")
        else:
            return None
        self.stop()
        return done

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.end.close()


def _child(work: Callable[[Job], Done], job: Job, end: Connection) -> None:
    faulthandler.disable()
    quiet = os.open(os.devnull, os.O_WRONLY)  # torch's C++ warnings
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    end.send(work(job))


def _death(code: int) -> str:
    return f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
