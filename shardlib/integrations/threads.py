"""Threads that a traced function starts or gives work to: the trace would not see what they do to its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.frontend.hazards.threads import guard_thread_work
from shardlib.integrations.on_import import replaces, when_imported


@when_imported("threading")
def _patch_thread(_: Any) -> None:
    @replaces("threading.Thread.start")
    def start(original: Callable[..., None], self: Any) -> None:
        run = self.run
        if (watched := guard_thread_work(run)) is not run:  # an attribute keeps the thread alive by a cycle
            self.run = watched
        original(self)


@when_imported("concurrent.futures.thread")
def _patch_pool(_: Any) -> None:
    @replaces("concurrent.futures.thread.ThreadPoolExecutor.submit")
    def submit(original: Callable[..., Any], self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(self, guard_thread_work(fn), *args, **kwargs)
