"""A training loop in functional form, as in JAX: parameters are a dict, gradients a transform.

`python -m shardlib.examples.functional` fits a two-layer network on a mesh and prints plan and losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

import shardlib as sl

Tree = dict[str, Tensor]
SPECS = {"up": "embed ff", "down": "ff embed"}


def init(embed: int = 16, ff: int = 64) -> Tree:
    """Returns fresh parameters."""
    return {"up": torch.randn(embed, ff) / embed**0.5, "down": torch.randn(ff, embed) / ff**0.5}


def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean squared error of the network on rows `x`, `y` `[batch, embed]`."""
    return (torch.tanh(x @ params["up"]) @ params["down"] - y).square().mean()


def update(params: Tree, momentum: Tree, x: Tensor, y: Tensor) -> tuple[Tree, Tree, Tensor]:
    """Makes one step of gradient descent; returns new parameters, new momentum and the loss."""
    value, grads = sl.value_and_grad(loss)(params, x, y)
    momentum = {name: 0.9 * m + grads[name] for name, m in momentum.items()}
    return {name: p - 0.1 * momentum[name] for name, p in params.items()}, momentum, value


step = sl.jit(update, in_specs=(SPECS, SPECS, "batch embed", "batch embed"), donate_argnums=(0, 1))


def fit(mesh: sl.Mesh, steps: int = 50) -> list[float]:
    """Trains on rows whose target is their reverse; returns the losses."""
    torch.manual_seed(0)
    params = init()
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    losses = []
    with mesh:
        for _ in range(steps):
            x = torch.randn(32, 16)
            params, momentum, value = step(params, momentum, x, x.flip(1))
            losses.append(float(value))
    return losses


def main() -> None:
    """Prints the plan, then the losses."""
    mesh = sl.Mesh(data=2, tensor=4, rules={"batch": "data", "ff": "tensor"})
    with mesh:
        print(step.plan(init(), init(), torch.zeros(32, 16), torch.zeros(32, 16)))
    for number, value in enumerate(fit(mesh)):
        print(f"step {number}: loss {value:.4f}")


if __name__ == "__main__":
    main()
