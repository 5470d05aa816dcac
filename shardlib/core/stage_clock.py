"""The seconds that each stage of something takes."""

from __future__ import annotations

import time


class Clock:
    """`seconds` by stage; the time since the last stop is that of the stage that stops."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = self.seconds.get(stage, 0.0) + now - self._last, now
