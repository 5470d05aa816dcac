"""The speed of attention beside torch's kernels, all in one process and by turns; and of a ring beside one call.

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

from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention.merge import merge_
from shardlib.ops.attention.variant import Variant
from tests.validation.gpu.clock import race
from tests.validation.gpu.figures import SPEED, Speed, of_part, ring_of
from tests.validation.gpu.figures import speeds as all_speeds
from tests.validation.gpu.kernels import Kernels, find
from tests.validation.gpu.records import Outcome, Recorder

TOKENS, WIDTH = 16384, 2048
FLASH, CUDNN, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
RING = 4
Call = Callable[[], tuple[Tensor, ...]]


def speeds(run: Recorder, direction: str) -> None:
    """Every kind of one direction."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part(f"{direction} speed"), kernels)
    kernels.install()
    for case in all_speeds(direction):
        if run.quick and (case.sequence != 4096 or not case.anchor):
            run.absent([case.name], "not in --quick")
            continue
        if kernels.rehearsal and case.sequence != 2048 and not (case.general and case.width == 64):
            continue
        run.attempt(case.name, "", functools.partial(_raced, kernels, case), seconds=60)
    return None


def _raced(kernels: Kernels, case: Speed) -> Outcome:
    direction, causal, sequence = case.direction, case.causal, case.sequence
    batch, heads = TOKENS // sequence, max(4, WIDTH // case.width // 4 * 4)
    if kernels.rehearsal:
        batch, heads, sequence = 1, 4, 96
    q, k, v, grad_o = (
        torch.randn(batch, sequence, n, case.width, device=kernels.device, dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads, heads // (4 if case.grouped else 1), heads // (4 if case.grouped else 1), heads)
    )
    mask = None
    if case.general:
        mask = (torch.arange(sequence, device=kernels.device) < sequence - sequence // 20).view(1, 1, 1, -1)
    variant = Variant(mask=mask, causal=causal, scale=case.width**-0.5)
    ours = _ours(kernels, direction, variant, q, k, v, grad_o)
    contestants, refused = {"ours": ours}, []
    instead = "efficient" if case.general else "flash"  # what runs where ours do not
    for name, backend in {instead: EFFICIENT if case.general else FLASH, "cuDNN": CUDNN}.items():
        try:
            contestants[name] = _torchs(backend, direction, variant, q, k, v, grad_o)
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
    flop = 4 * batch * heads * pairs * case.width * (1 if direction == "forward" else 2.5)
    ratios = {name: t.median / times["ours"].median for name, t in times.items() if name != "ours"}
    text = f"{times['ours'].rate(flop, 1e12)} TFLOP/s"
    for name, ratio in ratios.items():
        text += f"; {ratio:.2f}x {name} at {times[name].rate(flop, 1e12)}"
    text += "".join(f"; {name} refused" for name in refused)
    hopper = kernels.device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    return Outcome(judged(direction, ratios) if hopper and case.anchor else None, text, ratios.get(instead))


def judged(direction: str, ratios: dict[str, float]) -> bool | None:
    """Whether the first targets are met; None when a peer that they name did not run."""
    least_flash, least_cudnn, _ = SPEED[direction]
    wanted = {"flash": least_flash} | ({"cuDNN": least_cudnn} if least_cudnn else {})
    met = [ratios[name] >= least for name, least in wanted.items() if name in ratios]
    return False if False in met else None if len(met) < len(wanted) else True


def _ours(kernels: Kernels, direction: str, variant: Variant, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> Call:
    card = kernels.cards[0]
    if direction == "forward":
        return lambda: attention_cuda.forward(q, k, v, variant, card)[:1]
    o, lse = attention_cuda.forward(q, k, v, variant, card)
    return lambda: attention_cuda.backward(grad_o, None, q, k, v, o, lse, variant, False, card)[:3]  # type: ignore[return-value]


def _torchs(
    backend: SDPBackend, direction: str, variant: Variant, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor
) -> Call:
    mask, causal = variant.mask, variant.causal
    if mask is not None and causal:  # torch takes one of the two
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask, causal = mask & seen, False
    group = q.shape[1] // k.shape[1]
    repeated = group if backend == EFFICIENT else 1  # it takes no groups

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k, v = (x.repeat_interleave(repeated, 1) if repeated > 1 else x for x in (k, v))
        grouped = group != repeated
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped),)

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


def rings(run: Recorder) -> None:
    """What the last rank of a causal ring computes, keys of one rank after the other, beside one call."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part("rings"), kernels)
    kernels.install()
    for direction in ("forward", "backward"):
        run.attempt(ring_of(direction), "", functools.partial(_ring, kernels, direction), seconds=60)
    return None


def _ring(kernels: Kernels, direction: str) -> Outcome:
    whole, heads, width = (16384, 16, 128) if not kernels.rehearsal else (128, 2, 64)
    part, card = whole // RING, kernels.cards[0]
    q, grad_o, k, v = (
        torch.randn(1, heads, n, width, device=kernels.device, dtype=torch.bfloat16) for n in (part, part, whole, whole)
    )
    variant = Variant(causal=True, scale=width**-0.5, q_offset=whole - part)
    chunks = zip(k.chunk(RING, 2), v.chunk(RING, 2), strict=True)
    pieces = [(x, y, variant._replace(k_offset=i * part)) for i, (x, y) in enumerate(chunks)]

    def one() -> tuple[Tensor, Tensor]:
        return attention_cuda.forward(q, k, v, variant, card)

    def ring() -> tuple[Tensor, Tensor]:
        (x, y, how), *others = pieces
        o, lse = attention_cuda.forward(q, x, y, how, card)
        o = o.float()
        for x, y, how in others:
            merge_(o, lse, *attention_cuda.forward(q, x, y, how, card))
        return o.to(q.dtype), lse

    o, lse = one()
    _agree((o,), (ring()[0],))
    contestants: dict[str, Callable[[], object]] = {"ring": ring, "one": one}
    if direction == "backward":
        back = functools.partial(attention_cuda.backward, grad_o, None, q)
        contestants["one"] = lambda: back(k, v, o, lse, variant, False, card)
        contestants["ring"] = lambda: [back(x, y, o, lse, how, False, card) for x, y, how in pieces]
    times = race(contestants, kernels.device, rounds=3 if kernels.rehearsal else 15)
    ratio = times["one"].median / times["ring"].median
    return Outcome(
        None, f"{ratio:.2f}x; {times['ring'].median * 1e3:.2f} ms, one call {times['one'].median * 1e3:.2f} ms"
    )
