"""Runs Muon on sharded matrices: one device iterates on a whole matrix, and sends the shards of its update.

The Newton-Schulz iteration multiplies a matrix with itself fifteen times, and a sharded matrix would be gathered or
summed every time. Here matrices of one shape are a stack. During the iteration, the mesh axes that shard them shard the
stack instead: one exchange before and one after, and no product is computed twice.
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


def are_sharded(params: Sequence[Tensor]) -> bool:
    """Returns whether some parameters are sharded."""
    return any(isinstance(p, ShardedTensor) and p._form.layout.axes for p in params)


def update(
    params: Sequence[Tensor], grads: Sequence[Tensor], muon_momentum_bufs: Sequence[Tensor],
    *, lr: Any, weight_decay: float, momentum: float, nesterov: bool, ns_coefficients: tuple[float, float, float],
    ns_steps: int, eps: float, adjust_lr_fn: str | None, **_: Any,
) -> None:  # fmt: skip
    """Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), as `torch.optim.Muon` has it."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    wide: list[Tensor] = []
    for i, (p, grad, buffer) in enumerate(zip(params, grads, muon_momentum_bufs, strict=True)):
        buffer.lerp_(grad, 1 - momentum)
        step = (grad.lerp(buffer, momentum) if nesterov else buffer).bfloat16()
        rows, columns = p.shape
        wide.append(step.T if rows > columns else step)
        by_shape[min(p.shape), max(p.shape)].append(i)
    for members in by_shape.values():
        x = torch.stack([wide[i] for i in members])
        if axes := _axes([params[i] for i in members]):
            where = f"matrix@({' '.join(map(str, axes))}) _ _"
            padded = F.pad(x, (0, 0, 0, 0, 0, -len(members) % group_size(axes)))
            x = constrain(_orthogonal(constrain(padded, where), ns_coefficients, ns_steps, eps), where)
        else:
            x = _orthogonal(x, ns_coefficients, ns_steps, eps)
        for i, done in zip(members, x[: len(members)].unbind(), strict=True):
            p = params[i]
            rows, columns = p.shape
            p.mul_(1 - lr * weight_decay)
            p.add_(done.T if rows > columns else done, alpha=-lr * _adjustment(adjust_lr_fn, rows, columns))


def _axes(params: Sequence[Tensor]) -> tuple[Axis, ...]:
    """Returns the mesh axes that shard some of the parameters."""
    axes = (a for p in params if isinstance(p, ShardedTensor) for a in p._form.layout.axes)
    primes = {part for a in axes for part in a.primes()}
    return Axis.merge(sorted(primes, key=lambda a: (a.name, a.pre)))


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Returns nearly orthogonal matrices with the singular vectors of a stack [n, rows, columns], rows <= columns."""
    a, b, c = coefficients
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _adjustment(how: str | None, rows: int, columns: int) -> float:
    """Returns the factor of the learning rate for a shape."""
    if how is None or how == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else 1.0
