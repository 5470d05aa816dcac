"""Samples for `shardlib.rules.nn_ops.batchnorm`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, pos, s

aten = torch.ops.aten


def batch_norm() -> Iterator[Sample]:
    for shape, weights in itertools.product(((5, 3, 2), (3, 2, 4, 2), (5, 4)), (True, False)):
        x, c = f(*shape), shape[1]
        w, b, mean, var = (f(c), f(c), f(c), pos(c)) if weights else (None, None, f(c), pos(c))
        for training in (True, False):
            yield s("_native_batch_norm_legit_functional", x, w, b, mean, var, training, 0.3, 1e-5)
            saved = aten.native_batch_norm(x, w, b, mean.clone(), var.clone(), training, 0.3, 1e-5)[1:]
            for mask in ([True, weights, weights], [True, False, False]):
                back = (f(*shape), x, w, mean, var, *saved, training, 1e-5, mask)
                yield s("native_batch_norm_backward", *back)
                if weights:
                    yield s("batch_norm_backward", *back, torch.empty(0, dtype=torch.uint8))
        yield s("_native_batch_norm_legit.no_stats", x, w, b, True, 0.1, 1e-5)
        yield s("_native_batch_norm_legit_no_training", x, w, b, mean, var, 0.1, 1e-5)
        yield s("_batch_norm_with_update_functional", x, w, b, mean, var, 0.3, 1e-5)
    h, four = f(3, 4, 5).bfloat16(), [pos(4) for _ in range(4)]
    yield s("_native_batch_norm_legit_functional", h, *(p.bfloat16() for p in four), True, 0.1, 1e-5)
    yield s("_native_batch_norm_legit_functional", h, *(p.float() for p in four), True, 0.1, 1e-5)


def group_norm() -> Iterator[Sample]:
    calls = (((3, 6, 5), 3, True), ((2, 4, 3, 2), 2, True), ((5, 4), 1, False), ((3, 3, 2), 3, True))
    for shape, groups, weights in calls:
        x, c = f(*shape), shape[1]
        w, b = (f(c), f(c)) if weights else (None, None)
        sizes = (shape[0], c, math.prod(shape[2:]), groups)
        yield s("native_group_norm", x, w, b, *sizes, 1e-5)
        _, mean, rstd = aten.native_group_norm(x, w, b, *sizes, 1e-5)
        for mask in ([True, weights, weights], [weights, False, weights]):
            yield s("native_group_norm_backward", f(*shape), x, mean, rstd, w, *sizes, mask)
    h, w = f(3, 4, 5).bfloat16(), f(4)
    yield s("native_group_norm", h, w.bfloat16(), w.bfloat16(), 3, 4, 5, 2, 1e-5)
    yield s("native_group_norm", h, w.float(), w.float(), 3, 4, 5, 2, 1e-5)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (batch_norm, group_norm)
