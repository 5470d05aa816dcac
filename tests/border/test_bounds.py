"""Indices out of bounds along a cut dim: an error, as on one device, where a device only looks at its own piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.border.oracle import same

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
            with pytest.raises(IndexError, match=r"index -?\d+ is out of bounds for a dim of size \d+"):
                run(*_placed())


@pytest.mark.parametrize("call", WITHIN.values(), ids=WITHIN)
def test_an_index_within_is_none(call: Call) -> None:
    with sl.Mesh(data=2, tensor=2):
        for run in (call, sl.jit(call)):
            same(run(*_placed()), call(X, W, L))
