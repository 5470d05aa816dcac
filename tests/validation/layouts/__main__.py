"""Ranks layouts of a training step of a GPT of 175 billion parameters (96 layers) on 1,024 simulated H100.

    python -m tests.validation.layouts [--layers 96] [--microbatches 8] [--layouts 8x8x16 1x8x128]

A layout is stages x tensor x data. Each step has 256 rows of 2,048 tokens, the model in float32 with Adam, FSDP on
`data`, columns and rows of matrices on `tensor`, layers cut evenly; `auto` lets the compiler cut. Prints for each
layout the simulated step, the bubble, the memory of the fullest device, and the seconds that planning took here.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import shardlib as sl
from tests.validation.benchmarks.planning import gpt_175b_layouts
from tests.validation.benchmarks.timing import markdown

ROWS, TOKENS = 256, 2048
LAYOUTS = ("8x8x16", "16x8x8", "4x8x32", "8x4x32", "1x8x128", "auto:8x8x16")


def plan(layers: int, stages: int, tensor: int, data: int, n: int, named: bool) -> sl.Plan:
    """Plans a step of `n` microbatches under the schedule 1f1b; without stages, of one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(n_embd=12288, n_layer=layers, n_head=96, n_positions=TOKENS, use_cache=False)
        config.update({"loss_type": "ForCausalLM", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
        model = GPT2LMHeadModel(config)
    axes = {"stage": stages, "data": data, "tensor": tensor} if stages > 1 else {"data": data, "tensor": tensor}
    mesh = sl.Mesh.abstract(axes, stages="stage" if stages > 1 else None, machine="h100")
    per_stage = -(-layers // stages)
    table = {f"transformer.h.{i}": i // per_stage for i in range(layers)}
    table |= {"transformer.w*": 0, "transformer.ln_f": stages - 1, "lm_head": stages - 1}
    sl.parallelize(
        model, gpt_175b_layouts(), strategy="fsdp", mesh=mesh, stages=table if named and stages > 1 else None
    )
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device="meta")

    def step(model: Any, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = sl.microbatch(lambda rows: model(input_ids=rows, labels=rows).loss, ids, n=n)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with mesh:
        return sl.jit(step).plan(model, optimizer, ids)


def row(layout: str, layers: int, microbatches: int) -> list[Any]:
    stages, tensor, data = (int(n) for n in layout.removeprefix("auto:").split("x"))
    start = time.perf_counter()
    planned = plan(layers, stages, tensor, data, microbatches if stages > 1 else 1, not layout.startswith("auto"))
    view = planned.pipeline if stages > 1 else None
    step = planned.simulate("h100").seconds if view is None else view.seconds
    seconds = time.perf_counter() - start
    bubble = 0.0 if view is None else view.bubble
    rate = ROWS * TOKENS / step
    return [layout, step, rate, bubble, planned.peak_memory / 2**30, seconds]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    arguments = parser.parse_args()
    rows = sorted((row(x, arguments.layers, arguments.microbatches) for x in arguments.layouts), key=lambda r: r[1])
    texts = [
        [x, f"{step:.2f} s", f"{rate:,.0f}", f"{bubble:.1%}", f"{memory:.1f} GiB", f"{seconds:.0f} s"]
        for x, step, rate, bubble, memory, seconds in rows
    ]
    title = f"A step of {arguments.layers} layers on 1,024 simulated H100, {arguments.microbatches} microbatches"
    print(markdown(title, ["layout", "step (simulated)", "tokens/s", "bubble", "memory a device", "planning"], texts))
