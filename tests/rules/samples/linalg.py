"""Samples for `shardlib.rules.nn_ops.linalg`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, s

aten = torch.ops.aten


def c(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128)


def regular(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Square matrices that are far from singular."""
    return torch.randn(shape, dtype=dtype) + 4 * torch.eye(shape[-1], dtype=dtype)


def positive(*shape: int) -> Tensor:
    x = f(*shape)
    return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)


BATCHES: tuple[tuple[int, ...], ...] = ((), (5,), (2, 3))


def factorizations() -> Iterator[Sample]:
    for batch in BATCHES:
        a, b, tall, wide = regular(*batch, 3, 3), positive(*batch, 3, 3), f(*batch, 4, 2), f(*batch, 2, 4)
        yield s("linalg_cholesky_ex", b)
        yield s("linalg_cholesky_ex", b, upper=True)
        yield s("cholesky_inverse", torch.linalg.cholesky(b))
        yield s("linalg_inv_ex", a)
        yield s("linalg_ldl_factor_ex", b)
        for pivot in (True, False):
            if pivot:
                yield s("linalg_lu", tall)
            yield s("linalg_lu_factor_ex", a)
        lu, pivots = torch.linalg.lu_factor(a)
        for unpack in ((True, True), (True, False), (False, True)):
            yield s("lu_unpack", lu, pivots, *unpack)
        for mode in ("reduced", "complete", "r"):
            yield s("linalg_qr", tall, mode)
            yield s("linalg_qr", wide, mode)
            yield s("linalg_qr", f(*batch, 11, 3), mode)
            yield s("linalg_qr", c(*batch, 6, 3), mode)
        yield s("linalg_qr", torch.zeros(*batch, 8, 3))
        yield s("geqrf", tall)
        factor, tau = torch.geqrf(tall)
        yield s("linalg_householder_product", factor, tau)
        for left, transpose in ((True, False), (False, True)):
            yield s("ormqr", factor, tau, f(*batch, 4, 5) if left else f(*batch, 5, 4), left, transpose)


def spectra() -> Iterator[Sample]:
    for batch in BATCHES:
        a, b, tall = regular(*batch, 3, 3), positive(*batch, 3, 3), f(*batch, 4, 2)
        yield s("linalg_eig", a)
        yield s("_linalg_eigvals", a)
        yield s("linalg_eigvals", a)
        yield s("_linalg_eigh", b)
        yield s("_linalg_eigh", b, "U", False)
        yield s("_linalg_svd", tall)
        yield s("_linalg_svd", tall, True)
        yield s("_linalg_svd", tall, False, False)
    for long in (f(9, 3), f(2, 3, 8), f(2, 7, 3)):
        yield s("_linalg_svd", long, False, False)
        yield s("linalg_pinv.atol_rtol_tensor", tall)
        yield s("linalg_pinv.atol_rtol_tensor", tall, rtol=f(*batch).abs() * 0.1)
        yield s("linalg_pinv.atol_rtol_tensor", b, atol=f(), hermitian=True)
        yield s("linalg_matrix_exp", a)
    yield s("_linalg_eigh", c(5, 3, 3) + c(5, 3, 3).mH)
    yield s("linalg_eig", regular(3, 2, 2, dtype=torch.complex128))
    yield s("linalg__powsum", f(3, 5), 2, [1])
    yield s("linalg__powsum", f(3, 5), 3)


def solvers() -> Iterator[Sample]:
    for batch in BATCHES:
        a, b, rows, columns = regular(*batch, 3, 3), positive(*batch, 3, 3), f(*batch, 5, 3), f(*batch, 3, 5)
        factor = torch.linalg.cholesky(b)
        lu, pivots = torch.linalg.lu_factor(a)
        for left, right in ((True, columns), (False, rows)):
            yield s("_linalg_solve_ex", a, right, left=left)
            yield s("linalg_solve_triangular", a, right, upper=left, left=left, unitriangular=not left)
            yield s("linalg_lu_solve", lu, pivots, right, left=left, adjoint=not left)
        yield s("_linalg_solve_ex", a, f(*batch, 3))
        yield s("linalg_ldl_solve", *torch.linalg.ldl_factor(b), columns)
        yield s("triangular_solve", columns, a)
        yield s("cholesky_solve", columns, factor)
        yield s("_cholesky_solve_helper", columns, factor, False)
        yield s("shardlib::lstsq", f(*batch, 4, 2), f(*batch, 4, 3), None, "gelsy")
        for driver in ("gels", "gelsd", "gelss"):
            yield s("shardlib::lstsq", f(*batch, 4, 2), f(*batch, 4), None, driver)
            yield s("shardlib::lstsq", f(*batch, 7, 2), f(*batch, 7, 3), None, driver)
            yield s("shardlib::lstsq", f(*batch, 2, 4), f(*batch, 2, 5), None, driver)
    a, right = regular(3, 1, 2, 2), f(5, 2, 4)
    lu, pivots = torch.linalg.lu_factor(a)
    yield s("_linalg_solve_ex", a, right)
    yield s("linalg_solve_triangular", a, right, upper=True)
    # By rows: torch's kernel reads the stride of the last batch dim, even of size 1, where matrices lie by columns.
    yield s("linalg_lu_solve", lu.contiguous(), pivots, right)
    yield s("cholesky_solve", right, torch.linalg.cholesky(positive(3, 1, 2, 2)))
    yield s("triangular_solve", right, a)
    yield s("_linalg_check_errors", torch.zeros(5, dtype=torch.int32), "linalg.inv", is_matrix=False)
    for shapes in (((5, 3), (5, 3)), ((2, 1, 3), (1, 4, 3)), ((3,), (3,))):
        yield s("linalg_cross", *(f(*shape) for shape in shapes))
    yield s("linalg_cross", f(3, 5), f(3, 1), dim=0)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (factorizations, spectra, solvers)
