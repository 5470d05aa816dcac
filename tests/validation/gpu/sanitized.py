"""Small cases for compute-sanitizer: `python -m tests.validation.gpu.sanitized {attention,collectives} [device]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention.variant import Variant
from tests.ops.attention.attention_cases import Case, cast
from tests.validation.gpu.kernels import Kernels, find

# Between them: more than one tile with ragged ends, every extra, the three builds by width.
ATTENTION: dict[str, Case] = {
    "causal, 64": Case(1, 2, 1, 150, 200, 64, lambda _: {"causal": True, "q_offset": 50}),
    "full, 128": Case(1, 1, 1, 140, 141, 128),
    "window, 256": Case(1, 1, 1, 70, 135, 256, lambda _: {"window": 40}),
    "mask, bias, dropout": Case(
        2, 2, 1, 67, 131, 72,
        lambda c: {
            "mask": torch.rand(c.b, 1, 1, c.t) > 0.3, "bias": torch.randn(c.h, 1, c.t).double(), "causal": True,
            "alibi": torch.tensor([0.5, 0.25]), "dropout": 0.2, "key": torch.tensor([5, 6]),
        },
    ),
}  # fmt: skip


def attention(kernels: Kernels) -> Iterator[str]:
    """Both directions of all kernels that run here."""
    kernels.install()
    for card in kernels.cards:
        for name, case in ATTENTION.items():
            q, k, v, grad_o = (x.to(torch.bfloat16).to(kernels.device) for x in case.operands()[:4])
            variant = cast(case.variant(), torch.bfloat16, kernels.device).explicit(q, k)
            o, lse = attention_cuda.forward(q, k, v, variant, card)
            attention_cuda.backward(grad_o, None, q, k, v, o, lse, variant, variant.bias is not None, card)
            yield f"{card} {name}"
    yield from _nothing_to_see(kernels)


def _nothing_to_see(kernels: Kernels) -> Iterator[str]:
    q = torch.randn(1, 1, 70, 64).to(torch.bfloat16).to(kernels.device)
    for card in kernels.cards:
        attention_cuda.forward(q, q, q, Variant(causal=True, k_offset=100), card)
        yield f"{card} nothing to see"


def collectives(kernels: Kernels) -> Iterator[str]:
    """Every op and form, two ranks; waits are long here, since a sanitizer slows kernels down."""
    for form in ("packets", "staged", "direct"):
        group = kernels.group(2, seconds=60.0)
        n = 50 if form == "packets" else 600 if kernels.rehearsal else 300_001
        messages = [torch.randn(2 * n).to(kernels.device) for _ in range(2)]
        if form == "direct":
            group.share(messages[0], [x.data_ptr() for x in messages])
        group.gather([x[:n] for x in messages], [n, n], form)
        group.exchange(messages, [[n, n], [n, n]], form)
        group.scatter_sum(messages, [n, n], form)
        if kernels.device == "cuda":
            torch.cuda.synchronize()
        group.check()
        yield form


def main(what: str, device: str = "cuda") -> int:
    kernels = find(rehearsal=device == "cpu")
    if isinstance(kernels, str):
        print(f"not run: {kernels}")
        return 3
    ran = 0
    for name in {"attention": attention, "collectives": collectives}[what](kernels):
        if kernels.device == "cuda":
            torch.cuda.synchronize()
        ran += 1
        print(name, flush=True)
    print(f"ran {ran} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
