"""GPT-2 and Llama of transformers on four real processes: the same values and updated parameters as on one device."""

from __future__ import annotations

import pytest

import shardlib as sl
from shardlib.core.context import single_device
from tests.helpers.ranks import run_ranks
from tests.models import causal_lm, gpt2, llama

RULES = {"batch": "data", "heads": "tensor", "ff": "tensor", "vocab": "tensor"}
MESHES = {
    "data": ({"data": 4}, {"batch": "data"}),
    "fsdp": ({"data": 4}, {"batch": "data", "embed": "data"}),
    "both": ({"data": 2, "tensor": 2}, RULES),
}


def worst_error(model: str, mesh: str) -> float:
    """The largest relative error of the loss and of every updated parameter, in float64."""
    lm = {"gpt2": gpt2, "llama": llama}[model].build(layers=1)
    params = {name: p.double() for name, p in lm.params().items()}
    tokens = causal_lm.tokens(lm.module.config.vocab_size, 8, 16)
    axes, rules = MESHES[mesh]
    with sl.Mesh(axes, rules=rules):
        loss, new = sl.jit(lm.step, in_specs=(lm.specs(), "batch seq"), out_specs=(None, lm.specs()))(params, tokens)
        found = [loss.full_tensor(), *(new[name].full_tensor() for name in params)]
    with single_device():
        loss, new = lm.step(params, tokens)
    expected = [loss, *(new[name] for name in params)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.sampled(6)
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", ["both", "fsdp", "data"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_ranks_compute_what_one_device_computes(model: str, mesh: str) -> None:
    assert max(run_ranks(worst_error, 4, model, mesh)) <= 1e-12
