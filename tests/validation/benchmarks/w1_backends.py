"""One step of W1 on 4 processes, its collectives over shared memory or over Gloo: both in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from shardlib.ops.collectives.transport import groups
from tests.helpers.ranks import run_ranks
from tests.models import w1

from .timing import Samples, apart, interleave

CHECKED_STEPS = 3


def launch(mode: str, layers: int, rounds: int, world: int = 4) -> tuple[Samples, float]:
    """Seconds of every step on rank 0, by backend; and how far the losses are from those of plain torch."""
    samples, error = run_ranks(measure, world, mode, layers, rounds, timeout=600.0)[0]
    return samples, error


def measure(name: str, layers: int, rounds: int) -> tuple[Samples, float]:
    """What `launch` does, on one rank."""
    from tests.models import w1_sharded

    config = w1.Config(layers=layers)
    params, batch = w1.init(config), w1.batch(config)
    eager = w1.Eager(params, config)
    expected = [float(eager.step(*batch)) for _ in range(CHECKED_STEPS)]
    mode = w1.modes(config, dist.get_world_size())[name]
    contestants: dict[str, Callable[[], Any]] = {}
    errors = []
    with w1_sharded.mesh_of(mode):
        for backend in ("torch", "shm"):
            with groups_over(backend):
                step = _Step(w1_sharded.sharded_step(mode, config), *w1_sharded.place(mode, params, *batch))
                losses = [float(step()) for _ in range(CHECKED_STEPS)]
            errors.append(apart(backend, losses, expected))
            contestants[backend] = step
        return interleave(contestants, rounds, before=dist.barrier), max(errors)


class _Step:
    def __init__(self, step: Any, state: Any, *batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        value, self.state = self.step(self.state, *self.batch)
        return value


@contextmanager
def groups_over(backend: str) -> Iterator[None]:
    """Programs that are loaded meanwhile run on groups without shared memory, or must have it."""
    kept = groups.group_for

    def found(*args: Any) -> groups.GroupHandle:
        group = kept(*args)
        assert group.size == 1 or group.transport == "shm", group.why
        return replace(group, why="a benchmark asks for Gloo") if backend == "torch" else group

    groups.group_for = found
    try:
        yield
    finally:
        groups.group_for = kept
