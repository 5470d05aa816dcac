"""Writes timelines that Perfetto opens: JSON of Chrome's trace events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A bar on a track, from `start` on, in seconds; `args` are shown when it is selected."""

    track: str
    name: str
    start: float
    seconds: float
    args: Mapping[str, Any]


def write_trace(
    path: str | os.PathLike[str],
    name: str,
    tracks: Iterable[str],
    spans: Iterable[Span],
    memory: Iterable[tuple[float, int]] = (),
) -> None:
    """Writes one process with a track per name, and its bytes in use (from each second on) as a counter."""
    numbers = {track: i for i, track in enumerate(tracks, 1)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}]
    for track, i in numbers.items():
        events.append({"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": track}})
    for s in spans:
        at = {"ts": s.start * 1e6, "dur": s.seconds * 1e6, "args": dict(s.args)}
        events.append({"ph": "X", "pid": 1, "tid": numbers[s.track], "name": s.name, **at})
    for second, held in memory:
        events.append({"ph": "C", "pid": 1, "name": "memory", "ts": second * 1e6, "args": {"bytes": held}})
    aside = Path(f"{os.fspath(path)}.part")
    aside.write_text(json.dumps({"traceEvents": events}))
    aside.replace(path)
