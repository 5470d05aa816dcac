"""Samples for `shardlib.rules.tensor_ops.random`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample

CPU = torch.device("cpu")


def draws() -> Iterator[Sample]:
    key = torch.tensor(7)
    for kind, dtype, p in (
        ("word", torch.int64, 0),
        ("long", torch.int64, 0),
        ("bernoulli", torch.bool, 1 << 30),
        ("uniform", torch.float32, 24),
        ("normal", torch.float64, 0),
    ):
        for whole in ([12], [5, 7], [2, 1, 9]):
            yield "shardlib::draw", (key, None, 9, kind, whole, [0] * len(whole), whole), _named(dtype, p)
    # a part of a larger tensor, which is cut again; the place of a tensor; a scalar
    yield "shardlib::draw", (key, None, 9, "normal", [4, 6], [3, 0], [9, 8]), _named(torch.float32)
    yield "shardlib::draw", (key, torch.zeros(4, 6), 9, "uniform", [4, 6], [0, 0], [4, 6]), _named(torch.float32, 24)
    yield "shardlib::draw", (key, None, 9, "normal", [], [], []), _named(torch.float32)


def keys() -> Iterator[Sample]:
    yield "shardlib::numbered_key", (torch.tensor(7), 9), {}
    yield "shardlib::call_key", (), {"device": CPU, "lead": 0}  # what all but the first device hold of it


def _named(dtype: torch.dtype, p: int = 0) -> dict[str, object]:
    return {"dtype": dtype, "device": CPU, "p": p}


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (draws, keys)
