"""Counts the runs of a function's Python, which calls of its program do not repeat."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any


class TraceRuns:
    """A list of notes behind a context variable, whose changes shardlib neither repeats nor undoes."""

    def __init__(self) -> None:
        self._notes: ContextVar[tuple[Any, ...]] = ContextVar("notes", default=())

    def note(self, x: Any = None) -> None:
        self._notes.set((*self._notes.get(), x))

    @property
    def notes(self) -> list[Any]:
        return list(self._notes.get())

    def __len__(self) -> int:
        return len(self._notes.get())
