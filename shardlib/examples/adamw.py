"""AdamW as a pure function over dicts of tensors, so that it is traced and sharded with the rest of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Tree = dict[str, Tensor]


@dataclass(frozen=True)
class Hyper:
    """AdamW's constants (Loshchilov and Hutter, 2019); learning rate and step number are tensors of the step."""

    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0


def zeros(params: Tree) -> dict[str, Tree]:
    """Moments of a run that has not begun."""
    return {key: {name: torch.zeros_like(p) for name, p in params.items()} for key in ("mean", "square")}


def clipped(grads: Tree, limit: float) -> tuple[Tree, Tensor]:
    """Gradients scaled so that their global norm is at most `limit`, and the norm that they had.

    Example:
        >>> grads, norm = clipped({"w": torch.tensor([3.0, 4.0])}, 1.0)
        >>> float(norm), grads["w"].norm().item() <= 1.0
        (5.0, True)
    """
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    return {name: g * scale for name, g in grads.items()}, norm


def update(
    params: Tree, grads: Tree, moments: dict[str, Tree], step: Tensor, lr: Tensor, hyper: Hyper
) -> tuple[Tree, dict[str, Tree]]:
    """One step; `step` (1, 2, ...) and `lr` are 0-d tensors, so that a new value of them is not a new program.

    Weight decay is decoupled and applies to matrices only.
    """
    mean, square, updated = {}, {}, {}
    unbias1, unbias2 = 1 - hyper.beta1**step, 1 - hyper.beta2**step
    for name, p in params.items():
        g = grads[name]
        mean[name] = hyper.beta1 * moments["mean"][name] + (1 - hyper.beta1) * g
        square[name] = hyper.beta2 * moments["square"][name] + (1 - hyper.beta2) * g * g
        direction = (mean[name] / unbias1) / ((square[name] / unbias2).sqrt() + hyper.eps)
        decay = hyper.decay if p.dim() > 1 else 0.0
        updated[name] = p - lr * (direction + decay * p)
    return updated, {"mean": mean, "square": square}


def cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Learning rate at `step` (from 1): linear warm-up to `peak`, then a cosine down to `floor * peak`.

    Example:
        >>> [round(cosine(s, 100, 1.0, 10), 2) for s in (1, 10, 55, 100)]
        [0.1, 1.0, 0.55, 0.1]
    """
    if step <= warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
