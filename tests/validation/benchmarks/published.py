"""The simulator beside steps that others measured, and orders of a mesh's axes beside each other. Nothing runs.

`python -m tests.validation.benchmarks.published` plans Llama 3.1 on H100s as torchtitan ran it (tokens per second and
GPU; its hosts have slower memory than the preset), fits the one `efficiency` of the machine on the first row and
predicts the others. `--table replicas` does so with steps of 2022 on A100s, their state sharded inside groups of nodes.
`--table placement` simulates Llama 8B on 16 nodes of 8 with the mesh's axes in every order. `--layers` makes the models
shallower. `tests/validation/benchmarks/PUBLISHED.md` has what they said.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import shardlib as sl
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.steps import Program, Start, Step, Wait
from shardlib.compiler.simulate.simulated import Simulated
from shardlib.ops.attention.op import OPS
from shardlib.sharding.mesh.machine import Machine

_H100, _A100 = Machine.preset("h100"), Machine.preset("a100-40")
HOST = replace(_H100, device=replace(_H100.device, bandwidth=2.4e12, memory=96e9), name="")
# torch of 2024 ran FlashAttention-2, which reaches 35 % of an H100's peak (Shah et al., "FlashAttention-3", 2024): half
# of what products reach on the preset.
TITAN = replace(HOST, device=replace(HOST.device, attention=0.5))
LLAMA = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
SEQUENCE = 8192


@dataclass(frozen=True)
class Row:
    """A step that was measured: of which size, on which axes, sequences for each data rank, tokens/s and GPU."""

    size: str
    axes: dict[str, int]
    batch: int
    again: str  # what is computed again for the backward pass: "full" layers, or what is not kept by `selective`
    measured: float

    def plan(self, layers: int | None) -> Plan:
        m = llama(self.size, layers)
        kept = {"context_fn": selective} if self.again == "selective" else {}
        m.gradient_checkpointing_enable({"use_reentrant": False, **kept})
        if "tensor" in self.axes:
            sequence_parallel(m)
        return planned(m, self.axes, self.batch * self.axes["data"], SEQUENCE)

    def speed(self, plan: Plan, machine: Machine) -> float:
        """Tokens/s and GPU."""
        program = waited(plan.compiled.program, "tensor")
        seconds = Simulated(program, plan.name, machine, fused=True).seconds
        return self.batch * self.axes["data"] * SEQUENCE / plan.mesh.size / seconds


# Compiled, in bf16. Tensor parallelism is Megatron's with sequences cut between its parts, and not asynchronous.
ROWS = (
    Row("8B", {"data": 8}, 2, "selective", 6667),
    Row("8B", {"data": 128}, 2, "selective", 6514),
    Row("8B", {"data": 8, "tensor": 8}, 12, "selective", 4378),
    Row("70B", {"data": 32, "tensor": 8}, 16, "full", 597),
)


def selective() -> tuple[Any, Any]:
    """Checkpoints that keep attention and every other product, as torchtitan's of the kind "op" do."""
    counts: Counter[bool] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += op is torch.ops.aten.mm.default
        kept = counts[ctx.is_recompute] % 2 if op is torch.ops.aten.mm.default else op in OPS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    pair: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return pair


CUT, WHOLE = sl.P("data", "tensor", None), sl.P("data", None, None)


def sequence_parallel(m: LlamaForCausalLM) -> None:
    """The residual stream of each layer cut along the sequence, gathered for attention and products and scattered
    behind them (Korthikanti et al., "Reducing activation recomputation", 2022)."""

    def gather(module: Any, args: Any, kwargs: Any) -> Any:
        args = tuple(sl.shard(x, WHOLE) for x in args)
        return args, {k: sl.shard(x, WHOLE) if k == "hidden_states" else x for k, x in kwargs.items()}

    def scatter(module: Any, args: Any, out: Any) -> Any:
        return sl.shard(out, CUT) if isinstance(out, torch.Tensor) else (sl.shard(out[0], CUT), *out[1:])

    for part in (part for layer in m.model.layers for part in (layer.self_attn, layer.mlp)):
        part.register_forward_pre_hook(gather, with_kwargs=True)
        part.register_forward_hook(scatter)
    m.model.embed_tokens.register_forward_hook(scatter)
    m.lm_head.register_forward_pre_hook(gather, with_kwargs=True)


def waited(program: Program, axis: str) -> Program:
    """The program with every message along an axis waited for where it starts."""
    waits = {out: step for step in program.steps if isinstance(step, Wait) for out in step.outs}
    steps: list[Step] = []
    early: set[Step] = set()
    for step in program.steps:
        if step in early:
            continue
        steps.append(step)
        if isinstance(step, Start) and any(a.name == axis for a in step.first.axes):
            now = dict.fromkeys(waits[out] for out in step.outs)
            steps += now
            early |= set(now)
    return replace(program, steps=tuple(steps))


def llama(size: str, layers: int | None) -> LlamaForCausalLM:
    """Llama 3.1 on the meta device."""
    sizes: dict[str, Any] = LLAMA[size] | ({} if layers is None else {"num_hidden_layers": layers})
    with torch.device("meta"):
        m = LlamaForCausalLM(LlamaConfig(num_key_value_heads=8, vocab_size=128256, use_cache=False, **sizes))
    return m.train()


def planned(
    m: Any, axes: dict[str, int], batch: int, sequence: int, strategy: str = "fsdp", machine: Machine = HOST
) -> Plan:
    """A step of a language model with AdamW, its state sharded, in bf16."""
    mesh = sl.Mesh.abstract(axes, machine=machine)
    with mesh:
        sl.parallelize(m, strategy=strategy, precision=torch.bfloat16)
        opt = torch.optim.AdamW(m.parameters(), foreach=True)
        return sl.jit(step).plan(m, opt, torch.zeros(batch, sequence, dtype=torch.int64, device="meta"))


def step(m: Any, opt: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = m(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


@dataclass(frozen=True)
class Replicated:
    """A step on nodes of 8 A100s, state sharded over `shard` devices, replicas outside; TFLOP/s and GPU: 8 FLOPs for
    each parameter and token, since every layer is computed again."""

    size: str
    nodes: int
    shard: int
    measured: float
    model: Callable[[int | None], Any]
    parameters: float

    def plan(self, layers: int | None) -> Plan:
        m = self.model(layers)
        m.gradient_checkpointing_enable({"use_reentrant": False})
        axes = {"replica": self.nodes * 8 // self.shard, "shard": self.shard}
        return planned(m, axes, 8 * 8 * self.nodes, 2048, "hsdp", _A100)

    def speed(self, plan: Plan, machine: Machine) -> float:
        return 8 * self.parameters * 8 * 2048 / plan.simulate(machine, fused=True).seconds / 1e12


def neox(layers: int | None) -> Any:
    sizes = {"hidden_size": 5120, "intermediate_size": 20480, "num_attention_heads": 40}
    config = GPTNeoXConfig(num_hidden_layers=layers or 40, vocab_size=50432, use_cache=False, **sizes)
    with torch.device("meta"):
        return GPTNeoXForCausalLM(config).train()


def bloom(layers: int | None) -> Any:
    config = BloomConfig(hidden_size=8192, n_layer=layers or 60, n_head=64, vocab_size=250880, use_cache=False)
    with torch.device("meta"):
        return BloomForCausalLM(config).train()


REPLICATED = (
    *(Replicated("NeoX 13B", nodes, 64, rate, neox, 13e9) for nodes, rate in ((16, 159), (32, 157), (64, 156))),
    *(Replicated("BLOOM 50B", nodes, 128, rate, bloom, 50e9) for nodes, rate in ((32, 143), (64, 140))),
)


def fitted(row: Row | Replicated, plan: Plan, on: Machine) -> Machine:
    """The machine on which a row takes what it took: its efficiency, by bisection."""
    low, high = 0.05, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        machine = replace(on, device=replace(on.device, efficiency=middle))
        low, high = (middle, high) if row.speed(plan, machine) < row.measured else (low, middle)
    return machine


def published(layers: int | None) -> None:
    print("| model | axes | tokens/s and GPU, measured | simulated | off by |\n|---|---|---|---|---|")
    machine, notes = None, ""
    for row in ROWS:
        plan = row.plan(layers)
        machine = machine or fitted(row, plan, TITAN)
        speed = row.speed(plan, machine)
        axes = " x ".join(f"{name} {n}" for name, n in row.axes.items())
        print(
            f"| {row.size} | {axes} | {row.measured:,.0f} | {speed:,.0f} | {speed / row.measured - 1:+.1%} |",
            flush=True,
        )
        notes = notes or f"efficiency {machine.device.efficiency:.3f}, fitted on the first row"
    print(f"\n{notes}")


def replicas(layers: int | None) -> None:
    print(
        "| model | nodes | sharded over | TFLOP/s and GPU, measured | simulated | off by | of the fewest nodes' speed |"
    )
    print("|---|---|---|---|---|---|---|")
    machine, first = None, {}
    for row in REPLICATED:
        plan = row.plan(layers)
        machine = machine or fitted(row, plan, _A100)
        speed = row.speed(plan, machine)
        least, simulated = first.setdefault(row.size, (row.measured, speed))
        shares = f"{row.measured / least:.1%} measured, {speed / simulated:.1%} simulated"
        cells = (
            row.size,
            row.nodes,
            row.shard,
            f"{row.measured:.0f}",
            f"{speed:.0f}",
            f"{speed / row.measured - 1:+.1%}",
        )
        print(f"| {' | '.join(map(str, cells))} | {shares} |", flush=True)
    assert machine is not None
    print(f"\nefficiency {machine.device.efficiency:.3f}, fitted on the first row")


def placement(layers: int | None) -> None:
    print("| axes, the right-most inside a node | seconds | exposed |\n|---|---|---|")
    found = []
    for order in itertools.permutations({"replica": 4, "shard": 4, "tensor": 8}.items()):
        simulated = planned(llama("8B", layers), dict(order), 64, 2048, "hsdp").simulate()
        axes = " x ".join(f"{name} {n}" for name, n in order)
        found.append((simulated.seconds, simulated.exposed, axes))
    for seconds, exposed, axes in sorted(found):
        print(f"| {axes} | {seconds:.3f} | {exposed:.3f} |")
    inside = min(seconds for seconds, _, axes in found if axes.endswith("tensor 8"))
    outside = min(seconds for seconds, _, axes in found if not axes.endswith("tensor 8"))
    print(f"\nthe best with tensor inside a node takes {inside / outside:.1%} of the best other")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"published": published, "replicas": replicas, "placement": placement}
    parser.add_argument("--table", choices=tables, default="published")
    parser.add_argument("--layers", type=int, default=None)
    args = parser.parse_args()
    tables[args.table](args.layers)
