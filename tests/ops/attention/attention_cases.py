"""The variants of attention that every backend is measured on, and the measurement: errors against float64.

`CASES` maps names to sizes and arguments; `errors` measures one backend on one of them, beside torch in the same dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.ops.attention.op import BACKENDS, Variant, reference

Make = Callable[["Case"], dict[str, Any]]  # the keyword arguments of `Variant`, on the CPU
Forward = Callable[[Tensor, Tensor, Tensor, Variant], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor | None, ...]]  # (grad_o, grad_lse, q, k, v, o, lse, variant, need_bias)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COLUMNS = ("torch", "math")  # the backends that run without a GPU; another one becomes a column by its name in BACKENDS


def able(column: str, variant: Variant, need_bias: bool = False) -> bool:
    """Whether a backend that runs here can do a variant."""
    q = torch.empty(1, 1, 1, 8)
    return BACKENDS[column].find_fault(q, q, variant, need_bias) is None


@dataclass(frozen=True)
class Case:
    """Sizes and a variant: q [b, h, s, d], k and v [b, kv, t, d]."""

    b: int = 2
    h: int = 4
    kv: int = 4
    s: int = 24
    t: int = 24
    d: int = 64
    make: Make = field(default=lambda _: {})

    def variant(self) -> Variant:
        torch.manual_seed(self.s + 7 * self.t)
        return Variant(**{"scale": 1 / math.sqrt(self.d)} | self.make(self))

    def operands(self) -> tuple[Tensor, ...]:
        """q, k, v, grad_o and grad_lse in float64; the same at every call."""
        torch.manual_seed(self.h + 10 * self.s + self.t)
        shapes = ((self.h, self.s), (self.kv, self.t), (self.kv, self.t), (self.h, self.s))
        tensors = [torch.randn(self.b, n, m, self.d, dtype=torch.float64) for n, m in shapes]
        return *tensors, torch.randn(self.b, self.h, self.s, dtype=torch.float64)


def _key() -> Tensor:
    return torch.tensor([0x299F31D0A4093822, 5])


def _slopes(c: Case) -> Tensor:
    return 2.0 ** -torch.arange(1, c.h + 1)


def _keep(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.4


def _bias(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _with_infinities(c: Case) -> Tensor:
    """A bias in which some keys are out of sight, and everything is for the first query."""
    bias = _bias(1, 1, c.s, c.t).masked_fill(~_keep(1, 1, c.s, c.t), -math.inf)
    bias[:, :, 0] = -math.inf
    return bias


def _lowest(c: Case) -> Tensor:
    """What model libraries add to hide keys: a number that every dtype holds, not an infinity."""
    return torch.zeros(c.b, 1, 1, c.t).masked_fill(torch.arange(c.t) >= c.t - 5, -60000.0)


def _everything(c: Case) -> dict[str, Any]:
    how = {"mask": _keep(c.b, 1, c.s, c.t), "bias": _bias(c.h, 1, c.t), "alibi": _slopes(c), "causal": True}
    return how | {"window": 11, "q_offset": 9, "k_offset": 3, "dropout": 0.2, "key": _key(), "part": [3, 8, 24, 64, 67]}


CASES: dict[str, Case] = {
    "full": Case(),
    "causal": Case(make=lambda _: {"causal": True}),
    "causal, many queries": Case(s=37, t=13, make=lambda _: {"causal": True}),
    "causal, many keys": Case(s=13, t=37, make=lambda _: {"causal": True}),
    "causal behind a prefix": Case(s=13, t=37, make=lambda _: {"causal": True, "q_offset": 24}),
    "one query": Case(s=1, t=40, make=lambda _: {"causal": True, "q_offset": 39}),
    "one key": Case(s=40, t=1),
    "no tile's size": Case(b=1, h=2, kv=1, s=67, t=131, make=lambda _: {"causal": True, "q_offset": 64}),
    "grouped": Case(h=6, kv=2, make=lambda _: {"causal": True}),
    "one key head": Case(h=6, kv=1),
    "cross": Case(s=7, t=33),
    "grouped cross": Case(h=4, kv=2, s=33, t=7),
    "scale 1": Case(make=lambda _: {"scale": 1.0, "causal": True}),
    **{f"head {d}": Case(s=16, t=18, d=d, make=lambda _: {"causal": True}) for d in (8, 40, 96, 112, 128, 256)},
    "padding": Case(make=lambda c: {"mask": torch.arange(c.t) < torch.tensor([[[[17]]], [[[9]]]])}),
    "causal padding": Case(make=lambda c: {"mask": _keep(c.b, 1, 1, c.t), "causal": True}),
    "mask": Case(s=11, make=lambda c: {"mask": _keep(c.s, c.t)}),
    "mask of heads": Case(h=4, kv=2, make=lambda c: {"mask": _keep(c.b, c.h, c.s, c.t)}),
    "a mask of queries": Case(make=lambda c: {"mask": _keep(c.s, 1)}),
    "nothing to see": Case(make=lambda c: {"mask": torch.zeros(1, dtype=torch.bool)}),
    "bias": Case(make=lambda c: {"bias": _bias(1, c.h, c.s, c.t)}),
    "grouped bias": Case(h=4, kv=2, s=9, make=lambda c: {"bias": _bias(c.b, c.h, c.s, c.t), "causal": True}),
    "bias of keys": Case(make=lambda c: {"bias": _bias(c.h, 1, c.t)}),
    "bias of queries": Case(make=lambda c: {"bias": _bias(c.b, 1, c.s, 1)}),
    "bias of places": Case(make=lambda c: {"bias": _bias(c.s, c.t), "mask": _keep(c.b, 1, 1, c.t)}),
    "one bias": Case(make=lambda _: {"bias": _bias()}),
    "bias with infinities": Case(make=lambda c: {"bias": _with_infinities(c)}),
    "bias with lowest numbers": Case(make=lambda c: {"bias": _lowest(c), "causal": True}),
    "window": Case(make=lambda _: {"window": 5}),
    "causal window": Case(s=40, t=40, make=lambda _: {"window": 7, "causal": True}),
    "window of 1": Case(make=lambda _: {"window": 1, "causal": True}),
    "wide window": Case(make=lambda _: {"window": 1000}),
    "window behind": Case(s=13, t=37, make=lambda _: {"window": 6, "q_offset": 30}),
    "alibi": Case(make=lambda c: {"alibi": _slopes(c)}),
    "grouped causal alibi": Case(h=8, kv=2, make=lambda c: {"alibi": _slopes(c), "causal": True}),
    "alibi far away": Case(s=9, t=11, make=lambda c: {"alibi": _slopes(c), "q_offset": 3000, "k_offset": 2990}),
    "block below the diagonal": Case(make=lambda _: {"causal": True, "q_offset": 48, "k_offset": 24}),
    "block on the diagonal": Case(make=lambda _: {"causal": True, "q_offset": 24, "k_offset": 24}),
    "block above the diagonal": Case(make=lambda _: {"causal": True, "k_offset": 24}),
    "block across the diagonal": Case(make=lambda _: {"causal": True, "q_offset": 8, "k_offset": 13}),
    "block outside the window": Case(make=lambda _: {"window": 8, "k_offset": 40}),
    "dropout": Case(make=lambda _: {"dropout": 0.1, "key": _key()}),
    "causal dropout, grouped": Case(
        h=6, kv=2, s=13, t=19, make=lambda _: {"dropout": 0.5, "key": _key(), "causal": True}
    ),
    "dropout of a part": Case(
        make=lambda _: {"dropout": 0.3, "key": _key(), "q_offset": 5, "k_offset": 2, "part": [1, 4, 16, 41, 43]}
    ),
    "everything": Case(h=6, kv=3, s=21, t=27, make=_everything),
}


def cast(variant: Variant, dtype: torch.dtype, device: torch.device | str = "cpu") -> Variant:
    """The variant for tensors of `dtype` on a device: its bias in the same dtype."""
    bias = None if variant.bias is None else variant.bias.to(device, dtype)
    rest = {n: x.to(device) for n in ("mask", "alibi", "key") if (x := getattr(variant, n)) is not None}
    return variant._replace(bias=bias, **rest)


Results = dict[str, Tensor]  # o, lse, dq, dk, dv, dbias


def errors(
    name: str,
    forward: Forward,
    backward: Backward,
    dtype: torch.dtype,
    *,
    lse_gradient: bool = False,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, float, float]]:
    """Of each result of a backend on one case: its name, the backend's greatest error, and what is allowed.

    Inputs are rounded to `dtype` first, so that all start from the same numbers. Allowed is twice torch's own error in
    the same dtype, and the rounding of a result besides; in float64, where torch is the yardstick, a fixed tolerance.
    """
    exact, torchs = _yardsticks(name, dtype, lse_gradient)
    case = CASES[name]
    variant = cast(case.variant(), dtype, device)
    q, k, v, grad_o, grad_lse = (x.to(device, dtype) for x in case.operands())
    o, lse = forward(q, k, v, variant.explicit(q, k))
    found = {"o": o, "lse": lse}
    need_bias = variant.bias is not None
    gradients = backward(
        grad_o, grad_lse.to(lse.dtype) if lse_gradient else None, q, k, v, o, lse, variant.explicit(q, k), need_bias
    )
    found |= {n: x for n, x in zip(("dq", "dk", "dv", "dbias"), gradients, strict=True) if x is not None}
    assert found.keys() == exact.keys()
    for n, x in found.items():
        want = exact[n]
        assert x.numel() == want.numel()
        assert x.dtype == (lse.dtype if n == "lse" else dtype)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        yield n, _distance(x, want), _allowed(x, want, torchs[n], case)


def _allowed(x: Tensor, want: Tensor, torchs: Tensor, case: Case) -> float:
    # Operands are normal numbers of variance 1, so results that cancel to 0 have addends of about 1.
    size = max([1.0, *want[want.isfinite()].abs().flatten().tolist()])
    if x.dtype == torch.float64:
        return 1e-12 * size
    addends = max(1.0, case.b * case.h * case.s * case.t / max(x.numel(), 1)) if x.dim() < 4 or 1 in x.shape else 1.0
    rounding = torch.finfo(x.dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps  # of the result, and on the way to it
    return 2 * _distance(torchs, want) + rounding * size * math.sqrt(addends)


def _distance(x: Tensor, want: Tensor) -> float:
    """The greatest error; infinite where one of the two is not finite and the other something else."""
    x = x.detach().cpu().double().reshape(want.shape)
    error = torch.where(x == want, 0.0, (x - want).abs()).nan_to_num(nan=math.inf)
    return error.max().item() if error.numel() else 0.0


@functools.lru_cache(maxsize=256)
def _yardsticks(name: str, dtype: torch.dtype, lse_gradient: bool) -> tuple[Results, Results]:
    """The results in float64, and what torch makes of them in `dtype`."""
    case = CASES[name]
    rounded = [x.to(dtype).double() for x in case.operands()]
    exact = _by_autograd(reference, rounded, cast(cast(case.variant(), dtype), torch.float64), lse_gradient)
    assert not any(x.isnan().any() for x in exact.values())
    variant = cast(case.variant(), dtype)
    in_dtype = [x.to(dtype) for x in case.operands()]
    torchs = _by_autograd(reference, in_dtype, variant, lse_gradient)
    if not variant.dropout and not lse_gradient:
        torchs |= _by_autograd(_sdpa, in_dtype, variant._replace(bias=None), lse_gradient, bias=variant.bias)
    return exact, torchs


def _sdpa(q: Tensor, k: Tensor, v: Tensor, variant: Variant, bias: Tensor | None) -> tuple[Tensor, None]:
    """torch's own function, given everything that hides keys or moves logits as one mask."""
    s, t = q.shape[2], k.shape[2]
    how = variant._replace(bias=bias)
    mask = how.explicit(q, k).logits(torch.zeros(1, 1, s, t)).to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=variant.scale, enable_gqa=grouped), None


def _by_autograd(run: Any, tensors: list[Tensor], variant: Variant, lse_gradient: bool, **more: Any) -> Results:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    leaves = {"dq": q, "dk": k, "dv": v}
    if variant.bias is not None:
        leaves["dbias"] = variant.bias.clone().requires_grad_()
        variant = variant._replace(bias=leaves["dbias"])
    o, lse = run(q, k, v, variant, **more)
    total = (o * tensors[3]).sum()
    if lse_gradient:
        total = total + (lse.masked_fill(lse.isneginf(), 0) * tensors[4]).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    out = {"o": o.detach()} | ({} if lse is None else {"lse": lse.detach()})
    for (n, leaf), grad in zip(leaves.items(), grads, strict=True):
        out[n] = torch.zeros_like(leaf) if grad is None else grad
    return out
