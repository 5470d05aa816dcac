"""A training step of Llama's layers on one GPU: through `jit`, beside plain torch, and beside what the simulator says.

One device sends nothing: what a step costs beyond torch's is the runner's, and what the simulator gets wrong is its
model of products, kernels and memory. Layers have the sizes of Llama 3.1 8B; there are few of them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import shardlib as sl
from shardlib.machine import PRESETS, Machine
from tests.gpu.clock import race
from tests.gpu.figures import MACHINE, STEP, STEP_SIMULATED
from tests.gpu.records import Outcome, Recorder

BATCH, SEQUENCE, LAYERS = 2, 8192, 4
KINDS = (  # of kernels, by parts of their names
    ("attention", ("attention", "flash", "fmha", "sdpa")),
    ("products", ("gemm", "cutlass", "nvjet", "sm90_xmma", "cublas")),
    ("optimizer", ("multi_tensor", "foreach")),
)


def steps(run: Recorder) -> None:
    """The machine as `Machine.measure` finds it, a step, and a step as simulated."""
    small = run.device == "cpu"
    eager, sharded, ids = _model(run.device, small), _model(run.device, small), _ids(run.device, small)
    with sl.Mesh(data=1, device=run.device):
        run.attempt(MACHINE, "", _machine, seconds=40)
        ours = sl.jit(step)
        optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in (eager, sharded)]
        contestants: dict[str, Callable[[], torch.Tensor]] = {
            "ours": functools.partial(ours, sharded, optimizers[1], ids),
            "eager": functools.partial(step, eager, optimizers[0], ids),
        }
        seconds: dict[str, float] = {}
        run.attempt(STEP, "", functools.partial(_raced, contestants, seconds, small), seconds=90)
        if seconds:  # of this process
            plan = functools.partial(ours.plan, sharded, optimizers[1], ids)
            run.attempt(STEP_SIMULATED, "", functools.partial(_simulated, plan, seconds), seconds=40)
        if not small:
            for name, call in contestants.items():
                _profiled(name, call)


def step(m: Any, opt: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = m(input_ids=ids, labels=ids).loss
    torch.autograd.backward(loss)
    opt.step()
    opt.zero_grad()
    return loss


def _model(device: str, small: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if small:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = 64 if small else 32000
    config = LlamaConfig(num_hidden_layers=LAYERS, vocab_size=vocabulary, use_cache=False, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model: torch.nn.Module = LlamaForCausalLM(config).bfloat16()
    return model.train()


def _ids(device: str, small: bool) -> torch.Tensor:
    shape = (2, 8) if small else (BATCH, SEQUENCE)
    return torch.randint(0, 64, shape, device=device)


def _machine() -> Outcome:
    found = Machine.measure().device
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in found.flops.items())
    rest = (
        f"memory {found.bandwidth / 1e9:.0f} GB/s, host {found.host / 1e9:.1f} GB/s, launch {found.launch * 1e6:.1f} us"
    )
    return Outcome(None, f"{rates}, {rest}")


def _raced(contestants: dict[str, Callable[[], torch.Tensor]], seconds: dict[str, float], small: bool) -> Outcome:
    first = {name: float(call().detach()) for name, call in contestants.items()}
    off = abs(first["ours"] - first["eager"]) / abs(first["eager"])
    times = race(contestants, "cpu" if small else "cuda", rounds=3 if small else 8, warmup=2)
    seconds |= {name: t.median for name, t in times.items()}
    said = ", ".join(
        f"{name} {t.median * 1e3:.1f} ms ({t.low * 1e3:.1f}-{t.high * 1e3:.1f})" for name, t in times.items()
    )
    ratio = seconds["ours"] / seconds["eager"]
    return Outcome(off < 0.02, f"{ratio:.2f}x eager; {said}; losses are off by {off:.1e}")


def _simulated(made: Callable[[], Any], seconds: dict[str, float]) -> Outcome:
    plan = made()
    card = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    name = next((name for name in PRESETS if name in card), "h100")
    machine = Machine.preset(name)
    simulated = plan.simulate(machine).seconds
    own = plan.simulate(replace(machine, device=Machine.measure().device)).seconds if card else simulated
    text = f"{simulated * 1e3:.1f} ms by the preset {name!r}, {own * 1e3:.1f} ms by the machine as measured"
    return Outcome(None, f"{simulated / seconds['ours']:.2f}x; {text}", simulated / seconds["ours"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _profiled(name: str, call: Callable[[], object]) -> None:
    """To the log: what kinds of kernels take, and the longest of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in events:
        low = event.key.lower()
        kind = next((kind for kind, parts in KINDS if any(part in low for part in parts)), "others")
        kinds[kind] += event.self_device_time_total / 1e3
    print(f"{name}:", ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in kinds.items()))
    for event in events[:40]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:4d} {event.key[:150]}")
