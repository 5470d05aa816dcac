"""Samples for `shardlib.rules.tensor_ops.counting` and `shardlib.rules.tensor_ops.reduction`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, i, s


def counting() -> Iterator[Sample]:
    yield s("count_nonzero", i(2, 3, 5))
    yield s("count_nonzero", i(2, 3, 5), 1)
    yield s("count_nonzero.dim_IntList", i(2, 2, 3, 4), [0, -1])
    rows = f(4, 7).sort().values
    for out_int32, right in ((False, False), (True, True)):
        how = {"out_int32": out_int32, "right": right}
        yield s("searchsorted.Tensor", rows, f(4, 3), **how)
        yield s("searchsorted.Tensor", rows[0], f(3, 4), **how)
        yield s("searchsorted.Tensor", rows[0], rows[0, :5].clone(), **how)
        yield s("searchsorted.Tensor", rows[0], f(), **how)
        yield s("searchsorted.Scalar", rows[0], 0.25, **how)
        yield s("bucketize.Tensor", f(3, 4), rows[0], **how)
        yield s("bucketize.Scalar", 0.25, rows[0], **how)
    yield s("searchsorted.Tensor", rows.t().contiguous().sort().values, f(7, 3), side="right")
    mixed = f(4, 5)
    yield s("searchsorted.Tensor", mixed, f(4, 3), sorter=mixed.argsort())
    yield s("searchsorted.Tensor", mixed[0], f(4, 3), sorter=mixed[0].argsort())
    for invert in (False, True):
        yield s("isin.Tensor_Tensor", i(9, 3, 4), i(9, 5), invert=invert)
        yield s("isin.Tensor_Tensor", i(9, 5), i(9, 2, 3), invert=invert)
        yield s("isin.Tensor_Scalar", i(3, 3, 4), 1, invert=invert)
        yield s("isin.Scalar_Tensor", 1, i(3, 3, 4), invert=invert)
    yield s("histc", f(7), 4, -1, 1)
    yield s("histc", f(3, 4), 5, -2, 2)
    yield s("histc", f(7), 4)
    for weight, density in ((None, False), (f(3, 4).abs(), False), (None, True)):
        yield s("histogram.bin_ct", f(3, 4), 5, range=[-1.0, 1.0], weight=weight, density=density)
        yield s("histogram.bins_tensor", f(3, 4), torch.linspace(-1, 1, 4).double(), weight=weight, density=density)
    yield s("histogram.bin_ct", f(7), 4)
    yield s("_histogramdd_bin_edges", f(5, 2), [3, 4])
    yield s("_histogramdd_from_bin_cts", f(5, 2), [3, 4])
    edges = [torch.linspace(-1, 1, n).double() for n in (3, 4)]
    yield s("_histogramdd_from_bin_tensors", f(5, 2), edges)
    yield s("nonzero_static", i(2, 3, 4), size=5)
    yield s("nonzero_static", i(2, 3), size=4, fill_value=7)
    yield s("repeat_interleave.Tensor", torch.tensor([1, 0, 2, 2]), output_size=5)


def products() -> Iterator[Sample]:
    for x in (f(3, 5), i(3, 2, 6) + 1, f(3, 5) > -1, f(2, 5).half()):
        yield s("prod", x)
        yield s("prod.dim_int", x, 1)
        yield s("prod.dim_int", x, -2, True)
    yield s("prod", f(3, 5), dtype=torch.float32)
    yield s("prod.dim_int", i(4, 3, 5), 1, dtype=torch.float64)
    x = f(3, 5).masked_fill(f(3, 5) > 0.5, math.nan)
    yield s("nansum", x)
    yield s("nansum", x, [1], True)
    yield s("nansum", x, [0], dtype=torch.float32)
    yield s("nansum", i(9, 3, 5), [1])
    for name in ("_is_any_true", "_is_all_true"):
        yield s(name, f(3, 5) > 0)
        yield s(name, torch.full((5,), name == "_is_all_true"))
    yield s("hash_tensor", f(3, 5))
    yield s("hash_tensor", f(3, 5), [1])
    yield s("hash_tensor", f(2, 3, 4), [0], keepdim=True)


def vector_norms() -> Iterator[Sample]:
    for order in (0, 0.5, 1, 2, 3, -1, math.inf, -math.inf):
        yield s("linalg_vector_norm", f(3, 5), order)
        yield s("linalg_vector_norm", f(3, 5), order, [1])
        yield s("linalg_vector_norm", f(2, 3, 4), order, [0, -1], True)
        yield s("linalg_vector_norm", f(3, 5).float(), order, [0], dtype=torch.float64)
        yield s("linalg_vector_norm", torch.complex(f(3, 5), f(3, 5)), order, [1])
        yield s("linalg_vector_norm", f(3, 5).masked_fill(f(3, 5) > 1, math.nan), order, [1])
    yield s("linalg_vector_norm", f(3, 5).bfloat16(), 3, [1])
    yield s("linalg_vector_norm", f(3, 5).bfloat16(), math.inf, [1])


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (counting, products, vector_norms)
