"""Threads that a traced function starts, or gives work to: what they do to tensors of the trace, nobody would see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.frontend.hazards.threads import elsewhere


def _thread(module: Any) -> None:
    cls = module.Thread
    start = cls.start

    @functools.wraps(start)
    def starting(self: Any) -> None:
        run = self.run
        if (watched := elsewhere(run)) is not run:  # an attribute that leads back keeps the thread
            self.run = watched
        start(self)

    cls.start = starting


def _pool(module: Any) -> None:
    cls = module.ThreadPoolExecutor
    submit = cls.submit

    @functools.wraps(submit)
    def submitting(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, elsewhere(fn), *args, **kwargs)

    cls.submit = submitting


TAUGHT: dict[str, Callable[[Any], None]] = {"threading": _thread, "concurrent.futures.thread": _pool}
