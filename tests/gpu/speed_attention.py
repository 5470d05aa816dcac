"""The speed of attention beside torch's flash and cuDNN, all in one process and by turns.

16k tokens of 2048 numbers, as the FlashAttention-3 paper has them. FLOPs: 4 B H S^2 D forward, 2.5 times that backward,
half of it when causal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardlib.ops import _attention_cuda
from shardlib.ops._attention_variant import Variant
from tests.gpu.clock import race
from tests.gpu.figures import SPEED, all_speeds, of_part, speed_of
from tests.gpu.kernels import Kernels, find
from tests.gpu.records import Outcome, Recorder

TOKENS, WIDTH = 16384, 2048
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
Call = Callable[[], tuple[Tensor, ...]]


def speeds(run: Recorder, direction: str) -> None:
    """Every width and length, causal and full."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part(f"{direction} speed"), kernels)
    kernels.install()
    for width, causal, sequence in all_speeds(direction):
        name = speed_of(direction, width, causal, sequence)
        if run.quick and sequence not in (4096,):
            run.absent([name], "not in --quick")
            continue
        if kernels.rehearsal and sequence != 2048:
            continue
        run.attempt(name, "", functools.partial(_raced, kernels, direction, width, causal, sequence), seconds=60)
    return None


def _raced(kernels: Kernels, direction: str, width: int, causal: bool, sequence: int) -> Outcome:
    batch, heads = TOKENS // sequence, WIDTH // width
    if kernels.rehearsal:
        batch, heads, sequence = 1, 2, 96
    shape = batch, sequence, heads, width
    q, k, v, grad_o = (
        torch.randn(shape, device=kernels.device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    ours = _ours(kernels, direction, causal, q, k, v, grad_o)
    contestants, refused = {"ours": ours}, []
    for name, backend in PEERS.items():
        try:
            contestants[name] = _torchs(backend, direction, causal, q, k, v, grad_o)
            contestants[name]()
        except RuntimeError:
            contestants.pop(name, None)
            refused.append(name)
    if len(contestants) > 1:
        _agree(ours(), next(call for name, call in contestants.items() if name != "ours")())
    times = race(
        contestants, kernels.device, rounds=3 if kernels.rehearsal else 24, warmup=1 if kernels.rehearsal else 4
    )
    pairs = sequence * (sequence + 1) / 2 if causal else sequence**2
    flop = 4 * batch * heads * pairs * width * (1 if direction == "forward" else 2.5)
    ratios = {name: t.median / times["ours"].median for name, t in times.items() if name != "ours"}
    text = f"{times['ours'].rate(flop, 1e12)} TFLOP/s"
    for name, ratio in ratios.items():
        text += f"; {ratio:.2f}x {name} at {times[name].rate(flop, 1e12)}"
    text += "".join(f"; {name} refused" for name in refused)
    hopper = kernels.device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    return Outcome(judged(direction, ratios) if hopper else None, text)


def judged(direction: str, ratios: dict[str, float]) -> bool | None:
    """Whether the first targets are met; None when a peer that they name did not run."""
    least_flash, least_cudnn, _ = SPEED[direction]
    wanted = {"flash": least_flash} | ({"cuDNN": least_cudnn} if least_cudnn else {})
    met = [ratios[name] >= least for name, least in wanted.items() if name in ratios]
    return False if False in met else None if len(met) < len(wanted) else True


def _ours(kernels: Kernels, direction: str, causal: bool, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> Call:
    variant, card = Variant(causal=causal, scale=q.shape[3] ** -0.5), kernels.cards[0]
    if direction == "forward":
        return lambda: _attention_cuda.forward(q, k, v, variant, card)[:1]
    o, lse = _attention_cuda.forward(q, k, v, variant, card)
    return lambda: _attention_cuda.backward(grad_o, None, q, k, v, o, lse, variant, False, card)[:3]  # type: ignore[return-value]


def _torchs(backend: SDPBackend, direction: str, causal: bool, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> Call:
    def forward(*qkv: Tensor) -> tuple[Tensor, ...]:
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(*qkv, is_causal=causal),)

    if direction == "forward":
        return lambda: forward(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    (o,) = forward(*leaves)
    return lambda: torch.autograd.grad(o, leaves, grad_o, retain_graph=True)


def _agree(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Nobody needs the speed of a wrong result."""
    for x, want in zip(ours, theirs, strict=True):
        off = ((x.float() - want.float()).norm() / want.float().norm()).item()
        assert off < 0.03, f"not timed: the result is off by {off:.3g} of torch's"
