"""Planning in a fresh process: seconds of each stage, and peak memory.

`python -m tests.benchmarks.planning --case tp --layers 32` prints one line of JSON. Cases are the modes of W1, the
grids `1-d` and `4-d`, and `llama-70b`. A process of its own, since a second trace finds torch's caches warm.
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


def measure(case: str, layers: int) -> dict[str, Any]:
    plan = plan_llama_70b() if case == "llama-70b" else plan_w1(case, layers)
    start = time.perf_counter()
    planned = plan()
    total = time.perf_counter() - start
    return {
        "total": total,
        "seconds": planned.seconds,
        "wire_bytes": planned.comm_bytes,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="tp")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.case, arguments.layers)))
