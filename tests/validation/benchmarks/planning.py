"""Planning in a fresh process: seconds of each stage, and peak memory.

`python -m tests.validation.benchmarks.planning --case tp --layers 32` prints one line of JSON. Cases are the modes of
W1, the grids `1-d` and `4-d`, `llama-70b` (a functional step of 80 layers), `gpt-175b` (`--layers 96`: the whole step
of a module of transformers with Adam), and `unlike` (a model of 1, 2, 4, 8 ... convolutions, each followed by
attention, no two of them of one size). A process of its own, since a second trace finds torch's caches warm.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.models import w1


def launch(case: str, layers: int, *, timeout: float = 600.0) -> dict[str, Any]:
    """Run this module in a subprocess and return what it measured."""
    command = [sys.executable, "-m", __name__, "--case", case, "--layers", str(layers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def grids(config: w1.Config) -> dict[str, w1.Mode]:
    """The same model and specs on a mesh of one axis and of four; every axis cuts something."""
    four = {"pod": 2, "data": 2, "fsdp": 2, "tensor": 4}
    rules: dict[str, str | tuple[str, ...]] = {"batch": ("pod", "data"), "embed": "fsdp", **w1.MEGATRON}
    named = w1.specs(config)
    return {
        "1-d": w1.Mode("1-d", {"tensor": 4}, w1.MEGATRON, named),
        "4-d": w1.Mode("4-d", four, rules, named),
    }


def plan_w1(case: str, layers: int) -> Callable[[], Any]:
    from tests.models import w1_sharded

    config = w1.Config(layers=layers)
    mode = (w1.modes(config) | grids(config))[case]
    args = w1.abstract(config)
    mesh = w1_sharded.mesh_of(mode, abstract=True)

    def plan() -> Any:
        with mesh:
            return w1_sharded.sharded_step(mode, config).plan(*args)

    return plan


def plan_llama_70b() -> Callable[[], Any]:
    import shardlib as sl
    from tests.models import llama

    lm = llama.build_70b()
    mesh = sl.Mesh.abstract(data=512, tensor=8, rules=llama.RULES | {"embed": "data"})
    params, specs = lm.params(), lm.specs()
    tokens = torch.empty(1024, 4096, dtype=torch.int64, device="meta")

    def plan() -> Any:
        with mesh:
            step = sl.jit(lm.step, in_specs=(specs, "batch seq"), out_specs=(None, specs), donate_argnums=(0,))
            return step.plan(params, tokens)

    return plan


def gpt_175b_layouts() -> dict[str, str]:
    """Layouts of the matrices of a GPT-2 of transformers: heads, features and the vocabulary lie on `tensor`."""
    columns = {"*.c_attn.weight": "_ (three=3 h@tensor)", "*.c_attn.bias": "(three=3 h@tensor)"}
    columns |= {
        "*.mlp.c_fc.weight": "_ f@tensor",
        "*.mlp.c_fc.bias": "f@tensor",
        "transformer.wte.weight": "v@tensor _",
    }
    return columns | {"*.attn.c_proj.weight": "h@tensor _", "*.mlp.c_proj.weight": "f@tensor _"}


def plan_gpt_175b(layers: int) -> Callable[[], Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    import shardlib as sl

    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(
                n_embd=12288, n_layer=layers, n_head=96, n_positions=2048, use_cache=False, loss_type="ForCausalLM"
            )
        )
    mesh = sl.Mesh.abstract(data=16, tensor=8)
    with mesh:
        sl.parallelize(model, gpt_175b_layouts(), strategy="fsdp")
    opt, ids = torch.optim.Adam(model.parameters()), torch.zeros(16, 2048, dtype=torch.long, device="meta")

    def step(model: Any, opt: Any, ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def plan() -> Any:
        with mesh:
            return sl.jit(step).plan(model, opt, ids)

    return plan


def plan_unlike(blocks: int) -> Callable[[], Any]:
    from torch import Tensor, nn

    import shardlib as sl

    class Block(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(4, out)
            self.attention = nn.MultiheadAttention(out, 4, batch_first=True)
            self.mlp = nn.Sequential(nn.LayerNorm(out), nn.Linear(out, 2 * out), nn.GELU(), nn.Linear(2 * out, out))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x)).relu()
            tokens = x.flatten(2).mT
            tokens = tokens + self.attention(tokens, tokens, tokens)[0]
            return (tokens + self.mlp(tokens)).mT.view_as(x)

    widths = [8 * (i + 1) for i in range(blocks + 1)]
    model, x = nn.Sequential(*map(Block, widths, widths[1:])), torch.randn(8, 8, 8, 8)
    mesh = sl.Mesh(data=2, tensor=2)
    with mesh:
        sl.parallelize(model, sl.suggest(model, mesh, x), strategy="fsdp")

    def plan() -> Any:
        with mesh:
            return model.forward.plan(x)

    return plan


def measure(case: str, layers: int) -> dict[str, Any]:
    own = {
        "llama-70b": plan_llama_70b,
        "gpt-175b": lambda: plan_gpt_175b(layers),
        "unlike": lambda: plan_unlike(layers),
    }
    plan = own[case]() if case in own else plan_w1(case, layers)
    start = time.perf_counter()
    planned = plan()
    total = time.perf_counter() - start
    return {
        "total": total,
        "seconds": planned.seconds,
        "wire_bytes": planned.comm_bytes,
        "device_gib": planned.peak_memory / 2**30,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="tp")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.case, arguments.layers)))
