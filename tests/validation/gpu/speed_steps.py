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
from shardlib.sharding.mesh.machine import PRESETS, Machine
from tests.validation.gpu.clock import race
from tests.validation.gpu.figures import EAGER_PEAK, KEEPING, MACHINE, PEAK_OFF, STEP, STEP_SIMULATED, peak_of
from tests.validation.gpu.records import Outcome, Recorder

Call = Callable[[], torch.Tensor]

BATCH, SEQUENCE, LAYERS = 2, 8192, 4
KINDS = (  # of kernels, by parts of their names
    ("attention", ("attention", "flash", "fmha", "sdpa")),
    ("products", ("gemm", "cutlass", "nvjet", "sm90_xmma", "cublas")),
    ("optimizer", ("multi_tensor", "foreach")),
)


def steps(run: Recorder) -> None:
    """The machine as `Machine.measure` finds it, a step, a step as simulated, and what it holds in several ways."""
    small = run.device == "cpu"
    eager, sharded, ids = _model(run.device, small), _model(run.device, small), _ids(run.device, small)
    with sl.Mesh(data=1, device=run.device):
        run.attempt(MACHINE, "", _machine, seconds=40)
        ours = sl.jit(step)
        optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in (eager, sharded)]
        arguments = (sharded, optimizers[1], ids)
        contestants: dict[str, Call] = {
            "ours": functools.partial(ours, *arguments),
            "eager": functools.partial(step, eager, optimizers[0], ids),
        }
        seconds: dict[str, float] = {}
        run.attempt(STEP, "", functools.partial(_raced, contestants, seconds, small), seconds=90)
        if not seconds:  # of this process
            return
        plan = ours.plan(*arguments)
        run.attempt(STEP_SIMULATED, "", functools.partial(_simulated, plan, seconds), seconds=40)
        run.attempt(EAGER_PEAK, "", functools.partial(_eager_peak, contestants["eager"], eager, optimizers[0]))
        for options, how in zip(KEEPING, _keeping(plan, 0.97 if small else 0.7), strict=True):
            jitted = sl.jit(step, **how)
            case = functools.partial(_held, jitted, arguments, plan, contestants["ours"])
            run.attempt(peak_of(options), "", case, seconds=90)
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


def _raced(contestants: dict[str, Call], seconds: dict[str, float], small: bool) -> Outcome:
    first = {name: float(call().detach()) for name, call in contestants.items()}
    off = abs(first["ours"] - first["eager"]) / abs(first["eager"])
    times = race(contestants, "cpu" if small else "cuda", rounds=3 if small else 8, warmup=2)
    seconds |= {name: t.median for name, t in times.items()}
    said = ", ".join(
        f"{name} {t.median * 1e3:.1f} ms ({t.low * 1e3:.1f}-{t.high * 1e3:.1f})" for name, t in times.items()
    )
    ratio = seconds["ours"] / seconds["eager"]
    return Outcome(off < 0.02, f"{ratio:.2f}x eager; {said}; losses are off by {off:.1e}")


def _simulated(plan: Any, seconds: dict[str, float]) -> Outcome:
    card = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    name = next((name for name in PRESETS if name in card), "h100")
    simulated = plan.simulate(Machine.preset(name)).seconds
    own = plan.simulate(_this_machine()).seconds
    text = f"{simulated * 1e3:.1f} ms by the preset {name!r}, {own * 1e3:.1f} ms by the machine as measured"
    return Outcome(None, f"{simulated / seconds['ours']:.2f}x; {text}", simulated / seconds["ours"])


@functools.cache
def _this_machine() -> Machine:
    machine = Machine.preset("h100")
    return replace(machine, device=Machine.measure().device) if torch.cuda.is_available() else machine


# --- memory -----------------------------------------------------------------------------------------------------------


def _keeping(plan: Any, share: float) -> tuple[dict[str, Any], ...]:
    """What `jit` is told, by figure."""
    return {}, {"remat": "full"}, {"memory": int(share * plan.peak_memory)}, {"schedule": sl.Schedule(offload="saved")}


def _held(jitted: Any, arguments: tuple[Any, ...], plain: Any, ours: Call) -> Outcome:
    """What a step holds at most by its plan and by torch's allocator, and how much longer it takes than `ours`."""
    plan, call = jitted.plan(*arguments), functools.partial(jitted, *arguments)
    planned, device = plan.peak_memory, arguments[2].device.type
    call()
    measured = _peak(call, *arguments[:2]) if device == "cuda" else planned
    times = race({"this": call, "ours": ours}, device, rounds=5, warmup=1)
    longer = times["this"].median / times["ours"].median
    simulated = plan.simulate(_this_machine()).seconds / plain.simulate(_this_machine()).seconds
    ratio = planned / measured
    text = f"{ratio:.3f}x; {_gib(planned)} planned, {_gib(measured)} measured, {_gib(plan.host_memory)} on the host"
    text += f"; takes {longer:.2f}x as long as with all kept, simulated {simulated:.2f}x"
    return Outcome(abs(ratio - 1) <= PEAK_OFF, text, ratio)


def _eager_peak(call: Call, model: torch.nn.Module, opt: torch.optim.Optimizer) -> Outcome:
    if not torch.cuda.is_available():
        return Outcome(None, "not counted on a CPU")
    return Outcome(None, _gib(_peak(call, model, opt)))


def _peak(call: Call, model: torch.nn.Module, opt: torch.optim.Optimizer) -> int:
    """The most bytes that torch's allocator has given out during a call, of what is this model's."""
    own = sum(x.nbytes for x in model.parameters())
    own += sum(x.nbytes for state in opt.state.values() for x in state.values() if x.is_cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + own


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


# --- kernels ----------------------------------------------------------------------------------------------------------


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
