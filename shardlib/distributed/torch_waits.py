"""Runs functions of torch that wait for other ranks outside of turns: the ranks first compare their tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from shardlib.core.errors import ShardingError
from shardlib.distributed import world
from shardlib.distributed.turns import current
from shardlib.distributed.watched import Watch


def run_watched(task: Callable[[], Any], description: str) -> Any:
    """Runs `task`, in which torch waits for other ranks, and returns its result.

    Raises `ShardingError` if some rank is about to run a task with another `description`, and as soon as one is lost.
    A world of torch's `fake` backend has no other ranks.
    """
    if dist.get_backend() == "fake":
        return task()
    order = current()
    room, order.meetings = f"{order.room}/waits/{order.meetings}", order.meetings + 1
    seconds = world.timeout().total_seconds()
    tasks = order.store().exchange(room, description, range(order.size), seconds, description, order.watcher())
    if len(set(tasks.values())) > 1:
        raise ShardingError(
            "the ranks wait for each other in different tasks",
            [f"rank {r} is about to {text}" for r, text in tasks.items()],
            rule="every rank makes the same meshes, with their axes in the same order, and saves and loads checkpoints "
            "together with the others",
            remedy="let no mesh and no checkpoint depend on the rank",
        )
    watch = Watch(order.store(), room, order.size, partial(order.dead, ask=True), order.give_up)
    return watch.run(task, description)
