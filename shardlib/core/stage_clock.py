"""Times the stages of compilation."""

from __future__ import annotations

import time


class StageClock:
    """Adds up `seconds` by stage; `stage` names the one that runs, or is empty."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.stage = ""
        self._begin = 0.0

    def begin(self, stage: str) -> None:
        """Ends the stage that runs, and begins another."""
        self.end()
        self.stage, self._begin = stage, time.perf_counter()

    def end(self) -> None:
        """Ends the stage that runs, if any."""
        if self.stage:
            self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + time.perf_counter() - self._begin
        self.stage = ""
