"""One step on real Gloo processes: ours and the hand-written peer take turns in the same processes.

`launch` starts the processes with the environment that torchrun gives; each of them runs this module. Rank 0 writes the
result as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.models import w1

from . import peers_dtensor
from .timing import apart, interleave

CHECKED_STEPS = 3


def launch(
    ours: str | None, peer: str, layers: int, *, world: int = 4, rounds: int = 10, timeout: float = 300.0
) -> dict[str, Any]:
    """Run mode `ours` (None: the peer alone) against `peer` on `world` processes and return what rank 0 measured."""
    options = ["--peer", peer, "--layers", str(layers), "--rounds", str(rounds), *(["--ours", ours] if ours else [])]
    return launched(__name__, options, world, timeout)


def launched(module: str, options: list[str], world: int, timeout: float) -> dict[str, Any]:
    """Run a module with these options, and `--out`, on `world` processes; returns what rank 0 wrote there."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", module, *options, "--out", str(out)]
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        processes = [
            subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)
        ]
        try:
            _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended; one that fails, or the deadline, ends the wait with an error."""
    while (codes := [process.poll() for process in processes]) != [0] * len(processes):
        if failed := [rank for rank, code in enumerate(codes) if code]:
            raise RuntimeError(f"ranks {failed} failed")
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {[r for r, code in enumerate(codes) if code is None]} did not end in time")
        time.sleep(0.05)


def measure(ours: str | None, peer: str, config: w1.Config, rounds: int) -> dict[str, Any]:
    params, (tokens, targets) = w1.init(config), w1.batch(config)
    eager = w1.Eager(params, config)
    expected = [float(eager.step(tokens, targets)) for _ in range(CHECKED_STEPS)]
    theirs = peers_dtensor.Peer(peer, params, tokens, targets, config)
    losses = [theirs.whole_loss(theirs.step()) for _ in range(CHECKED_STEPS)]
    differ = {"peer": apart(peer, losses, expected)}
    contestants: dict[str, Any] = {"peer": theirs.step}
    if ours:
        from tests.models import w1_sharded

        mode = w1.modes(config, dist.get_world_size())[ours]
        with w1_sharded.mesh_of(mode):
            step = w1_sharded.sharded_step(mode, config)
            state, *batch = w1_sharded.place(mode, params, tokens, targets)

            def our_step() -> Any:
                nonlocal state
                value, state = step(state, *batch)
                return value

            losses = [float(our_step()) for _ in range(CHECKED_STEPS)]
            differ["ours"] = apart("shardlib", losses, expected)
            contestants["ours"] = our_step
            samples = interleave(contestants, rounds, before=dist.barrier)
    else:
        samples = interleave(contestants, rounds, before=dist.barrier)
    return {"apart": differ, "samples": samples}


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    result = measure(arguments.ours, arguments.peer, w1.Config(layers=arguments.layers), arguments.rounds)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
