"""Compares tensors of a sharded run with those of one device: relative errors, in the maximum norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof

_RTOL = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}
_HALF = 1e-2  # bf16, fp16 and smaller


@dataclass(frozen=True)
class Compared:
    """One leaf, its relative error against one device (maximum norm), and its fault, if it differs."""

    path: str
    type: str
    error: float
    rtol: float
    fault: str = ""
    rounding: float = 0.0

    def __str__(self) -> str:
        alone = f", rounding alone changes it by {self.rounding:.1e}" if self.rounding else ""
        return f"{self.path} {self.type}: {self.fault or f'error {self.error:.1e} (tolerance {self.rtol:.0e}{alone})'}"

    def allow_rounding(self, rounding: float) -> Compared:
        """Clears the fault if the error is near `rounding`, the error of one device under other rounding."""
        fits = bool(self.rtol) and self.error <= _TIMES * rounding < math.inf
        return replace(self, fault="", rounding=rounding) if self.fault and fits else self


_TIMES = 4  # another order of additions costs more than one rounding of each number


def compare(
    root: str,
    expected: Any,
    actual: Any,
    names: Sequence[str] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    looser: float = 1,
) -> list[Compared]:
    """Compares two pytrees leaf by leaf; leaves are named by their paths or by `names`.

    `looser` multiplies default tolerances.
    """
    expected_leaves, tree = flatten_with_path(expected)
    actual_leaves, actual_tree = pytree.tree_flatten(actual)
    if tree != actual_tree:
        raise ShardingError(
            "check: the function returns one structure on one device and another when it is traced",
            [f"on one device: {tree}", f"traced: {actual_tree}"],
            rule="what a function returns does not depend on how it runs",
        )
    out: list[Compared] = []
    for (path, a), b in zip(expected_leaves, actual_leaves, strict=True):
        name = root + (pytree.keystr(path) if names is None else names[len(out)])
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            out.append(compare_tensors(name, a.detach(), b, rtol, atol, looser))
        else:
            same = not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
            out.append(Compared(name, _show(a), 0.0, 0.0, "" if same else f"is {_show(b)} when sharded"))
    return out


def _show(x: Any) -> str:
    return typeof(x) if isinstance(x, Tensor) else repr(x)


def compare_tensors(
    name: str, one: Tensor, sharded: Tensor, rtol: float | None = None, atol: float | None = None, looser: float = 1
) -> Compared:
    """Compares a tensor with its sharded form, or with the gathered values of that."""
    whole = sharded.full_tensor().detach() if isinstance(sharded, ShardedTensor) else sharded.detach()
    if (one.shape, one.dtype) != (whole.shape, whole.dtype):
        return Compared(name, typeof(sharded), float("inf"), 0.0, f"is {typeof(one)} on one device")
    inexact = one.is_floating_point() or one.is_complex()
    if rtol is None:
        rtol = _RTOL.get(one.dtype, _HALF) * looser if inexact else 0.0
    if atol is None:
        atol = rtol / 100
    wide = torch.complex128 if one.is_complex() else torch.float64
    exact = torch.uint8 if one.dtype == torch.bool else one.dtype
    a, b = (x.to(wide if inexact else exact) for x in (one, whole))
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, (a - b).abs() if inexact else 1.0).to(torch.float64)
    far = torch.where(far.isnan(), torch.inf, far)
    finite = torch.where(a.isfinite(), a.abs(), 0.0).to(torch.float64)
    most, scale = (float(x.max()) if x.numel() else 0.0 for x in (far, finite))
    error = most / scale if scale else most
    if most <= atol + rtol * scale:
        return Compared(name, typeof(sharded), error, rtol)
    i = int((far > atol + rtol * scale).flatten().nonzero()[0])
    at = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), one.shape))
    where = f"first at {list(at)}: " if at else ""
    fault = (
        f"error {error:.1e} (tolerance {rtol:.0e}), {where}{one[at].item()} on one device, {whole[at].item()} sharded"
    )
    return Compared(name, typeof(sharded), error, rtol, fault)
