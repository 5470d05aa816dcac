"""Matrix factorizations and solvers: matrices stay whole, leading dims are a batch, columns to solve for are free.

Every matrix of a batch meets the same kernel whoever holds it, so what a factorization leaves open (signs, phases, the
order of equal eigenvalues) comes out as on one device. Rows of a tall matrix may be cut where all of that is known: its
triangular factor is that of the triangular factors of its pieces (Demmel et al. 2012, arXiv:0808.2664).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.lstsq import lstsq
from shardlib.rules.iteration_space import arg, numel, result_shape
from shardlib.rules.local_forms.helpers import gathered, place, shares
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn

aten = torch.ops.aten


def _cubic(call: Call, _: int) -> int:
    """As many operations for an element of a matrix as the largest square matrix in any has rows."""
    matrices = [m.shape for m in call.operands if len(m.shape) > 1]
    return max((min(shape[-2:]) for shape in matrices), default=1) * sum(map(numel, matrices))


def _matrices(text: str) -> RuleFn:
    return pattern(text, flops=_cubic)


def _parts(
    text: str,
    flops: Callable[[Call, int], int] | None = _cubic,
    form: Callable[..., Any] | None = None,
) -> Callable[[Call], Rule]:
    """A pattern of which the call may leave out results: these are empty vectors."""
    operands, _, results = text.partition("->")
    results, _, notes = results.partition("|")
    terms = results.split(",")

    def rule(call: Call) -> Rule:
        given = ["_" if m is not None and m.shape == (0,) else t for t, m in zip(terms, call.results, strict=True)]
        return pattern(f"{operands} -> {', '.join(given)} | {notes}", flops=flops, form=form)(call)

    return rule


def _sided(matrix: str, linear: int) -> RuleFn:
    """A solver of `A X = B` (argument `left`), or of `X A = B`: linear in B, whose other dim is free."""
    left, right = (f"{matrix}, ... {x} -> ... {x} | {{{linear}}}" for x in ("_ k", "k _"))
    return lambda call: pattern(left if _is_left(call) else right, flops=_cubic)(call)


def _is_left(call: Call) -> bool:
    return bool(arg(call, "left"))


def _solve_ex(call: Call) -> Rule:
    """`(X, LU, pivots, info)`; what B has beyond A, columns and batch dims, the factorization of A does not see."""
    a, b = (m.shape for m in call.operands)
    side = "_" if len(b) == 1 or a[:-1] == b else "_ k" if _is_left(call) else "k _"
    columns = "k:none" if "k" in side else ""
    text = f"... _ _, ... {side} -> ... {side}, ... _ _, ... _, ... | ...:none {columns}"
    return pattern(text, flops=_cubic)(call)


# Tall matrices, cut in rows: small triangles meet, rows stay where they are.


def _qr(call: Call) -> Rule:
    rows, columns = call.operands[0].shape[-2:]
    if not rows >= 2 * columns > 0 or arg(call, "mode") == "complete":
        return _parts("... _ _ -> ... _ _, ... _ _")(call)
    return _parts("... r _ -> ... r _, ... _ _ | r:none r:local", form=_by_triangles)(call)


def _by_triangles(_: Local, x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """The QR decomposition of the pieces' triangles, with the first rows of the matrix as they are: the signs of what
    a decomposition by reflections makes depend on these, and on the length of what is below, in every column. Where
    columns depend on each other, the decomposition is not unique, and this is another one than that of one device."""
    n, sizes, own = x.shape[-1], shares("r"), place("r")
    firsts = [max(0, min(s, n - sum(sizes[:i]))) for i, s in enumerate(sizes)]
    counts = [first + min(s - first, n) for s, first in zip(sizes, firsts, strict=True)]
    first, begin = firsts[own], sum(counts[:own])
    top, rest = x.narrow(-2, 0, first), x.narrow(-2, first, x.shape[-2] - first)
    q, r = torch.linalg.qr(rest)
    stack = gathered(torch.cat([top, r], -2), "r", x.dim() - 2, sum(counts))
    mixed, triangle = torch.linalg.qr(stack, mode)
    if mode == "r":
        return mixed, triangle
    above, below = mixed.narrow(-2, begin, first), mixed.narrow(-2, begin + first, r.shape[-2])
    return torch.cat([above, q @ below], -2), triangle


def _svd(call: Call) -> Rule:
    rows, columns = call.operands[0].shape[-2:]
    if arg(call, "compute_uv") or not max(rows, columns) >= 2 * min(rows, columns) > 0:
        return _parts("... _ _ -> ... _ _, ... _, ... _ _")(call)
    long = "r _" if rows > columns else "_ r"
    return _parts(f"... {long} -> ... _ _, ... _, ... _ _ | r:none r:local", form=_of_triangles)(call)


def _of_triangles(local: Local, x: Tensor, *how: Any, **named: Any) -> tuple[Tensor, ...]:
    """The singular values of a matrix that is long in one dim are those of its pieces' triangles."""
    rows, columns = local.call.operands[0].shape[-2:]
    triangle = torch.linalg.qr(x if rows > columns else x.mT, "r")[1]
    total = sum(min(n, rows, columns) for n in shares("r"))
    stack = gathered(triangle, "r", x.dim() - 2, total)
    return tuple(aten._linalg_svd.default(stack, *how, **named))


def _least_squares(call: Call) -> Rule | None:
    """`(X, residuals, rank, singular values)`, of which the driver decides what there is."""
    a, b = (m.shape for m in call.operands)
    side, left = ("", "1") if len(b) == len(a) - 1 else ("_", "_")
    if a[-2] >= 2 * a[-1] > 0:
        text = f"... r _, ... r {side} -> ... _ {side}, ... {left}, ..., ... _ | r:none r:local"
        return _parts(text, form=_by_least_squares)(call)
    return _parts(f"... _ _, ... _ {side} -> ... _ {side}, ... {left}, ..., ... _")(call)


def _by_least_squares(local: Local, a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, ...]:
    """The least squares of the pieces' triangles, with what is left of B in each piece as one row more, which no X
    makes smaller. What counts as nothing, by the size of the whole, is said."""
    whole, n, dtype = local.call.operands[0].shape, a.shape[-1], a.dtype
    _, residuals, *_ = local.call.results
    left = residuals is not None and residuals.shape != (0,)
    total = sum(min(n, size) + left for size in shares("r"))
    single = b.dim() < a.dim()
    b = b.unsqueeze(-1) if single else b
    q, r = torch.linalg.qr(a)
    c = q.mH @ b
    piece = torch.cat([r, c], -1)
    if left:
        rest = torch.linalg.vector_norm(b - q @ c, dim=-2, keepdim=True).to(dtype)
        piece = torch.cat([piece, torch.cat([rest.new_zeros([*rest.shape[:-1], n]), rest], -1)], -2)
    stack = gathered(piece, "r", a.dim() - 2, total)
    rows, columns = stack.narrow(-1, 0, n), stack.narrow(-1, n, b.shape[-1])
    least = torch.finfo(dtype).eps * max(whole[-2:]) if rcond is None else rcond
    x, *others = lstsq(rows, columns, least, driver)
    return x.squeeze(-1) if single else x, *others


# For a determinant torch factorizes the transpose of a matrix that lies in memory row by row, and its gradient decides
# by the strides at hand which of the two it was given. Written out, that is settled while tracing, and by nothing else.


def _factorize(a: Tensor) -> tuple[Tensor, Tensor]:
    by_rows = a.is_contiguous() and not a.is_complex()
    lu, pivots, _ = torch.linalg.lu_factor_ex(a.mT if by_rows else a)
    return lu, pivots


def _permutation_sign(pivots: Tensor) -> Tensor:
    """1 or -1, by the number of interchanges of rows."""
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
    """The factors, and a check of its own: it sees all matrices of a batch, and stops all devices alike."""
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(x, upper=upper)
    aten._linalg_check_errors(info, "cholesky", is_matrix=x.dim() == 2)
    return factor


ROWS: dict[str, RuleFn | str] = {
    # Factorizations.
    "linalg_cholesky_ex": _matrices("... _ _ -> ... _ _, ..."),
    "cholesky_inverse": _matrices("... _ _ -> ... _ _"),
    "linalg_inv_ex": _matrices("... _ _ -> ... _ _, ..."),
    "linalg_lu": _parts("... _ _ -> ... _ _, ... _ _, ... _ _"),
    "linalg_lu_factor_ex": _matrices("... _ _ -> ... _ _, ... _, ..."),
    "lu_unpack": _parts("... _ _, ... _ -> ... _ _, ... _ _, ... _ _", flops=None),
    "linalg_ldl_factor_ex": _matrices("... _ _ -> ... _ _, ... _, ..."),
    "linalg_qr": _qr,
    "geqrf": _matrices("... _ _ -> ... _ _, ... _"),
    "linalg_householder_product": _matrices("... _ _, ... _ -> ... _ _"),
    "ormqr": _sided("... _ _, ... _", 2),
    # Spectra, and functions of a whole matrix.
    "linalg_eig": _matrices("... _ _ -> ... _, ... _ _"),
    **dict.fromkeys(["_linalg_eigvals", "linalg_eigvals"], _matrices("... _ _ -> ... _")),
    "_linalg_eigh": _parts("... _ _ -> ... _, ... _ _"),
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
    # An error names the matrix of the batch that failed, so every device looks at all of them.
    "_linalg_check_errors": pattern("... -> | ...:whole"),
    "linalg_cross": pattern(
        "[dim], [dim] -> [dim] | dim:whole {0} {1}", flops=lambda call, _: 3 * numel(result_shape(call))
    ),
    "linalg__powsum": "[dim] -> ... | dim:sum",
}

DECOMPOSED: dict[str, Any] = {
    "cholesky": _cholesky,
    "linalg_lstsq": _lstsq,
    "_linalg_det": _det,
    "_linalg_slogdet": _slogdet,
}
