"""Waits of torch's own for other ranks, which know nothing of turns: the ranks say first what they are about to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardlib.core.errors import ShardingError
from shardlib.distributed import world
from shardlib.distributed.turns import current


def waited(task: Callable[[], Any], what: str) -> Any:
    """The result of `task`, which waits for other ranks out of our sight.

    Raises `ShardingError` where they are about to do something else than `what`, and as soon as one of them is dead.
    In a world of torch's `fake` backend nobody else is there.
    """
    if dist.get_backend() == "fake":
        return task()
    order, done = current(), threading.Event()
    room, order.meetings = f"{order.room}/waits/{order.meetings}", order.meetings + 1
    seconds = world.timeout().total_seconds()
    said = order.store().exchange(room, what, range(order.size), seconds, what, order.watcher())
    if len(set(said.values())) > 1:
        raise ShardingError(
            "the ranks make different groups",
            [f"rank {r} is about to {text}" for r, text in said.items()],
            rule="every rank makes the same meshes, with their axes in the same order",
            remedy="let no mesh depend on the rank",
        )
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name="shardlib").start()
    while not done.wait(0.1):
        if dead := order.dead(ask=True):
            raise ShardingError(
                f"rank {order.rank} cannot {what}",
                [f"rank {r} is dead: its process is gone" for r in dead],
                rule="every rank of the mesh takes part in every step",
                remedy="look for the first error in the output of the ranks named",
            )
    if errors:
        raise errors[0]
    return results[0]
