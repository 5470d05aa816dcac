"""Planning grows as programs do: for one that is twice as long nothing is called much more than twice as often."""

from __future__ import annotations

import cProfile
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.folding import folded


def recurrent(n: int) -> Callable[..., object]:
    """The gradient of n steps that read the same weights and slices of one input."""

    def loss(w: Tensor, u: Tensor, x: Tensor) -> Tensor:
        h, states = torch.zeros(x.shape[1], w.shape[1]), []
        for i in range(n):
            h = torch.tanh(x[i] @ w + h @ u)
            states.append(h)
        return torch.stack(states).mean()

    return torch.func.grad(loss, argnums=(0, 1))


def written(n: int) -> Callable[..., object]:
    """n writes to rows of one tensor, one after the other."""

    def rows(w: Tensor, u: Tensor, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i in range(n):
            y[i] = x[i] @ x[i].t() @ x[i] + i
        return y

    return rows


def calls(program: Callable[..., object], n: int) -> dict[str, int]:
    """How often each function of shardlib is called while a program is planned."""
    args = torch.empty(8, 16, device="meta"), torch.empty(16, 16, device="meta"), torch.empty(n, 8, 8, device="meta")
    profile = cProfile.Profile()
    with sl.Mesh.abstract(data=4, tensor=2):
        step = sl.jit(program, in_specs=("_ h@tensor", "_ h@tensor", "_ b@data _"))
        profile.enable()
        step.plan(*args)
        profile.disable()
    found = [entry for entry in profile.getstats() if not isinstance(entry.code, str)]
    return {
        f"{e.code.co_filename}:{e.code.co_firstlineno}": e.callcount for e in found if "shardlib" in e.code.co_filename
    }


@pytest.mark.long
@pytest.mark.parametrize("of", [recurrent, written])
def test_nothing_is_asked_of_every_pair_of_steps(
    of: Callable[[int], Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded, "WORTH", 0)  # layers are looked for in both
    calls(of(3), 3)  # what is worked out once in a process
    short, long = calls(of(20), 20), calls(of(40), 40)
    assert {name: (short.get(name, 0), n) for name, n in long.items() if n > 400 and n > 2.9 * short.get(name, 0)} == {}
