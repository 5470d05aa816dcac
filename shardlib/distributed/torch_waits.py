"""Runs functions of torch that wait for other ranks outside of turns: the ranks first compare their tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardlib.core.errors import ShardingError
from shardlib.distributed import world
from shardlib.distributed.turns import current


def run_watched(task: Callable[[], Any], description: str) -> Any:
    """Runs `task`, in which torch waits for other ranks, and returns its result.

    Raises `ShardingError` if some rank is about to run a task with another `description`, and as soon as one is dead.
    A world of torch's `fake` backend has no other ranks.
    """
    if dist.get_backend() == "fake":
        return task()
    order, done = current(), threading.Event()
    room, order.meetings = f"{order.room}/waits/{order.meetings}", order.meetings + 1
    seconds = world.timeout().total_seconds()
    tasks = order.store().exchange(room, description, range(order.size), seconds, description, order.watcher())
    if len(set(tasks.values())) > 1:
        raise ShardingError(
            "the ranks make different groups",
            [f"rank {r} is about to {text}" for r, text in tasks.items()],
            rule="every rank makes the same meshes, with their axes in the same order",
            remedy="let no mesh depend on the rank",
        )
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name="shardlib").start()
    while not done.wait(0.1):
        if dead := order.dead(ask=True):
            raise ShardingError(
                f"rank {order.rank} cannot {description}",
                [f"rank {r} is dead: its process is gone" for r in dead],
                rule="every rank of the mesh takes part in every step",
                remedy="look for the first error in the output of the ranks named",
            )
    if errors:
        raise errors[0]
    return results[0]
