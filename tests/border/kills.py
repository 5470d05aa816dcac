"""Ranks that are killed at any moment: every survivor must end, soon, with an error that names the dead rank.

python -m tests.border.kills --kills 100
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
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from tests.ranks import TRANSPORTS, Pool, RankError, speak

LIMIT = 5.0  # seconds from the kill to the error of every survivor


class Told(Exception):  # noqa: N818  it carries what a rank was told
    """What a survivor was told, and when."""

    def __init__(self, text: str, at: float) -> None:
        super().__init__(text, at)
        self.text, self.at = text, at


def work(transport: str, path: str) -> None:
    """On a rank: programs, eager ops, new groups and new shapes, again and again, until somebody is gone."""
    speak(transport)
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
            raise Told(str(error), time.monotonic()) from error


def kill(n: int, transport: str, delay: float, victim: int, folder: str) -> list[str]:
    """Kill one of `n` ranks that long after all have begun; what is wrong with how the others end."""
    path = f"{folder}/begun"
    with closing(Pool(n)) as pool:
        killed: list[float] = []

        def strike() -> None:
            while not all(os.path.exists(f"{path}.{r}") for r in range(n)):  # noqa: PTH110
                time.sleep(0.01)
            time.sleep(delay)
            killed.append(time.monotonic())
            os.kill(pool.processes[victim].pid or 0, signal.SIGKILL)

        thread = threading.Thread(target=strike)
        thread.start()
        errors: dict[int, Any] = {}
        try:
            pool.run(work, transport, path, timeout=60.0)
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
        elif error.at - killed[0] > LIMIT:
            wrong.append(f"{case}: rank {rank} was told after {error.at - killed[0]:.1f} s: {error.text}")
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
