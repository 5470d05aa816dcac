"""Matrices and complex numbers on a mesh: functions of them, their gradients, and the errors of single matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P
from shardlib.core.errors import ShardingError
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]
linalg = torch.linalg
Fn = Callable[[Tensor], Tensor]

REAL: dict[str, Fn] = {
    "det": linalg.det,
    "det of a transpose": lambda a: linalg.det(a.mT),
    "slogdet": lambda a: linalg.slogdet(a)[1],
    "inv": linalg.inv,
    "solve": lambda a: linalg.solve(a, a[..., :2] ** 3 + 1),
    "solve from the right": lambda a: linalg.solve(a, a[..., :2, :] ** 3 + 1, left=False),
    "a vector to solve for": lambda a: linalg.solve(a, a[..., 0] ** 3 + 1),
    "lstsq": lambda a: linalg.lstsq(a[..., :3], a[..., 3:]).solution,
    "cholesky": lambda a: torch.cholesky(a @ a.mT, upper=True),
    "qr": lambda a: linalg.qr(a)[1],
    "svdvals": linalg.svdvals,
    "matrix_exp": lambda a: linalg.matrix_exp(a / 4),
    "trace": lambda a: a[0].trace() + a[:, 1].trace(),
    "pdist": lambda a: torch.nn.functional.pdist(a[0]),
    "cdist": lambda a: torch.cdist(a[:2], a[1:3]),
    "dist": lambda a: torch.dist(a[0], a[1], 3),
    "block_diag": lambda a: torch.block_diag(a[0], a[0, 0], a[1, :2]),
    "rot90": lambda a: a.rot90(3, (0, 2)),
    "channel_shuffle": lambda a: torch.channel_shuffle(a[:, :4], 2),
    "pixel_shuffle": lambda a: torch.pixel_shuffle(a[:4], 2),
    "pixel_unshuffle": lambda a: torch.pixel_unshuffle(a[:, :4, :4], 2),
    "as_strided_scatter": lambda a: torch.as_strided_scatter(a, a[0, :2, :2], (2, 2), (1, 6), 2),
    "stft": lambda a: torch.stft(a.flatten(1), 6, 3, window=torch.hann_window(6), return_complex=True).abs(),
    "kron": lambda a: torch.kron(a[0], a[1]),
    "einsum": lambda a: torch.einsum("bij,bkj,bkl->bil", a, a, a),
}
COMPLEX: dict[str, Fn] = {
    "conj": lambda z: z.conj() * (2j),
    "adjoint": lambda z: z.mH @ z,
    "imaginary part": lambda z: z.conj().imag,
    "parts of an adjoint": lambda z: torch.cat([z.mH, z], 1).flip(0)[1:],
    "angle": lambda z: z.conj().angle(),
    "fft": lambda z: torch.fft.fftn(z.conj(), dim=(1, 2)),
    "ifft of a view": lambda z: torch.fft.ifft(z.mT),
    "inv": linalg.inv,
    "det": linalg.det,
    "solve from the right": lambda z: linalg.solve(z, z[..., :2, :] ** 3 + 1, left=False) ** 2,
    "vdot": lambda z: torch.vdot(z[0, 0], z[:, 1, 0][:1].expand(5)),
    "polar": lambda z: torch.polar(z.abs(), z.angle()),
    "mean": lambda z: z.mean(1),
    "sum": lambda z: z.sum((0, 2)),
}


def value(name: str) -> tuple[Tensor, Fn]:
    torch.manual_seed(0)
    if name in REAL:
        return torch.randn(5, 5, 5, dtype=torch.float64) + 3 * torch.eye(5), REAL[name]
    return torch.randn(3, 5, 5, dtype=torch.complex128) + 3 * torch.eye(5), COMPLEX[name.removeprefix("complex ")]


def gradient(fn: Fn) -> Fn:
    return torch.func.grad(lambda x: (fn(x).abs() ** 2).sum())


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", [*REAL, *(f"complex {n}" for n in COMPLEX)])
def test_as_on_one_device(name: str) -> None:
    x, fn = value(name)
    back = gradient(fn)
    ways = [(fn, fn, P("x")), (fn, sl.jit(fn), P(None, "x")), (back, back, P(None, "x")), (back, sl.jit(back), P("x"))]
    with Mesh(x=4):
        for alone, together, spec in ways:
            torch.testing.assert_close(together(sl.shard(x, spec)).full_tensor(), alone(x), rtol=1e-9, atol=1e-9)


def test_a_conjugate_is_conjugate_on_every_piece() -> None:
    z = torch.randn(4, 3, dtype=torch.complex64)
    with Mesh(x=2):
        for y in (sl.shard(z, "a@x b").conj(), sl.shard(z.conj(), "a@x b"), sl.jit(torch.conj)(sl.shard(z, "a@x b"))):
            assert not any(s.data.is_conj() for s in y.shards)
            assert torch.equal(y.full_tensor(), z.conj())


def test_a_write_through_a_conjugate() -> None:
    def step(z: Tensor) -> Tensor:
        y = z.clone()
        y.conj().mul_(2j)
        y.imag.add_(1)
        return y

    z = torch.randn(6, 3, dtype=torch.complex64)
    with Mesh(x=4):
        torch.testing.assert_close(sl.jit(step)(sl.shard(z, P("x"))).full_tensor(), step(z))


@pytest.mark.parametrize("fn", [linalg.inv, torch.cholesky, lambda a: linalg.solve(a, a[..., 0])])
def test_the_matrix_that_fails_is_named(fn: Fn) -> None:
    good = torch.eye(3).repeat(6, 1, 1)
    bad = good.clone()
    bad[4] = 0
    with pytest.raises(RuntimeError, match=r"Batch element 4") as alone:
        fn(bad)
    with Mesh(x=4):
        for run in (fn, sl.jit(fn)):
            assert torch.isfinite(run(sl.shard(good, P("x"))).full_tensor()).all()
            with pytest.raises(RuntimeError) as together:
                run(sl.shard(bad, P("x")))
            assert str(together.value) == str(alone.value)


CONTRACTIONS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (lambda x, w: torch.einsum("bik,kj->bij", x, w), ("a@x b c", "c d")),
    (lambda x, w: torch.einsum("bik,kj->bij", x, w), ("a b c", "c d@x")),
    (lambda x, w: torch.tensordot(x, w, dims=1), ("a b@x c", "c d")),
    (torch.matmul, ("a@x b c", "c d@y")),
    (lambda x, w: torch.inner(x, w.mT), ("a@x b c", "c d@y")),
    (lambda x, w: torch.linalg.multi_dot([x[0], w, w.mT]), ("a b@x c", "c d")),
    (lambda x, w: torch.kron(x[0], w), ("a b@x c", "c d")),
    (lambda x, w: torch.outer(x[0, 0], w[:, 0]), ("a b c@x", "c d")),
    (lambda x, w: torch.linalg.matrix_power(x[:, :, :2], 3), ("a@x b c", "c d")),
]


@pytest.mark.parametrize("case", range(len(CONTRACTIONS)))
def test_products_move_nothing(case: int) -> None:
    fn, specs = CONTRACTIONS[case]
    x, w = torch.randn(4, 2, 4), torch.randn(4, 4)
    with Mesh(x=2, y=2):
        plan = sl.jit(fn, in_specs=specs).plan(x, w)
        assert not plan.collectives
        assert "no rule" not in plan.full


def on_ranks() -> tuple[Tensor, Tensor, Tensor, str]:
    torch.manual_seed(0)
    z = torch.randn(5, 3, dtype=torch.complex64)
    bad = torch.eye(3).repeat(4, 1, 1)
    bad[3] = 0
    with Mesh(x=2):
        x = sl.shard(z, P("x"))
        made = [y.full_tensor() for y in (x.sum(0), sl.jit(lambda x: x.mH @ x)(x), torch.fft.fft(x.conj(), dim=0))]
        with pytest.raises(RuntimeError) as error:
            linalg.inv(sl.shard(bad, P("x")))
    return made[0], made[1], made[2], str(error.value)


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_add_complex_numbers_and_fail_together() -> None:
    torch.manual_seed(0)
    z = torch.randn(5, 3, dtype=torch.complex64)
    for total, product, spectrum, message in run_ranks(on_ranks, 2):
        torch.testing.assert_close(total, z.sum(0))
        torch.testing.assert_close(product, z.mH @ z)
        torch.testing.assert_close(spectrum, torch.fft.fft(z.conj(), dim=0))
        assert "Batch element 3" in message


def test_sparse_tensors_are_refused() -> None:
    dense = torch.eye(4)
    with Mesh(x=2):
        with pytest.raises(ShardingError, match="x of shape \\[4, 4\\] is sparse_coo") as error:
            sl.shard(dense.to_sparse(), P("x"))
        assert "x.to_dense()" in str(error.value)
        with pytest.raises(
            ShardingError, match=r"the result of aten._to_sparse.default of shape \[4, 4\] is sparse_coo"
        ):
            sl.jit(lambda x: x.to_sparse().to_dense())(dense)
        with pytest.raises(ShardingError, match=r"s of shape \[4, 4\] is sparse_csr"):
            sl.jit(lambda s, x: s @ x)(dense.to_sparse_csr(), dense)
        assert torch.equal(sl.jit(lambda x: x @ x)(dense).full_tensor(), dense)
