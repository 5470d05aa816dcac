"""Iterations on stacks of matrices that are cut inside."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.validation.best import Row, bf16, exchanged, f32, gathered, reduced

L, D = 64, 2048
STACK = L * D * D * 4
MESH = {"x": 64}


def _newton_schulz(x: Tensor) -> Tensor:
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def _inverse_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x @ x.mT)
    return vectors * values.pow(-0.25).unsqueeze(-2) @ vectors.mT


def _power(x: Tensor, v: Tensor) -> Tensor:
    """Vogels et al. 2019, arXiv:1905.13727: a matrix of low rank that is near."""
    q = torch.linalg.qr(x @ v)[0]
    return q @ (q.mT @ x)


def _row(name: str, program: object, **more: object) -> Row:
    return Row(
        name, program, (f32(L, D, D),), ("_ m@x _",), MESH, 2 * exchanged(STACK, 64), 2, out_specs="_ m@x _", **more
    )


ROWS = [
    _row("Newton-Schulz on a stack of cut matrices", _newton_schulz),
    _row("Cholesky of a stack of cut matrices", lambda x: torch.linalg.cholesky(x), short={"collectives": 1.5},
         why="252 bytes say of each matrix whether it could be factored"),
    _row("eigenvectors of a stack of cut matrices", lambda x: torch.linalg.eigh(x)[1]),
    _row("inverse roots of a stack of cut matrices", _inverse_root),
    Row("Newton-Schulz on a cut stack", _newton_schulz, (f32(L, 256, 256),), ("l@x _ _",), MESH),
    # Four matrices on eight devices: each goes to two, which share its rows.
    Row("Newton-Schulz on a stack of fewer matrices than devices", _newton_schulz, (f32(4, 512, 512),), ("_ m@x _",),
        {"x": 8}, 2 * 4 * 512 * 512 * 4 / 8 * 3 / 4 + 10 * gathered(512 * 512 * 4, 2), 13, out_specs="_ m@x _",
        short={"bytes": 6.1}, why="no dim is offered a part of an axis"),
    # In 16 bits it takes less time to multiply the gathered matrix with itself alike than to gather the product, too.
    Row("Newton-Schulz on one cut matrix of 16 bits", _newton_schulz, (bf16(1024, 1024),), ("m@x _",), {"x": 8},
        5 * gathered(1024 * 1024 * 2, 8), 6, work=10 / 3, out_specs="m@x _"),
    Row("Newton-Schulz on a tall matrix of 16 bits", _newton_schulz, (bf16(4096, 256),), ("m@x _",), {"x": 8},
        5 * gathered(4096 * 256 * 2, 8), 6, work=25 / 18, out_specs="m@x _"),
    # Columns are cut meanwhile: of a product with itself, the sum is little. Its rows are shared out, and its product
    # with itself is gathered: more bytes than if all did that alike, and half of the work.
    Row("Newton-Schulz on a wide matrix of 16 bits", _newton_schulz, (bf16(1024, 4096),), ("m@x _",), {"x": 8},
        2 * exchanged(1024 * 4096 * 2, 8) + 5 * 3 * gathered(1024 * 1024 * 2, 8), 18, out_specs="m@x _",
        short={"bytes": 1.6}, why="an axis is not offered elsewhere in place of a dim that stands twice"),
    Row("product of matrices, cut in k", lambda a, b: a @ b, (f32(D, D), f32(D, D)), ("_ k@x", "k@x _"), MESH,
        reduced(D * D * 4, 64), 1, out_specs="_ _"),
    # The first rows are what signs depend on: one device sends them beside its triangle.
    Row("QR decomposition of a tall matrix", torch.linalg.qr, (f32(1 << 16, 64),), ("n@x d",), {"x": 8},
        gathered(9 * 64 * 64 * 4, 8), 1),
    Row("singular values of a tall matrix", torch.linalg.svdvals, (f32(1 << 16, 64),), ("n@x d",), {"x": 8},
        gathered(8 * 64 * 64 * 4, 8), 1),
    Row("nuclear norm of a wide matrix", lambda x: torch.linalg.matrix_norm(x, "nuc"), (f32(64, 1 << 16),), ("d n@x",),
        {"x": 8}, gathered(8 * 64 * 64 * 4, 8), 1),
    Row("low-rank part of a tall matrix", _power, (f32(1 << 16, 512), f32(512, 8)), ("n@x d", "..."), {"x": 8},
        gathered(9 * 8 * 8 * 4, 8) + reduced(8 * 512 * 4, 8), 2),
    Row("products added to a product, cut in k", lambda a, b: (a @ b).addmm(a, b, beta=0.5).addmm(a, b),
        (f32(D, D), f32(D, D)), ("_ k@x", "k@x _"), MESH, reduced(D * D * 4, 64), 1, out_specs="_ _"),
    Row("product of matrices in two dims", lambda a, b: a @ b, (f32(D, D), f32(D, D)), ("m@a _", "_ n@b"),
        {"a": 4, "b": 4}),
]  # fmt: skip
