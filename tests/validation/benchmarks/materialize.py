"""What a rank holds, at most, while a model made on meta gets its values.

`python -m tests.validation.benchmarks.materialize` makes the shapes of Llama-2-7B in bfloat16 on 8 processes (12.6 GiB
in all), and prints each rank's peak over what torch and the library take, against its share of the parameters.
`--layers` and `--devices` make it smaller.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch


def measured(layers: int, devices: int) -> tuple[float, float, float]:
    """On a rank: its share in bytes, its peak memory over what was there before, seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import shardlib as sl

    torch.set_num_threads(1)
    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=layers)  # the other numbers are Llama-2-7B's
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    share = sum(p.numel() * p.element_size() for p in model.parameters()) / devices
    with sl.Mesh(data=devices):
        sl.materialize(sl.parallelize(torch.nn.Linear(8, 8, device="meta"), strategy="fsdp"))  # imports what it needs
        before, start = _peak(), time.perf_counter()
        sl.materialize(sl.parallelize(model, strategy="fsdp"))
        return share, _peak() - before, time.perf_counter() - start


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    from tests.helpers.ranks import run_ranks

    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args()
    from tests.validation.benchmarks.materialize import (
        measured as on_a_rank,  # by the name that other processes import it by
    )

    found = run_ranks(on_a_rank, arguments.devices, arguments.layers, arguments.devices, timeout=900)
    for rank, (share, peak, seconds) in enumerate(found):
        ratio = peak / share
        print(f"rank {rank}: share {share / 2**30:.3f} GiB, peak {peak / 2**30:.3f} GiB, {ratio:.3f}x, {seconds:.0f} s")
