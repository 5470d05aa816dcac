"""Runs a task in which torch waits for other ranks, and names the ranks that are lost instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardlib.core.errors import ShardingError
from shardlib.distributed.store import Store

T = TypeVar("T")

_LOOK_SECONDS = 0.1  # between two looks at the other ranks
_REPLY_SECONDS = 10.0  # for ranks that are about to notice that the task failed


@dataclass(frozen=True)
class Watch:
    """Watches a task by messages in a `room` of a store, over a connection that the task does not use.

    `dead` returns the ranks whose processes are known to be gone. `give_up` takes the text of the error before it is
    raised: this rank is about to exit, and ranks that wait for it elsewhere need to know why.
    """

    store: Store
    room: str
    size: int
    dead: Callable[[], Sequence[int]]
    give_up: Callable[[str], object] = lambda text: None

    def run(self, task: Callable[[], T], description: str) -> T:
        """Runs `task` in a thread and returns its result.

        Raises `ShardingError` with the lost ranks as soon as one is dead, or if the task fails on a rank and others do
        not answer within some seconds. If no rank is lost, raises the task's own error.
        """
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(task())
            except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                errors.append(error)
            done.set()

        threading.Thread(target=run, daemon=True, name="shardlib").start()
        while not done.wait(_LOOK_SECONDS):
            if self.dead() or self.store.find(f"{self.room}/failed"):
                self._raise_lost(description, None)
        if errors and isinstance(errors[0], RuntimeError):  # of torch, for a lost connection
            self.store.put(f"{self.room}/failed", "1")
            self._raise_lost(description, errors[0])
        if errors:
            raise errors[0]
        return results[0]

    def _raise_lost(self, description: str, error: RuntimeError | None) -> None:
        """Raises an error that names the lost ranks, or `error` if all ranks answer."""
        store, room = self.store, f"{self.room}/alive"
        store.post(room, b"")
        silent = store.wait(
            room, range(self.size), _REPLY_SECONDS, until=lambda _: self.dead() or store.verdict(self.room)
        )
        lost = [f"rank {r} is dead: its process is gone" for r in self.dead()]
        lost = lost or [f"rank {r} gave no sign of life within {_REPLY_SECONDS:g} s" for r in silent]
        # Ranks exit after their errors. So the first verdict is right, and later ranks adopt it.
        verdict = store.verdict(self.room, "\n".join(lost))
        if not verdict and error is not None:
            raise error
        lost_ranks = ShardingError(
            f"rank {store.rank} cannot {description}",
            verdict.split("\n") if verdict else ["it failed on another rank, and all ranks are alive"],
            rule="every rank of the mesh takes part in every step",
            remedy="look for the first error in the output of the ranks named",
        )
        self.give_up(str(lost_ranks))
        raise lost_ranks from error
