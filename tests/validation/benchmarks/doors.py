"""A step of a module on 4 Gloo processes through both doors, beside FSDP2 and TP + FSDP2 of torch, eager and compiled.

    python -m tests.validation.benchmarks.doors [--kinds fsdp tp_fsdp] [--layers 8] [--rounds 10] [--no-compile]

The module is W1 as plain torch (`peers_dtensor.Model`), the optimizer torch's AdamW, the same on both sides. All take
turns in the same processes, once their losses are those of plain torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from tests.models import w1

from . import peers_dtensor
from .ranks import CHECKED_STEPS, launched
from .timing import apart, interleave, markdown, ms, ratio

TABLE = {
    "embedding.weight": "vocab@tensor embed", "head.weight": "vocab@tensor embed",
    **dict.fromkeys(("*.wq.weight", "*.wk.weight", "*.wv.weight"), "heads@tensor embed"),
    "*.wo.weight": "embed heads@tensor", "*.w1.weight": "ff@tensor embed", "*.w3.weight": "ff@tensor embed",
    "*.w2.weight": "embed ff@tensor",
}  # fmt: skip
RATE = 1e-3


def step_of(module: nn.Module, opt: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def plain(params: w1.Params, config: w1.Config, tokens: Tensor, targets: Tensor) -> list[float]:
    """The losses on one device."""
    module = peers_dtensor.model(params, config)
    opt = torch.optim.AdamW(module.parameters(), lr=RATE)
    return [float(step_of(module, opt, tokens, targets).detach()) for _ in range(CHECKED_STEPS)]


def ours(door: str, kind: str, params: w1.Params, config: w1.Config, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    """A step through one of the doors; every process has the whole batch."""
    world = dist.get_world_size()
    mesh = sl.Mesh(data=world) if kind == "fsdp" else sl.Mesh(data=2, tensor=world // 2)
    module = sl.parallelize(
        peers_dtensor.model(params, config), {} if kind == "fsdp" else TABLE, strategy="fsdp", mesh=mesh
    )
    opt = torch.optim.AdamW(module.parameters(), lr=RATE)
    run = sl.jit(step_of, in_specs=(None, None, "batch@data _", "batch@data _")) if door == "jit" else step_of
    if door == "parallelize":
        with mesh:
            batch = sl.shard(batch[0], "batch@data _"), sl.shard(batch[1], "batch@data _")
    return lambda: float(run(module, opt, *batch).detach())


class Peer(peers_dtensor.Peer):
    """The peer with AdamW; compiled, it is `torch.compile` of every layer, in front of `fully_shard`."""

    def __init__(self, *args: Any, compiled: bool) -> None:
        super().__init__(*args, compiled=compiled)
        groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=True)


def measure(kind: str, config: w1.Config, rounds: int, compiles: bool) -> dict[str, Any]:
    params, (tokens, targets) = w1.init(config), w1.batch(config)
    expected = plain(params, config, tokens, targets)
    contestants: dict[str, Callable[[], Any]] = {}
    wrong = ""
    for door in ("parallelize", "jit"):
        contestants[door] = ours(door, kind, params, config, (tokens, targets))
        apart(door, [contestants[door]() for _ in range(CHECKED_STEPS)], expected)
    for name, compiled in {"eager": False, "compiled": True}.items():
        if not compiled or compiles:
            peer = Peer(kind, params, tokens, targets, config, compiled=compiled)
            losses = [peer.whole_loss(peer.step()) for _ in range(CHECKED_STEPS)]
            try:
                apart(name, losses, expected)
            except ValueError as error:
                wrong = f"not timed: {error}"
            else:
                contestants[name] = peer.step
    return {"samples": interleave(contestants, rounds, before=dist.barrier), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description="A module's step on 4 processes, beside FSDP2 and TP + FSDP2")
    parser.add_argument("--kinds", nargs="*", default=["fsdp", "tp_fsdp"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="of one of the processes")
    options = parser.parse_args()
    if options.out is None:
        _report(options)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    config = w1.Config(layers=options.layers)
    result = measure(options.kinds[0], config, options.rounds, not options.no_compile)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _report(options: argparse.Namespace) -> None:
    peers = ["eager"] + ["compiled"] * (not options.no_compile)
    rows = []
    for kind in options.kinds:
        words = ["--kinds", kind, "--layers", str(options.layers), "--rounds", str(options.rounds)]
        found = launched("tests.validation.benchmarks.doors", words + ["--no-compile"] * options.no_compile, 4, 1200.0)
        samples = found["samples"]
        for door in ("parallelize", "jit"):
            times = [ms(samples[k]) if k in samples else "" for k in peers]
            ratios = [str(ratio(samples[door], samples[k])) if k in samples else found["wrong"] for k in peers]
            rows.append([kind, door, ms(samples[door]), *times, *ratios])
    header = ["kind", "door", "shardlib", *(f"torch, {k}" for k in peers), *(f"against {k}" for k in peers)]
    print(markdown(f"A step on 4 Gloo processes, L={options.layers}, AdamW", header, rows))


if __name__ == "__main__":
    main()
