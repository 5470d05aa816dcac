"""Muon on matrices that are cut: each goes whole to one device, which iterates, and sends the pieces of its update.

Newton and Schulz multiply a matrix with itself fifteen times, and a matrix that is cut is gathered, or summed, every
time. Matrices of one shape are a stack here, and the axes that cut them inside cut the stack instead, while it is
iterated: one exchange there and one back, and no product is computed twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.ops.constraint import constrain
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.tensor.sharded_tensor import ShardedTensor


def are_cut(params: Sequence[Tensor]) -> bool:
    """Whether some of them live in pieces."""
    return any(isinstance(p, ShardedTensor) and p._form.layout.axes for p in params)


def update(
    params: Sequence[Tensor], grads: Sequence[Tensor], muon_momentum_bufs: Sequence[Tensor],
    *, lr: Any, weight_decay: float, momentum: float, nesterov: bool, ns_coefficients: tuple[float, float, float],
    ns_steps: int, eps: float, adjust_lr_fn: str | None, **_: Any,
) -> None:  # fmt: skip
    """Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), as `torch.optim.Muon` has it."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    wide: list[Tensor] = []
    for i, (p, grad, buffer) in enumerate(zip(params, grads, muon_momentum_bufs, strict=True)):
        buffer.lerp_(grad, 1 - momentum)
        step = (grad.lerp(buffer, momentum) if nesterov else buffer).bfloat16()
        rows, columns = p.shape
        wide.append(step.T if rows > columns else step)
        alike[min(p.shape), max(p.shape)].append(i)
    for members in alike.values():
        x = torch.stack([wide[i] for i in members])
        if axes := _axes([params[i] for i in members]):
            where = f"matrix@({' '.join(map(str, axes))}) _ _"
            as_many = F.pad(x, (0, 0, 0, 0, 0, -len(members) % group_size(axes)))
            x = constrain(_orthogonal(constrain(as_many, where), ns_coefficients, ns_steps, eps), where)
        else:
            x = _orthogonal(x, ns_coefficients, ns_steps, eps)
        for i, done in zip(members, x[: len(members)].unbind(), strict=True):
            p = params[i]
            rows, columns = p.shape
            p.mul_(1 - lr * weight_decay)
            p.add_(done.T if rows > columns else done, alpha=-lr * _adjustment(adjust_lr_fn, rows, columns))


def _axes(params: Sequence[Tensor]) -> tuple[Axis, ...]:
    """All that cut some of them."""
    cut = (a for p in params if isinstance(p, ShardedTensor) for a in p._form.layout.axes)
    primes = {part for a in cut for part in a.primes()}
    return Axis.merge(sorted(primes, key=lambda a: (a.name, a.pre)))


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of those of a stack [n, rows, columns], rows <= columns."""
    a, b, c = coefficients
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _adjustment(how: str | None, rows: int, columns: int) -> float:
    """What the learning rate is multiplied with for a shape."""
    if how is None or how == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else 1.0
