"""Samples for `shardlib.rules.tensor_ops.embedding_bag`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample

aten = torch.ops.aten


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


_INDEX = torch.tensor([1, 2, 0, 4, 3, 3, 0])
_STARTS = torch.tensor([0, 2, 2, 5])


def embedding_bag() -> Iterator[Sample]:
    for mode, last, padding in itertools.product((0, 1, 2), (False, True), (-1, 3)):
        for weights in (None, _f(7)) if mode == 0 else (None,):
            table = _f(5, 4)
            call = (table, _INDEX, _STARTS, False, mode, False, weights, last, padding)
            yield "_embedding_bag", call, {}
            out, bags, sizes, most = aten._embedding_bag(*call)
            grad = torch.randn_like(out)
            for by_count in (False, True) if mode == 0 else (False,):
                rest = (5, by_count, mode)
                back = (grad, _INDEX, _STARTS, bags, sizes, most, *rest, False, weights, padding)
                yield "_embedding_bag_backward", back, {}
                yield "_embedding_bag_dense_backward", (grad, _INDEX, bags, sizes, most, *rest, weights, padding), {}
            if weights is not None:
                back = (grad, table, _INDEX, _STARTS, bags, mode, padding)
                yield "_embedding_bag_per_sample_weights_backward", back, {}
    yield "_embedding_bag", (_f(5, 3).float(), _INDEX, _STARTS), {}
    yield "_embedding_bag_forward_only", (_f(5, 3), _INDEX, _STARTS), {}
    yield "embedding_renorm", (_f(5, 3), torch.tensor([0, 2, 2, 4]), 0.5, 2.0), {}


def segment_reduce() -> Iterator[Sample]:
    lengths = torch.tensor([[2, 0, 3], [1, 1, 3], [5, 0, 0]])
    offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    for how, kind in itertools.product(("sum", "mean", "max", "min", "prod"), ("lengths", "offsets")):
        bounds = {kind: lengths if kind == "lengths" else offsets, "axis": 1}
        data = _f(3, 5, 4)
        yield "segment_reduce", (data, how), bounds | {"initial": 1}
        out = aten.segment_reduce(data, how, **bounds, initial=1)
        yield "_segment_reduce_backward", (torch.randn_like(out), out, data, how), bounds | {"initial": 1}
        flat = {kind: bounds[kind][0]}
        yield "segment_reduce", (data[0], how), flat


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (embedding_bag, segment_reduce)
