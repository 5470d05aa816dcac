"""Matrix factorizations and solvers: matrices stay whole, leading dims are a batch, columns to solve for are free.

All devices run the same kernel on a matrix, so the choices of a factorization (signs, phases, the order of equal
eigenvalues) are those of one device. Rows of a tall matrix may be sharded where the op leaves no such choice: its
triangular factor equals the factor of its shards' stacked triangular factors (Demmel et al. 2012, arXiv:0808.2664).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.lstsq import lstsq
from shardlib.rules.iteration_space import arg, result_shape
from shardlib.rules.local_forms.helpers import gather_shards, shard_index, shard_sizes
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten


def _cubic(call: Call, _: int) -> int:
    """For each element of a matrix, as many operations as the largest square matrix in the operands has rows."""
    matrices = [m.shape for m in call.operands if len(m.shape) > 1]
    return max((min(shape[-2:]) for shape in matrices), default=1) * sum(map(math.prod, matrices))


_matrices = partial(pattern, flops=_cubic)


def _optional_results(
    text: str,
    flops: Callable[[Call, int], int] | None = _cubic,
    form: Callable[..., Any] | None = None,
) -> Callable[[Call], Rule]:
    """Returns a pattern whose call may leave out results, which then are empty vectors."""
    operands, _, results = text.partition("->")
    results, _, notes = results.partition("|")
    terms = results.split(",")

    def rule(call: Call) -> Rule:
        present = ["_" if m is not None and m.shape == (0,) else t for t, m in zip(terms, call.results, strict=True)]
        return pattern(f"{operands} -> {', '.join(present)} | {notes}", flops=flops, form=form)(call)

    return rule


def _sided(matrix: str, linear: int) -> RuleFn:
    """Returns a solver of `A X = B` (argument `left`), or of `X A = B`: linear in B, whose other dim is free."""
    left, right = (f"{matrix}, ... {x} -> ... {x} | {{{linear}}}" for x in ("_ k", "k _"))
    return lambda call: pattern(left if _is_left(call) else right, flops=_cubic)(call)


def _is_left(call: Call) -> bool:
    return bool(arg(call, "left"))


def _solve_ex(call: Call) -> Rule:
    """`(X, LU, pivots, info)`. The factorization of A does not depend on the columns and batch dims of B."""
    a, b = (m.shape for m in call.operands)
    side = "_" if len(b) == 1 or a[:-1] == b else "_ k" if _is_left(call) else "k _"
    columns = "k:none" if "k" in side else ""
    text = f"... _ _, ... {side} -> ... {side}, ... _ _, ... _, ... | ...:none {columns}"
    return pattern(text, flops=_cubic)(call)


# Tall matrices with sharded rows: the devices exchange small triangles.


def _qr(call: Call) -> Rule:
    rows, columns = call.operands[0].shape[-2:]
    if not rows >= 2 * columns > 0 or arg(call, "mode") == "complete":
        return _optional_results("... _ _ -> ... _ _, ... _ _")(call)
    return _optional_results("... r _ -> ... r _, ... _ _ | r:none r:local", form=_by_triangles)(call)


def _by_triangles(_: LocalBuilder, x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Returns the QR decomposition of the shards' triangles below the unchanged first rows of the matrix.

    The signs of a decomposition by reflections depend on these rows, and on the norm of the column below them. If the
    columns are linearly dependent, the decomposition is not unique, and this one differs from one device's.
    """
    n, sizes, own = x.shape[-1], shard_sizes("r"), shard_index("r")
    firsts = [max(0, min(s, n - sum(sizes[:i]))) for i, s in enumerate(sizes)]
    counts = [first + min(s - first, n) for s, first in zip(sizes, firsts, strict=True)]
    first, begin = firsts[own], sum(counts[:own])
    top, rest = x.narrow(-2, 0, first), x.narrow(-2, first, x.shape[-2] - first)
    q, r = torch.linalg.qr(rest)
    stack = gather_shards(torch.cat([top, r], -2), "r", x.dim() - 2, sum(counts))
    mixed, triangle = torch.linalg.qr(stack, mode)
    if mode == "r":
        return mixed, triangle
    above, below = mixed.narrow(-2, begin, first), mixed.narrow(-2, begin + first, r.shape[-2])
    return torch.cat([above, q @ below], -2), triangle


def _svd(call: Call) -> Rule:
    rows, columns = call.operands[0].shape[-2:]
    if arg(call, "compute_uv") or not max(rows, columns) >= 2 * min(rows, columns) > 0:
        return _optional_results("... _ _ -> ... _ _, ... _, ... _ _")(call)
    long = "r _" if rows > columns else "_ r"
    return _optional_results(f"... {long} -> ... _ _, ... _, ... _ _ | r:none r:local", form=_of_triangles)(call)


def _of_triangles(local: LocalBuilder, x: Tensor, *args: Any, **named: Any) -> tuple[Tensor, ...]:
    """The singular values of a long matrix are those of the stacked triangles of its shards."""
    rows, columns = local.call.operands[0].shape[-2:]
    triangle = torch.linalg.qr(x if rows > columns else x.mT, "r")[1]
    total = sum(min(n, rows, columns) for n in shard_sizes("r"))
    stack = gather_shards(triangle, "r", x.dim() - 2, total)
    return tuple(aten._linalg_svd.default(stack, *args, **named))


def _least_squares(call: Call) -> Rule | None:
    """`(X, residuals, rank, singular values)`; the driver decides which of these are empty."""
    a, b = (m.shape for m in call.operands)
    side, left = ("", "1") if len(b) == len(a) - 1 else ("_", "_")
    if a[-2] >= 2 * a[-1] > 0:
        text = f"... r _, ... r {side} -> ... _ {side}, ... {left}, ..., ... _ | r:none r:local"
        return _optional_results(text, form=_by_least_squares)(call)
    return _optional_results(f"... _ _, ... _ {side} -> ... _ {side}, ... {left}, ..., ... _")(call)


def _by_least_squares(
    local: LocalBuilder, a: Tensor, b: Tensor, rcond: float | None, driver: str
) -> tuple[Tensor, ...]:
    """Returns the least squares of the shards' triangles.

    The residual of B in each shard, which no X reduces, is one more row. The cutoff for singular values depends on the
    size of the whole matrix.
    """
    whole, n, dtype = local.call.operands[0].shape, a.shape[-1], a.dtype
    _, residuals, *_ = local.call.results
    left = residuals is not None and residuals.shape != (0,)
    total = sum(min(n, size) + left for size in shard_sizes("r"))
    single = b.dim() < a.dim()
    b = b.unsqueeze(-1) if single else b
    q, r = torch.linalg.qr(a)
    c = q.mH @ b
    piece = torch.cat([r, c], -1)
    if left:
        rest = torch.linalg.vector_norm(b - q @ c, dim=-2, keepdim=True).to(dtype)
        piece = torch.cat([piece, torch.cat([rest.new_zeros([*rest.shape[:-1], n]), rest], -1)], -2)
    stack = gather_shards(piece, "r", a.dim() - 2, total)
    rows, columns = stack.narrow(-1, 0, n), stack.narrow(-1, n, b.shape[-1])
    least = torch.finfo(dtype).eps * max(whole[-2:]) if rcond is None else rcond
    x, *others = lstsq(rows, columns, least, driver)
    return x.squeeze(-1) if single else x, *others


# For a determinant torch factorizes the transpose of a row-major matrix, and its gradient tells from the strides which
# of the two it gets. This form makes the choice while tracing.


def _factorize(a: Tensor) -> tuple[Tensor, Tensor]:
    by_rows = a.is_contiguous() and not a.is_complex()
    lu, pivots, _ = torch.linalg.lu_factor_ex(a.mT if by_rows else a)
    return lu, pivots


def _permutation_sign(pivots: Tensor) -> Tensor:
    """Returns 1 or -1, the parity of the interchanges of rows."""
    rows = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    odd = (pivots != rows).sum(-1).remainder(2)
    return odd.mul(-2).add(1)


def _det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots = _factorize(a)
    return _permutation_sign(pivots) * lu.diagonal(0, -2, -1).prod(-1), lu, pivots


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots = _factorize(a)
    u = lu.diagonal(0, -2, -1)
    return _permutation_sign(pivots) * u.sgn().prod(-1), u.abs().log().sum(-1), lu, pivots


def _lstsq(a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    return lstsq(a, b, rcond, driver or ("gelsy" if a.device.type == "cpu" else "gels"))


def _cholesky(x: Tensor, upper: bool = False) -> Tensor:
    """Returns the factors, and a check that sees all matrices of a batch, so that it stops all devices."""
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(x, upper=upper)
    aten._linalg_check_errors(info, "cholesky", is_matrix=x.dim() == 2)
    return factor


ROWS: dict[str, RuleFn | str] = {
    # Factorizations.
    "linalg_cholesky_ex": _matrices("... _ _ -> ... _ _, ..."),
    "cholesky_inverse": _matrices("... _ _ -> ... _ _"),
    "linalg_inv_ex": _matrices("... _ _ -> ... _ _, ..."),
    "linalg_lu": _optional_results("... _ _ -> ... _ _, ... _ _, ... _ _"),
    "linalg_lu_factor_ex": _matrices("... _ _ -> ... _ _, ... _, ..."),
    "lu_unpack": _optional_results("... _ _, ... _ -> ... _ _, ... _ _, ... _ _", flops=None),
    "linalg_ldl_factor_ex": _matrices("... _ _ -> ... _ _, ... _, ..."),
    "linalg_qr": _qr,
    "geqrf": _matrices("... _ _ -> ... _ _, ... _"),
    "linalg_householder_product": _matrices("... _ _, ... _ -> ... _ _"),
    "ormqr": _sided("... _ _, ... _", 2),
    # Spectra, and functions of a whole matrix.
    "linalg_eig": _matrices("... _ _ -> ... _, ... _ _"),
    **dict.fromkeys(["_linalg_eigvals", "linalg_eigvals"], _matrices("... _ _ -> ... _")),
    "_linalg_eigh": _optional_results("... _ _ -> ... _, ... _ _"),
    "_linalg_svd": _svd,
    "linalg_pinv.atol_rtol_tensor": _matrices("... _ _, ..., ... -> ... _ _"),
    "linalg_matrix_exp": _matrices("... _ _ -> ... _ _"),
    # Solvers.
    "_linalg_solve_ex": _solve_ex,
    "linalg_solve_triangular": _sided("... _ _", 1),
    "linalg_lu_solve": _sided("... _ _, ... _", 2),
    "linalg_ldl_solve": _matrices("... _ _, ... _, ... _ k -> ... _ k | {2}"),
    "triangular_solve": _matrices("... _ k, ... _ _ -> ... _ k, ... _ _ | k:none"),
    **dict.fromkeys(["cholesky_solve", "_cholesky_solve_helper"], _matrices("... _ k, ... _ _ -> ... _ k | {0}")),
    "shardlib::lstsq": _least_squares,
    # The error names the matrix of the batch that failed, so each device checks all of them.
    "_linalg_check_errors": pattern("... -> | ...:whole"),
    "linalg_cross": pattern(
        "[dim], [dim] -> [dim] | dim:whole {0} {1}", flops=lambda call, _: 3 * math.prod(result_shape(call))
    ),
    "linalg__powsum": "[dim] -> ... | dim:sum",
}

DECOMPOSED: dict[str, Any] = {
    "cholesky": _cholesky,
    "linalg_lstsq": _lstsq,
    "_linalg_det": _det,
    "_linalg_slogdet": _slogdet,
}
