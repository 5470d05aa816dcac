"""Matrix products on one device: torch's, or oneDNN's where it is faster.

torch multiplies float32 matrices by MKL, which does not use AVX-512 on CPUs of other makers than Intel: on an AMD EPYC,
oneDNN takes less than half as long (`python -m tests.validation.benchmarks.matmul`). Matrices that are small, thin or
of another dtype stay with torch. `SHARDLIB_OPS=matmul=torch`, or torch's own switch for oneDNN, leaves all of them
there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from shardlib.core.torch_internals.torch_private import ONEDNN_LINEAR, has_onednn, late
from shardlib.ops.backend_choice import Choice, requested_backend, unavailable_error

_backends: Any = torch.backends  # whose functions have no types
MIN_PRODUCTS = 128**3  # multiplications; below, oneDNN's overhead per call is longer
MIN_SIZE = 32  # of m, k and n; below, memory bandwidth decides
MIN_SIZE_COPIED = 128  # the same, if an operand is copied first


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies two matrices, `[m, k]` and `[k, n]`, as torch.mm."""
    return linear(a, b, None) if _is_faster(a, b) else torch.mm(a, b)


def addmm(x: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    """Adds a row, or a matrix, to a product, as torch.addmm."""
    if not factors and x.dim() == 1 and x.dtype == a.dtype and len(x) == b.shape[1] and _is_faster(a, b):
        return linear(a, b, x.contiguous())  # oneDNN ignores a row's stride
    return torch.addmm(x, a, b, **factors)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies batches of matrices, `[i, m, k]` and `[i, k, n]`, as torch.bmm."""
    if not len(a) or not _is_faster(a[0], b[0]):
        return torch.bmm(a, b)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for target, x, y in zip(out, a, b, strict=True):
        target.copy_(linear(x, y, None))
    return out


FORMS = {torch.ops.aten.mm.default: mm, torch.ops.aten.addmm.default: addmm, torch.ops.aten.bmm.default: bmm}


def choose() -> Choice:
    """Chooses the backend of large float32 matrices on CPUs; torch multiplies all others.

    Raises `ShardingError` if `SHARDLIB_OPS` asks for oneDNN and torch has none.
    """
    want = requested_backend("matmul")
    fault = "" if _backends.mkldnn.is_available() and has_onednn() else "oneDNN is not built in, or switched off"
    if want == "onednn" and fault:
        raise unavailable_error("matmul", want, fault)
    if want:
        return Choice(want, "", "SHARDLIB_OPS asks for it")
    if fault:
        return Choice("torch", "", fault)
    if _has_wide_vectors():
        return Choice("onednn", "", "MKL has no kernels with vectors as wide as this CPU's")
    return Choice("torch", "", "MKL's kernels are as fast on this CPU, or nothing is known of it")


def _is_faster(a: Tensor, b: Tensor) -> bool:
    """True if oneDNN is to multiply two matrices."""
    (m, k), n = a.shape, b.shape[1]
    return (
        m * k * n >= MIN_PRODUCTS
        and min(m, k, n) >= (MIN_SIZE if _is_dense(a) and _is_dense(b) else MIN_SIZE_COPIED)
        and a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and choose().backend == "onednn"
    )


@functools.cache
def _has_wide_vectors() -> bool:
    """True if this CPU has AVX-512 and is not Intel's: MKL uses AVX-512 on Intel's CPUs only."""
    if not _backends.mkl.is_available() or _backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def linear(a: Tensor, b: Tensor, row: Tensor | None) -> Tensor:
    """Computes oneDNN's product; adds a contiguous row, if there is one."""
    out: Tensor = _onednn_op()(_make_dense(a), _make_dense(b).t(), row, "none", [], "")
    return out


def _make_dense(x: Tensor) -> Tensor:
    """Returns a matrix without gaps: with gaps oneDNN is a thousand times slower, with overlapping rows wrong."""
    if _is_dense(x):
        return x
    down, across = x.stride()
    return x.contiguous() if down >= across else x.t().contiguous().t()


def _is_dense(x: Tensor) -> bool:
    """True if the matrix is row-major or column-major without gaps."""
    m, n = x.shape
    return x.stride() in ((n, 1), (1, m))


@functools.cache
def _onednn_op() -> Any:
    return late(ONEDNN_LINEAR).default


def _flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Counts as torch does for mm; the second matrix is transposed."""
    return 2 * int(a[0] * a[1] * b[0])


if _backends.mkldnn.is_available() and late(ONEDNN_LINEAR) not in flop_registry:
    register_flop_formula(late(ONEDNN_LINEAR))(_flops)
