"""Products of matrices on pieces: torch's, or oneDNN's where these are faster.

torch's products of float32 matrices are MKL's, which leave the widest vectors of CPUs that are not Intel's alone: on an
AMD EPYC with AVX-512, oneDNN takes less than half as long (`python -m tests.validation.benchmarks.matmul`). What is
small, thin or of another dtype stays with torch. `SHARDLIB_OPS=matmul=torch`, or torch's own switch, leaves all of it
there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from shardlib.core.torch_private import ONEDNN_LINEAR, has_onednn, late
from shardlib.ops.backend_choice import Choice, unavailable, wanted

_backends: Any = torch.backends  # whose functions have no types
SMALLEST = 128**3  # multiplications, below which what oneDNN does once a call takes longer
THINNEST = 32  # of the three sizes: products with vectors read memory, and that is all
THINNEST_COPIED = 128  # where an operand is copied first


def mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, `[m, k]` and `[k, n]`, as torch.mm.

    Example:
        >>> a, b = torch.rand(200, 128), torch.rand(128, 144)
        >>> torch.allclose(mm(a, b), a @ b)
        True
    """
    return linear(a, b, None) if _is_faster(a, b) else torch.mm(a, b)


def addmm(x: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    """A row, or a matrix, and a product, as torch.addmm."""
    if not factors and x.dim() == 1 and x.dtype == a.dtype and len(x) == b.shape[1] and _is_faster(a, b):
        return linear(a, b, x.contiguous())  # it takes no notice of a row's stride
    return torch.addmm(x, a, b, **factors)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Products matrix by matrix, `[i, m, k]` and `[i, k, n]`, as torch.bmm."""
    if not len(a) or not _is_faster(a[0], b[0]):
        return torch.bmm(a, b)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for into, x, y in zip(out, a, b, strict=True):
        into.copy_(linear(x, y, None))
    return out


FORMS = {torch.ops.aten.mm.default: mm, torch.ops.aten.addmm.default: addmm, torch.ops.aten.bmm.default: bmm}


def choose() -> Choice:
    """Whose products of large float32 matrices are taken on CPUs, and why; all others are torch's.

    Raises `ShardingError` if `SHARDLIB_OPS` asks for oneDNN's where there are none.
    """
    want = wanted("matmul")
    fault = "" if _backends.mkldnn.is_available() and has_onednn() else "oneDNN is not built in, or switched off"
    if want == "onednn" and fault:
        raise unavailable("matmul", want, fault)
    if want:
        return Choice(want, "", "SHARDLIB_OPS asks for it")
    if fault:
        return Choice("torch", "", fault)
    if _has_wide_vectors():
        return Choice("onednn", "", "MKL has no kernels with vectors as wide as this CPU's")
    return Choice("torch", "", "MKL's kernels are as fast on this CPU, or nothing is known of it")


def _is_faster(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN multiplies two matrices."""
    (m, k), n = a.shape, b.shape[1]
    return (
        m * k * n >= SMALLEST
        and min(m, k, n) >= (THINNEST if _is_dense(a) and _is_dense(b) else THINNEST_COPIED)
        and a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and choose().backend == "onednn"
    )


@functools.cache
def _has_wide_vectors() -> bool:
    """Whether it has AVX-512 and is no CPU of Intel's, for which MKL has such kernels."""
    if not _backends.mkl.is_available() or _backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def linear(a: Tensor, b: Tensor, row: Tensor | None) -> Tensor:
    """oneDNN's product, with a row (in order) added or not."""
    out: Tensor = _op()(_dense(a), _dense(b).t(), row, "none", [], "")
    return out


def _dense(x: Tensor) -> Tensor:
    """A matrix without gaps: of others oneDNN takes a thousand times as long, or reads wrongly where rows overlap."""
    if _is_dense(x):
        return x
    down, across = x.stride()
    return x.contiguous() if down >= across else x.t().contiguous().t()


def _is_dense(x: Tensor) -> bool:
    """Whether it lies in rows or in columns, without gaps."""
    m, n = x.shape
    return x.stride() in ((n, 1), (1, m))


@functools.cache
def _op() -> Any:
    return late(ONEDNN_LINEAR).default


def _flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """As torch counts mm's; the second matrix is turned."""
    return 2 * int(a[0] * a[1] * b[0])


if _backends.mkldnn.is_available() and late(ONEDNN_LINEAR) not in flop_registry:
    register_flop_formula(late(ONEDNN_LINEAR))(_flops)
