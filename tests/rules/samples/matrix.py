"""Samples for `shardlib.rules.nn_ops.matrix`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, s


def c(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128)


def distances() -> Iterator[Sample]:
    for p in (2.0, 1.0, 3.0, float("inf")):
        for x, y in ((f(5, 3), f(4, 3)), (f(2, 3, 4), f(2, 5, 4)), (f(3, 1, 2, 4), f(2, 3, 4))):
            yield s("_cdist_forward", x, y, p, None)
    for p in (2.0, 1.0, 3.0):
        x, y = f(2, 5, 3), f(2, 4, 3)
        yield s("_cdist_backward", f(2, 5, 4), x, y, p, torch.cdist(x, y, p))
    yield s("_euclidean_dist", f(5, 3), f(4, 3))


def complex_numbers() -> Iterator[Sample]:
    for name in ("view_as_real", "view_as_real_copy"):
        yield s(name, c(3, 5))
    for name in ("view_as_complex", "view_as_complex_copy"):
        yield s(name, f(5, 3, 2))
    for name in ("_conj", "_conj_copy", "conj_physical", "_neg_view", "_neg_view_copy", "angle", "sgn", "abs"):
        yield s(name, c(5, 3))
    yield s("complex", f(5, 3), f(3))
    yield s("polar", f(5, 3), f(5, 1))
    for name, args in (("sum.dim_IntList", ([1],)), ("mean.dim", ([1],)), ("prod.dim_int", (1,)), ("cumsum", (1,))):
        yield s(name, c(3, 5), *args)
    for name in ("sum", "mean"):
        yield s(name, c(3, 5))
    yield s("mm", c(3, 5), c(5, 4))
    yield s("addmm", c(4), c(3, 5), c(5, 4), beta=0.25)
    yield s("mul.Tensor", c(3, 5), f(5))
    yield s("add.Tensor", f(3, 1), c(3, 5))
    yield s("linalg_vector_norm", c(3, 5), 2, [1])
    yield s("_to_copy", f(3, 4), dtype=torch.complex128)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (distances, complex_numbers)
