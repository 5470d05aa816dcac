"""Samples for the rows of `shardlib.rules.tensor_ops.scatter` with reductions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, i, s


def scatter_reduce() -> Iterator[Sample]:
    for reduce, include in itertools.product(("sum", "prod", "mean", "amax", "amin"), (True, False)):
        how = {"include_self": include}
        yield s("scatter_reduce.two", f(5, 4), 0, i(5, 6, 4), f(6, 4), reduce, **how)
        yield s("scatter_reduce.two", f(3, 5), -1, i(5, 3, 7), f(3, 7), reduce, **how)
        yield s("scatter_reduce.two", f(2, 5), 1, i(5, 2, 4), f(2, 7), reduce, **how)
        yield s("scatter_reduce.two", f(5), 0, i(5, 8), f(8), reduce, **how)
    yield s("scatter_reduce.two", i(9, 5), 0, i(5, 8), i(9, 8), "amax")
    yield s("scatter_reduce.two", f(5), 0, i(5, 2, 0), f(2, 0), "sum")
    yield s("gather", f(5), 0, i(5, 2, 0))
    yield s("gather", f(), 0, torch.tensor([0]))
    yield s("gather", f(3, 5), 1, i(5, 0, 2))
    yield s("scatter.src", f(5), 0, i(5, 2, 0), f(2, 0))
    wild = torch.tensor(
        [math.inf, 1, math.nan, -math.inf, 2], dtype=torch.float64
    )  # counted once, not times 0 elsewhere
    yield s("scatter_add", wild, 0, i(5, 7), f(7))
    yield s("index_add", wild, 0, i(5, 7), f(7))
    yield s("index_put", wild, [i(5, 7)], f(7), True)
    yield s("scatter_reduce.two", f(), 0, torch.tensor(0), f(), "sum")
    for reduce in ("add", "multiply"):
        yield s("scatter.reduce", f(5, 4), 0, i(5, 6, 4), f(6, 4), reduce=reduce)
        yield s("scatter.reduce", f(3, 5), 1, i(5, 3, 2), f(3, 4), reduce=reduce)
        yield s("scatter.value_reduce", f(3, 5), 1, i(5, 3, 6), 1.5, reduce=reduce)


def index_rows() -> Iterator[Sample]:
    for reduce, include in itertools.product(("prod", "mean", "amax", "amin"), (True, False)):
        yield s("index_reduce", f(5, 3), 0, i(5, 7), f(7, 3), reduce, include_self=include)
        yield s("index_reduce", f(3, 6), -1, i(6, 4), f(3, 4), reduce, include_self=include)
    unique = torch.randperm(5)[:4]
    yield s("index_copy", f(5, 3), 0, unique, f(4, 3))
    yield s("index_copy", f(3, 5), -1, unique, f(3, 4))
    yield s("index_copy", f(5), 0, torch.tensor(3), f())
    yield s("index_copy", f(), 0, torch.tensor(0), f())
    for name, value in (("index_fill.int_Scalar", 1.5), ("index_fill.int_Tensor", f())):
        yield s(name, f(5, 3), 0, unique, value)
        yield s(name, f(3, 5), -1, unique - 5, value)
        yield s(name, f(5), 0, torch.tensor(3), value)
        yield s(name, f(), 0, torch.tensor(0), value)


def masked() -> Iterator[Sample]:
    for adds in (False, True):
        mask = torch.tensor([True, False, True, True, False])
        yield s("index_put", f(5, 3), [mask], f(), adds)
        yield s("index_put", f(5, 3), [mask], f(1, 1), adds)
        yield s("index_put", f(5, 3), [mask], f(3), adds)
        yield s("index_put", f(5, 3), [mask], f(3, 3), adds)
        yield s("index_put", f(5, 3), [mask], f(1, 3), adds)
        yield s("index_put", f(2, 5, 3), [None, mask], f(), adds)
        yield s("index_put", f(2, 5, 3), [None, mask], f(2, 3, 3), adds)
        yield s("index_put", f(5, 4), [mask, torch.tensor([0, 3, 1])], f(3), adds)
        yield s("index_put", f(4, 3, 5), [f(4, 3) > 0], f(), adds)
        yield s("index_put", f(4, 3, 5), [f(4, 3) > 0], f(5), adds)
        yield s("_index_put_impl", f(5, 3), [torch.tensor([0, 3, 1])], f(3, 3), adds)
    yield s("masked_scatter", f(3, 4), f(3, 4) > 0, f(12))
    yield s("masked_scatter_backward", f(3, 4), f(3, 4) > 0, [12])


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (scatter_reduce, index_rows, masked)
