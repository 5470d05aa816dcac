"""Planning grows as programs do: for one that is twice as long nothing is called much more than twice as often."""

from __future__ import annotations

import cProfile
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.compiler.layer_folding import fold_graph


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
    monkeypatch.setattr(fold_graph, "WORTH", 0)  # layers are looked for in both
    calls(of(3), 3)  # what is worked out once in a process
    short, long = calls(of(20), 20), calls(of(40), 40)
    assert {name: (short.get(name, 0), n) for name, n in long.items() if n > 400 and n > 2.9 * short.get(name, 0)} == {}


@pytest.mark.long
def test_an_axis_that_may_cut_any_of_many_dims_in_part() -> None:
    """A state-space model has nine dims that 8 devices may cut by 2 or 4 each: few ways are looked at closely."""
    of = pytest.importorskip("transformers")
    small = {"hidden_size": 128, "state_size": 16, "head_dim": 16, "num_heads": 16, "n_groups": 8, "chunk_size": 64}
    with torch.device("meta"):
        model = of.Mamba2ForCausalLM(of.Mamba2Config(num_hidden_layers=2, vocab_size=256, **small)).train()
    ids, profile = torch.zeros(8, 256, dtype=torch.int64, device="meta"), cProfile.Profile()
    with sl.Mesh.abstract(data=8):
        sl.parallelize(model, strategy="fsdp")
        step = sl.jit(lambda model, ids: model(input_ids=ids, labels=ids).loss.backward())
        profile.enable()
        step.plan(model, ids)
        profile.disable()
    found = {(e.code.co_filename.rpartition("shardlib/")[2], e.code.co_name): e.callcount for e in profile.getstats()
             if not isinstance(e.code, str)}  # fmt: skip
    assert found["compiler/propagate/solver/reshard_costs.py", "_way"] < 10_000
    assert found["sharding/reshard/routing.py", "plan_steps"] < 4_500
    assert found["compiler/propagate/solver/domains.py", "slot_axes"] < 500_000
