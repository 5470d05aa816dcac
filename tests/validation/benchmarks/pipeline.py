"""A pipelined step on 4 Gloo processes (2 stages x 2 data) beside torch.distributed.pipelining with DDP or FSDP2.

    python -m tests.validation.benchmarks.pipeline [--layers 8] [--microbatches 8] [--rounds 5] [--strategies ddp fsdp]

The module is W1 as plain torch (`peers_dtensor.Model`), the optimizer torch's AdamW, the schedule 1F1B. Both take turns
in the same processes, once their losses are those of plain torch. A microbatch has one row on each data rank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import shardlib as sl
from tests.models import w1

from . import doors, peers_dtensor
from .ranks import CHECKED_STEPS, launched
from .timing import apart, interleave, markdown, ms, ratio

STAGES, DATA = 2, 2


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Part(nn.Module):
    """The layers of one stage; the first has the embedding, the last the norm and the head."""

    def __init__(self, model: peers_dtensor.Model, stage: int) -> None:
        super().__init__()
        n = len(model.layers) // STAGES
        self.config, self.layers = model.config, model.layers[stage * n : (stage + 1) * n]
        self.embedding = model.embedding if stage == 0 else nn.Identity()
        self.head = nn.Sequential(model.norm, model.head) if stage == STAGES - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = w1.rotary(self.config, x.device)
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        y: Tensor = self.head(x)
        return y


def peer(
    strategy: str, params: w1.Params, config: w1.Config, batch: tuple[Tensor, Tensor], n: int
) -> Callable[[], float]:
    """A step of torch.distributed.pipelining: the mean loss on the last stage's ranks, 0 on the others."""
    mesh = init_device_mesh("cpu", (STAGES, DATA), mesh_dim_names=("stage", "data"))
    stage, place = mesh["stage"].get_local_rank(), mesh["data"].get_local_rank()
    part: nn.Module = Part(peers_dtensor.model(params, config), stage)
    if strategy == "fsdp":
        for layer in part.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(part, mesh=mesh["data"])
    else:
        part = DistributedDataParallel(part, process_group=mesh["data"].get_group())
    optimizer = torch.optim.AdamW(part.parameters(), lr=doors.RATE)
    pipeline = PipelineStage(part, stage, STAGES, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(pipeline, n, loss_fn=loss_of)
    tokens, targets = (x.chunk(DATA)[place] for x in batch)

    def step() -> float:
        losses: list[Tensor] = []
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    return step


def whole_loss(loss: float) -> float:
    """The mean of the losses of the last stage's data ranks."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / DATA


def ours(
    strategy: str, params: w1.Params, config: w1.Config, batch: tuple[Tensor, Tensor], n: int
) -> Callable[[], float]:
    """A jitted step on a staged mesh; every process has the whole batch."""
    mesh = sl.Mesh(stage=STAGES, data=DATA, stages="stage")
    per_stage = config.layers // STAGES
    homes: dict[str, int] = {"embedding": 0, "norm": STAGES - 1, "head": STAGES - 1}
    homes |= {f"layers.{i}": i // per_stage for i in range(config.layers)}
    module = sl.parallelize(peers_dtensor.model(params, config), strategy=strategy, stages=homes, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=doors.RATE)

    @sl.jit
    def step(module: Any, optimizer: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        def forward(rows: tuple[Tensor, Tensor]) -> Tensor:
            return loss_of(module(rows[0]), rows[1])

        loss: Tensor = sl.microbatch(forward, (tokens, targets), n=n, schedule="1f1b")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def run() -> float:
        with mesh:
            return float(step(module, optimizer, *batch))

    return run


def cpu_seconds(step: Callable[[], float], rounds: int) -> list[float]:
    """CPU seconds of all ranks in one step: on a busy machine they scatter less than its seconds."""
    samples = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.process_time()
        step()
        total = torch.tensor(time.process_time() - begin, dtype=torch.float64)
        dist.all_reduce(total)
        samples.append(float(total))
    return samples


def measure(strategy: str, config: w1.Config, n: int, rounds: int) -> dict[str, Any]:
    params, batch = w1.init(config), w1.batch(config)
    expected = doors.plain(params, config, *batch)
    theirs = peer(strategy, params, config, batch, n)
    apart("torch", [whole_loss(theirs()) for _ in range(CHECKED_STEPS)], expected)
    mine = ours(strategy, params, config, batch, n)
    apart("shardlib", [mine() for _ in range(CHECKED_STEPS)], expected)
    return {
        "samples": interleave({"torch": theirs, "ours": mine}, rounds, before=dist.barrier),
        "cpu": {"torch": cpu_seconds(theirs, rounds), "ours": cpu_seconds(mine, rounds)},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A pipelined step beside torch.distributed.pipelining")
    parser.add_argument("--strategies", nargs="*", default=["ddp", "fsdp"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="of one of the processes")
    options = parser.parse_args()
    if options.out is None:
        print(_report(options))
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    config = w1.Config(layers=options.layers, batch=DATA * options.microbatches, seq=options.sequence)
    result = measure(options.strategies[0], config, options.microbatches, options.rounds)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _report(options: argparse.Namespace) -> str:
    rows = []
    for strategy in options.strategies:
        words = [f"--{name}={getattr(options, name)}" for name in ("layers", "microbatches", "sequence", "rounds")]
        measured = launched(
            "tests.validation.benchmarks.pipeline", ["--strategies", strategy, *words], STAGES * DATA, 1200.0
        )
        mine, theirs = (measured["samples"][name] for name in ("ours", "torch"))
        spread = [f"{ms(s)} ({min(s) * 1e3:.0f}-{max(s) * 1e3:.0f})" for s in (mine, theirs)]
        cpu = ratio(measured["cpu"]["ours"], measured["cpu"]["torch"])
        rows.append([strategy, *spread, ratio(mine, theirs), "<= 0.8x", cpu, f"{measured['load']:.0f}"])
    header = ["strategy", "shardlib (fastest-slowest)", "torch.distributed.pipelining", "ratio (quartiles)", "target"]
    title = f"A step on {STAGES} stages x {DATA} data, L={options.layers}, {options.microbatches} microbatches, 1F1B"
    return markdown(title, [*header, "CPU seconds", "load"], rows)


if __name__ == "__main__":
    main()
