"""Modules of torch.nn, made on meta and materialized on a mesh, have the values that they are made with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.core.errors import ShardingError

MADE: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(4, 6),
    "Bilinear": lambda: nn.Bilinear(4, 5, 6),
    "Embedding": lambda: nn.Embedding(10, 6, padding_idx=2),
    "EmbeddingBag": lambda: nn.EmbeddingBag(10, 6),
    **{f"Conv{n}d": lambda n=n: getattr(nn, f"Conv{n}d")(4, 6, 3) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": lambda n=n: getattr(nn, f"ConvTranspose{n}d")(4, 6, 3) for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": lambda n=n: getattr(nn, f"BatchNorm{n}d")(6) for n in (1, 2, 3)},
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    **{
        f"InstanceNorm{n}d": lambda n=n: getattr(nn, f"InstanceNorm{n}d")(6, affine=True, track_running_stats=True)
        for n in (1, 2, 3)
    },
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "PReLU": lambda: nn.PReLU(6),
    "RNN": lambda: nn.RNN(4, 6, 2),
    "LSTM": lambda: nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(4, 6, 2),
    **{f"{name}Cell": lambda name=name: getattr(nn, f"{name}Cell")(4, 6) for name in ("RNN", "LSTM", "GRU")},
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=3, add_bias_kv=True),
    "MultiheadAttention, alike": lambda: nn.MultiheadAttention(8, 2),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(8, 2, 16),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, nn.LayerNorm(8)
    ),
    "TransformerDecoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
    "Transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], div_value=2.0),
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), shared := nn.Linear(4, 4), nn.ReLU(), shared, nn.Linear(4, 4)),
}


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, sl.ShardedTensor) else x).detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_it_has_the_values_that_it_is_made_with(name: str, cut: bool) -> None:
    with sl.global_random():
        torch.manual_seed(0)
        plain = MADE[name]()
    torch.manual_seed(0)
    with torch.device("meta"):
        made = MADE[name]()
    many = {at: p for at, p in made.named_parameters() if cut and p.shape[0] > 1}
    with sl.Mesh(tensor=2):
        sl.parallelize(made, {at: " ".join(["rows@tensor", *"_" * (p.dim() - 1)]) for at, p in many.items()})
        sl.materialize(made)
    for (at, x), y in zip(made.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(whole(x), y), at


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_modules_are_refused(kind: str) -> None:
    with torch.device("meta"):
        net = nn.Sequential(getattr(nn.utils.parametrizations, kind)(nn.Linear(4, 6)))
    with sl.Mesh(tensor=2), pytest.raises(ShardingError, match=r"finds parametrized tensors:\n  \* 0 has weight"):
        sl.materialize(sl.parallelize(net, {}))
