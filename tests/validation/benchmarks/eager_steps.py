"""What `opt.step()` costs in one's own loop, by strategy: from the second step on nothing is compiled.

    python -m tests.validation.benchmarks.eager_steps [--layers 8] [--rounds 20] [--optimizer AdamW]

Strategies take turns, on 4 virtual devices. The last columns are ratios to `fsdp`, with the quartiles of single rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardlib as sl
from shardlib.tensor.eager_cache import PROGRAMS

from .timing import interleave, markdown, ms, ratio

STRATEGIES = ("fsdp", "zero1", "zero2", "ddp")


def stepper(strategy: str, layers: int, width: int, optimizer: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A forward and backward pass, and the step behind it."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    with sl.Mesh(data=4):
        sl.parallelize(model, strategy=strategy)
    steps = getattr(torch.optim, optimizer)(model.parameters())

    def backward() -> None:
        steps.zero_grad()
        model(torch.randn(8, width)).square().mean().backward()

    return backward, steps.step


def main() -> None:
    parser = argparse.ArgumentParser(description="opt.step() outside jit, by strategy")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--optimizer", default="AdamW")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = {name: stepper(name, options.layers, options.width, options.optimizer) for name in STRATEGIES}

    def backward() -> None:
        for run, _ in pairs.values():
            run()

    contestants = {name: step for name, (_, step) in pairs.items()}
    interleave(contestants, 1, before=backward)  # two steps and more, after which nothing is compiled
    programs = len(PROGRAMS)
    samples = interleave(contestants, options.rounds, warmup=0, before=backward)
    rows = [[name, ms(samples[name]), ratio(samples[name], samples["fsdp"])] for name in STRATEGIES]
    print(
        markdown(f"opt.step() of {options.optimizer}, {options.layers} layers", ["strategy", "median", "to fsdp"], rows)
    )
    print(f"programs compiled meanwhile: {len(PROGRAMS) - programs}")


if __name__ == "__main__":
    main()
