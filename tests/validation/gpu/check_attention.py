"""Attention's kernels on a GPU: every variant, both dtypes and all head sizes against float64; the same bits twice.

Outputs are NaN before every call, so that what nobody writes is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch import Tensor

from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention import math as attention_math
from tests.ops.attention import attention_cases
from tests.ops.attention.attention_cases import CASES, Case, cast
from tests.validation.gpu.figures import CARDS, DTYPES, bits_of, error_of, of_part
from tests.validation.gpu.kernels import Kernels, deterministic, find
from tests.validation.gpu.records import Outcome, Recorder

WIDTHS = (64, 96, 112, 128, 256)
TYPES = dict(zip(DTYPES, (torch.bfloat16, torch.float16), strict=True))

# Many tiles, none of them full: the other cases are within one or two.
LARGE: dict[str, Case] = {
    "many tiles": Case(1, 2, 1, 389, 519),
    "many tiles, causal": Case(1, 2, 1, 515, 515, make=lambda _: {"causal": True}),
    "many tiles behind a prefix": Case(1, 2, 1, 261, 645, make=lambda _: {"causal": True, "q_offset": 384}),
    "many tiles, window": Case(1, 2, 2, 450, 450, make=lambda _: {"causal": True, "window": 200}),
    "many tiles, mask": Case(1, 2, 1, 300, 333, make=lambda c: {"mask": torch.rand(c.b, 1, c.s, c.t) > 0.3}),
    "many tiles, bias": Case(
        1, 2, 2, 270, 390, make=lambda c: {"bias": torch.randn(1, c.h, c.s, c.t).double(), "causal": True}
    ),
    "many tiles, dropout": Case(1, 2, 1, 330, 410, make=lambda _: {"dropout": 0.2, "key": torch.tensor([7, 1 << 40])}),
    "more tiles than SMs": Case(1, 48, 24, 260, 150, make=lambda _: {"causal": True}),
}
TINY = ("full", "grouped", "everything")  # a rehearsal's


def errors(run: Recorder, card: str) -> None:
    """Forward and backward of one card's kernels, each beside the other direction written out in torch.

    Kernels that this card runs but would not choose get fewer cases.
    """
    figures = of_part(f"errors {card}")
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(figures, kernels)
    if card not in kernels.cards:
        return run.absent(figures, f"this card does not run {card} kernels")
    kernels.install(poison=True)
    own = set(CASES)
    patience = chain([60.0, 60.0], repeat(25.0))  # the first may wait for the driver to translate the kernels
    for dtype in DTYPES:
        cases = dict(_cases(dtype, run.quick or card != kernels.cards[0], kernels.rehearsal))
        attention_cases.CASES |= cases
        for name in cases:
            for lse_gradient in (False, True) if name in own else (False,):
                run.attempt(
                    error_of("backward", card, dtype),
                    f"{name}{', lse too' if lse_gradient else ''}",
                    functools.partial(measured, name, "backward", card, dtype, kernels, lse_gradient),
                    next(patience),
                )
            run.attempt(
                error_of("forward", card, dtype),
                name,
                functools.partial(measured, name, "forward", card, dtype, kernels),
                next(patience),
            )
    return None


def _cases(dtype: str, quick: bool, rehearsal: bool) -> Iterator[tuple[str, Case]]:
    """Every variant, large ones in every width, then the variants in the widths that they do not have.

    The last for bf16 alone: fp16 differs in a few instructions.
    """
    if rehearsal:
        yield from ((name, CASES[name]) for name in TINY)
        return
    plain = {name: case for name, case in CASES.items() if ", head " not in name}
    yield from plain.items()
    for name, case in LARGE.items():
        for d in (128,) if quick else WIDTHS if dtype == "bf16" else (64, 128, 256):
            yield f"{name}, head {d}", replace(case, d=d)
    for name, case in plain.items():
        if case.d == 64 and dtype == "bf16":
            for d in () if quick else WIDTHS[1:]:
                yield f"{name}, head {d}", replace(case, d=d)


def measured(name: str, direction: str, card: str, dtype: str, kernels: Kernels, lse_gradient: bool = False) -> Outcome:
    """The results of one direction, each error over what is allowed."""
    forward, backward = attention_math.forward, attention_math.backward
    mine: tuple[str, ...]
    if direction == "forward":
        forward, mine = functools.partial(attention_cuda.forward, card=card), ("o", "lse")
    else:
        backward, mine = functools.partial(attention_cuda.backward, card=card), ("dq", "dk", "dv", "dbias")
    found = attention_cases.errors(
        name, forward, backward, TYPES[dtype], lse_gradient=lse_gradient, device=kernels.device
    )
    shares = {result: error / allowed for result, error, allowed in found if result in mine}
    worst = max(shares, key=lambda result: shares[result])
    wrong = [f"{result} is {share:.3g} of what is allowed" for result, share in shares.items() if not share <= 1]
    return Outcome(not wrong, "; ".join(wrong) or f"{worst}: {shares[worst]:.2f}", shares[worst])


def same_bits(run: Recorder) -> None:
    """Two runs of the forward, and of the backward when the sums shall have an order, with other work in between."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part("same bits"), kernels)
    kernels.install()
    for card in CARDS:
        if card not in kernels.cards:
            run.absent([bits_of(card)], f"this card does not run {card} kernels")
            continue
        cases = {n: CASES[n] for n in TINY} if kernels.rehearsal else LARGE | {"everything": CASES["everything"]}
        for name, case in cases.items():
            run.attempt(bits_of(card), name, functools.partial(_equal, case, card, kernels))
            if not run.quick and not kernels.rehearsal:
                wide = functools.partial(_equal, replace(case, d=128), card, kernels)
                run.attempt(bits_of(card), f"{name}, head 128", wide)
    return None


def _equal(case: Case, card: str, kernels: Kernels) -> Outcome:
    q, k, v, grad_o = (x.to(kernels.device, torch.bfloat16) for x in case.operands()[:4])
    variant = cast(case.variant(), torch.bfloat16, kernels.device).explicit(q, k)

    def once() -> list[Tensor]:
        o, lse = attention_cuda.forward(q, k, v, variant, card)
        with deterministic():
            grads = attention_cuda.backward(grad_o, None, q, k, v, o, lse, variant, variant.bias is not None, card)
        return [x for x in (o, lse, *grads) if x is not None]

    first = once()
    for i in range(1 if kernels.rehearsal else 4):
        torch.randn(1 << (10 + 3 * i), device=kernels.device).sort()  # so that CTAs begin elsewhere
        for a, b in zip(first, once(), strict=True):
            if not torch.equal(a, b):
                return Outcome(False, f"run {i + 2} differs by {(a.float() - b.float()).abs().max().item():.2e}")
    return Outcome(True, "equal")
