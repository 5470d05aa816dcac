"""How far decisions are from the best of all: `python -m tests.validation.bounds --report` writes BOUNDS.md.

The bound is over the estimate that decisions are made by, with every op deciding alone. Plans give up to 5 % of it away
on purpose, for fewer bytes (`Search.send_fewer_bytes`).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

import shardlib as sl
from shardlib import ShardingError
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.propagate.solver.lower_bound import LowerBound
from tests.models import gpt2, llama, w1, w1_sharded, zoo
from tests.models.causal_lm import CausalLM
from tests.validation.shardy import oracle, programs

REPORT = Path(__file__).with_name("BOUNDS.md")


def of_w1(mode: str, layers: int = 4) -> Plan:
    config = w1.Config(layers=layers)
    m = w1.modes(config)[mode]
    with w1_sharded.mesh_of(m, abstract=True):
        plan: Plan = w1_sharded.sharded_step(m, config).plan(*w1.abstract(config))
    return plan


def of_model(lm: CausalLM, vocab: int, everything: str = "") -> Plan:
    """The SGD step of a language model on `data=2, tensor=4`; `everything`: an axis over which each weight's first dim
    is cut in place of what its own table says."""
    rules = {"batch": "data", "heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}
    params = lm.params()
    specs = dict.fromkeys(params, f"rows@{everything} ...") if everything else lm.specs()
    with sl.Mesh.abstract(data=2, tensor=4, rules=rules):
        plan: Plan = sl.jit(lm.step, in_specs=(specs, "batch seq"), out_specs=(None, specs)).plan(
            params, torch.zeros(8, 16, dtype=torch.int64)
        )
    return plan


def models() -> dict[str, Callable[[], Plan]]:
    """The models of the table, each as a way to its plan."""
    sizes = {"d": 64, "seq": 16, "vocab": 128}
    lms: dict[str, Callable[[], CausalLM]] = {
        "GPT-2": lambda: gpt2.build(**sizes),
        "Llama": lambda: llama.build(**sizes),
        "Mixtral": lambda: zoo.build("mixtral"),
        "Qwen3 MoE": lambda: zoo.build("qwen3moe"),
    }
    table: dict[str, Callable[[], Plan]] = {f"W1 {mode}": lambda m=mode: of_w1(m) for mode in w1.modes(w1.Config())}
    table |= {name: lambda b=build: of_model(b(), 128) for name, build in lms.items()}
    return table | {
        f"{name}, all weights on data": lambda b=build: of_model(b(), 128, "data") for name, build in lms.items()
    }


def generated(seeds: Iterable[int], axes: int = 3) -> Iterator[tuple[int, LowerBound]]:
    """The bounds of generated programs with conflicting annotations, on meshes of so many axes at most."""
    for seed in seeds:
        p = programs.draw(seed, conflicts=True)
        if len(p.mesh) <= axes:
            try:
                yield seed, oracle.plan(p).lower_bound
            except ShardingError:  # what does not fit its mesh
                continue


def report(count: int) -> Iterator[str]:
    begin = time.monotonic()
    yield "# How far decisions are from the best"
    yield ""
    yield f"`python -m tests.validation.bounds --report` on {datetime.date.today()}. Estimated times; gaps of up to"
    yield "5 % are given away on purpose, for fewer bytes. A bound that is not the minimum may be too low."
    yield ""
    for name, plan in models().items():
        yield f"* {name}: {plan().lower_bound}"
    found = dict(generated(range(count)))
    for title, bounds in (
        ("all", found),
        ("with the minimum known", {seed: b for seed, b in found.items() if b.exact}),
    ):
        gaps = sorted(b.gap for b in bounds.values())
        yield f"* {len(gaps)} generated programs, {title}: median {100 * statistics.median(gaps):.2g} %,"
        yield f"  9 of 10 within {100 * gaps[len(gaps) * 9 // 10]:.2g} %, worst {100 * gaps[-1]:.3g} %"
    yield ""
    yield "Seeds above 5 %:"
    yield ""
    yield from (f"* {seed}: {b}" for seed, b in found.items() if b.gap > 0.05)
    yield ""
    yield f"{time.monotonic() - begin:.0f} s."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--report", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for line in report(options.programs):
        print(line, flush=True)
        lines.append(line)
    if options.report:
        REPORT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
