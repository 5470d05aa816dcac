"""Indices out of bounds along a cut dim: an error, as on one device, where a device only looks at its own piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.helpers.oracle import same

X, W, L = torch.arange(12.0).view(4, 3), torch.arange(24.0).view(6, 4), torch.arange(16.0).view(4, 4)
ONES = torch.ones(1, 3)


def _at(*places: int) -> torch.Tensor:
    return torch.tensor(places)


Call = Callable[[Any, Any, Any], Any]  # of a table cut by rows, a longer one, and scores cut by class
OUT: dict[str, Call] = {
    "x[4]": lambda x, w, s: x[[4]],
    "x[-5]": lambda x, w, s: x[[-5]],
    "put": lambda x, w, s: x.index_put((_at(4),), torch.tensor(1.0)),
    "embedding": lambda x, w, s: F.embedding(_at(6, 1), w),
    "embedding at -1": lambda x, w, s: F.embedding(_at(-1, 1), w),
    "bag": lambda x, w, s: F.embedding_bag(_at(6, 1), w, _at(0)),
    "class": lambda x, w, s: F.cross_entropy(s, _at(0, 4, 1, 0)),
    "class -1": lambda x, w, s: F.cross_entropy(s, _at(0, -1, 1, 0)),
    "select": lambda x, w, s: x.index_select(0, _at(4)),
    "gather": lambda x, w, s: x.gather(0, _at(4, 0, 0)[None]),
    "add": lambda x, w, s: x.index_add(0, _at(4), ONES),
    "scatter": lambda x, w, s: x.scatter(0, _at(4, 0, 0)[None], ONES),
    "scatter_add": lambda x, w, s: x.scatter_add(0, _at(4, 0, 0)[None], ONES),
    "copy": lambda x, w, s: x.index_copy(0, _at(4), ONES),
    "fill": lambda x, w, s: x.index_fill(0, _at(4), 1.0),
    "take": lambda x, w, s: x.take(_at(12)),
    "put by place": lambda x, w, s: x.put(_at(12), torch.ones(1)),
    "indices in pieces": lambda x, w, s: F.embedding(sl.shard(_at(1, 2, 3, 9), "i@tensor"), w),
}
WITHIN: dict[str, Call] = {
    "x[-4]": lambda x, w, s: x[[-4]],
    "ignored": lambda x, w, s: F.cross_entropy(s, _at(0, -100, 1, 0)),
    "fill": lambda x, w, s: x.index_fill(0, _at(-4), 1.0),
    "take": lambda x, w, s: x.take(_at(-12)),
    "none": lambda x, w, s: x[torch.zeros(0, dtype=torch.int64)],
}


def _placed() -> tuple[Any, Any, Any]:
    return sl.shard(X, "a@data _"), sl.shard(W, "v@data _"), sl.shard(L, "a@tensor v@data")


@pytest.mark.parametrize("call", OUT.values(), ids=OUT)
def test_an_index_out_of_bounds_is_an_error(call: Call) -> None:
    with sl.Mesh(data=2, tensor=2):
        for run in (call, sl.jit(call)):
            with pytest.raises(IndexError, match=r"(index|Target) -?\d+ is out of bounds"):
                run(*_placed())


@pytest.mark.parametrize("call", WITHIN.values(), ids=WITHIN)
def test_an_index_within_is_none(call: Call) -> None:
    with sl.Mesh(data=2, tensor=2):
        for run in (call, sl.jit(call)):
            same(run(*_placed()), call(X, W, L))


P, HALF = torch.tensor([0.5, 0.2, 0.3, 0.0]), torch.full((4,), 0.5)
VALUES: dict[str, tuple[str, Callable[[], Any]]] = {
    "class 6 of 6": ("6 classes, from 0 on: this one is 6", lambda: F.one_hot(_at(6, 1), 6)),
    "class -1": ("6 classes, from 0 on: this one is -1", lambda: F.one_hot(_at(0, -1), 6)),
    "weights with NaN": ("not negative: this one is nan", lambda: torch.multinomial(P * 0 / 0, 1)),
    "negative weights": ("not negative: this one is -0.5", lambda: torch.multinomial(P - 0.5 - P, 2, True)),
    "infinite weights": ("not negative: this one is inf", lambda: torch.multinomial(P[:3] / 0, 1)),
    "no weights": ("not all weights are 0", lambda: torch.multinomial(P * 0, 1)),
    "no weights, often": ("not all weights are 0", lambda: torch.multinomial(P * 0, 2, True)),
    "no weights, several": ("not all weights are 0", lambda: torch.multinomial(torch.stack([P, P * 0]), 2)),
    "probability 1.5": ("between 0 and 1: this one is 1.5", lambda: torch.bernoulli(HALF + 1)),
    "probability NaN": ("between 0 and 1: this one is nan", lambda: (HALF * 0).bernoulli_(HALF / 0 * 0)),
    "deviation": ("a standard deviation is not negative", lambda: torch.normal(HALF, -HALF)),
    "variance": ("a variance is not negative", lambda: F.gaussian_nll_loss(P, P, -HALF)),
    "weights of cov": ("a weight is not negative", lambda: torch.cov(P, aweights=-HALF)),
}


@pytest.mark.parametrize(("words", "call"), VALUES.values(), ids=VALUES)
def test_what_torch_refuses_of_values_is_refused(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        call()
    with sl.Mesh(data=2, tensor=2), pytest.raises(RuntimeError, match=words):
        sl.jit(call)()


def test_probabilities_are_looked_at_in_pieces() -> None:
    with sl.Mesh(data=2, tensor=2), pytest.raises(RuntimeError, match=r"between 0 and 1: this one is 1\.5"):
        torch.bernoulli(sl.shard(HALF + 1, "a@data"))
