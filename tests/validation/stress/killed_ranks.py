"""Ranks that are killed at any moment: every survivor must end, soon, with an error that names the dead rank.

How soon is counted in looks and not in seconds, of which a loaded machine takes any number: once a process is gone, no
survivor may look at it and go on, nor wait until a timeout is over.

python -m tests.validation.stress.killed_ranks --kills 100
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.distributed.processes import Processes
from shardlib.ops.collectives.transport.shm_segment import Segment
from tests.helpers.ranks import TRANSPORTS, Pool, RankError, speak

LATE = "within "  # what errors say of ranks that did not come in time


class Told(Exception):  # noqa: N818  it carries what a rank was told
    """What a survivor was told, and how often it had looked at the dead process before and seen nothing."""

    def __init__(self, text: str, misses: int) -> None:
        super().__init__(text, misses)
        self.text, self.misses = text, misses


class Looks:
    """Counts on a rank the looks at the victim that do not see that it is gone, though the file `gone` says so."""

    def __init__(self, victim: int, gone: str) -> None:
        self.misses = 0
        of_process, of_segment = Processes.dead, Segment.owner_is_gone

        def dead(processes: Processes, ranks: Sequence[int] | None = None, *, ask: bool = False) -> list[int]:
            after = os.path.exists(gone)  # noqa: PTH110
            seen = of_process(processes, ranks, ask=ask)
            self.misses += after and (ranks is None or victim in ranks) and victim not in seen
            return seen

        def owner_is_gone(segment: Segment) -> bool:
            after = os.path.exists(gone)  # noqa: PTH110
            seen = of_segment(segment)
            self.misses += after and not seen and not Path(f"/proc/{segment.address.pid}").exists()
            return seen

        Processes.dead, Segment.owner_is_gone = dead, owner_is_gone  # type: ignore[method-assign]


def work(transport: str, path: str, victim: int) -> None:
    """On a rank: programs, eager ops, new groups and new shapes, again and again, until somebody is gone."""
    speak(transport)
    looks = Looks(victim, f"{path}.gone")
    n = dist.get_world_size()
    axes = {"x": 2, "y": n // 2} if n > 2 else {"x": n}
    with sl.Mesh(axes):
        dist.barrier()
        with open(f"{path}.{dist.get_rank()}", "w"):  # noqa: PTH123
            pass
        step = sl.jit(lambda x: (x @ x.t()).sum(0))
        try:
            for i in range(1 << 30):
                torch.manual_seed(i)
                spec = "a@x b" if n == 2 or i % 2 else "a@x b@y"
                x = sl.shard(torch.randn(4 * (1 + i % 3), 8), spec)
                y = step(x)
                large = sl.shard(torch.ones(1 << (18 + i % 2)), "a@x")
                float((y.sum() + large.sum()).full_tensor())
                torch.empty_like(x).normal_()
        except sl.ShardingError as error:
            raise Told(str(error), looks.misses) from error


def kill(n: int, transport: str, delay: float, victim: int, folder: str) -> list[str]:
    """Kill one of `n` ranks that long after all have begun; what is wrong with how the others end."""
    path = f"{folder}/begun"
    with closing(Pool(n)) as pool:

        def strike() -> None:
            while not all(os.path.exists(f"{path}.{r}") for r in range(n)):  # noqa: PTH110
                time.sleep(0.01)
            time.sleep(delay)
            os.kill(pool.processes[victim].pid or 0, signal.SIGKILL)
            pool.processes[victim].join()
            Path(f"{path}.gone").touch()

        thread = threading.Thread(target=strike)
        thread.start()
        errors: dict[int, Any] = {}
        try:
            pool.run(work, transport, path, victim)
        except RankError as caught:
            errors = dict(caught.errors)
        thread.join()
    case = f"rank {victim} of {n} killed after {delay:.3f} s on {transport}"
    wrong = []
    for rank in range(n):
        error = errors.get(rank)
        if rank == victim:
            continue
        if not isinstance(error, Told):
            wrong.append(f"{case}: rank {rank} ended with {error}")
        elif f"rank {victim}" not in error.text:
            wrong.append(f"{case}: rank {rank} was told {error.text}")
        elif LATE in error.text or error.misses:
            wrong.append(f"{case}: rank {rank} was told after {error.misses} looks at a dead process: {error.text}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, wrong = random.Random(options.seed), []
    for i in range(options.kills):
        n, transport = (2, 4)[i % 2], TRANSPORTS[i // 2 % 3]
        with tempfile.TemporaryDirectory() as folder:
            found = kill(n, transport, 4.0 * rng.random() ** 2, rng.randrange(n), folder)
        print("\n".join(found) or f"{i}: told", flush=True)
        wrong += found
    print(f"{options.kills} kills: {len(wrong)} faults")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
