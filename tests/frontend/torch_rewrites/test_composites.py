"""Functions that look at values in plain torch, and do not need to: sharded and traced they are what they were."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib import Mesh, P

aten = torch.ops.aten
F64 = torch.float64
X, V, W = torch.randn(5, 7, dtype=F64), torch.randn(6, dtype=F64), torch.rand(7, dtype=F64)
Z = torch.randn(3, 7, dtype=torch.complex128)
COUNTS = torch.tensor([1, 2, 0, 3, 1, 1, 2])
MASK = torch.tensor([True, False, True, True, False])
VALUE = torch.tensor(2.5, dtype=F64)
VAR = torch.rand(5, 7, dtype=F64) + 0.1

CALLS = {
    "cov": (torch.cov, X),
    "cov of one variable": (lambda x: x.cov(correction=0), V),
    "cov, weighted": (lambda x, w: torch.cov(x, fweights=COUNTS, aweights=w, correction=2), X, W),
    "cov, counted": (lambda x: torch.cov(x, fweights=COUNTS), X),
    "cov of complex numbers": (torch.cov, Z),
    "corrcoef": (torch.corrcoef, X),
    "corrcoef of one variable": (lambda x: x.corrcoef(), V),
    "corrcoef of complex numbers": (torch.corrcoef, Z),
    "combinations": (torch.combinations, V),
    "combinations of three": (lambda x: torch.combinations(x, 3, with_replacement=True), V),
    "combinations of too many": (lambda x: torch.combinations(x, 7), V),
    "gaussian_nll_loss": (F.gaussian_nll_loss, X, X.flip(0), VAR),
    "gaussian_nll_loss, one variance a row": (lambda x, v: F.gaussian_nll_loss(x, x * 2, v, full=True), X, VAR[:, 0]),
    "gaussian_nll_loss at its bound": (lambda x, v: F.gaussian_nll_loss(x, x * 2, v, eps=0.5, reduction="sum"), X, VAR),
    "index_fill": (lambda x, v: x.index_fill(-1, torch.tensor([1, 4, 4]), v), X, VALUE),
    "index_fill of a scalar": (lambda x, v: x.index_fill(0, torch.tensor([0]), v) + 0 * x, VALUE * 3, VALUE),
    "index_fill with a number": (lambda x: torch.index_fill(x, 0, torch.tensor([3]), 2.0), X),
    "narrow from a tensor": (lambda x: x.narrow(0, torch.tensor(-3), 2) + x.narrow(0, 1, 2), X),
    "index_put of one value": (lambda x, v: torch.index_put(x, [MASK], v), X, VALUE),
    "index_put of a row": (lambda x, w: x.index_put((MASK,), w[None]), X, W),
    "index_put of a row, added": (lambda x, w: x.index_put((MASK,), w, accumulate=True), X, W),
    "index_put_ of a row": (lambda x, w: x.clone().index_put_((MASK,), w), X, W),
    "index_fill_": (lambda x, v: x.clone().index_fill_(1, torch.tensor([1, 4]), v), X, VALUE),
    "bilinear": (lambda x, y, w, b: F.bilinear(x, y, w, b), X, X[:, :3], torch.randn(4, 7, 3, dtype=F64), W[:4]),
    "a product of three": (lambda x, w: aten._trilinear(x, w, x, [], [0], [], [-1]), X, W),
    "stft": (lambda x: torch.stft(x, 4, 2, window=torch.hann_window(4, dtype=F64), return_complex=True), X),
    "stft of a short window": (
        lambda v, w: v.stft(4, 1, 3, w[:3], center=False, normalized=True, onesided=False, return_complex=True),
        V,
        W,
    ),
    "stft of complex numbers": (lambda z: torch.stft(z, 4, 1, None, W[:4], onesided=False, return_complex=True), Z),
    "index_put at places": (lambda x, w: x.index_put((torch.tensor([3, 0]),), w), X, W),
}


def forward_and_backward(call, tensors):
    out = call(*tensors)
    scalar = (out * torch.arange(1.0, out.numel() + 1, dtype=F64).reshape(out.shape)).abs().sum()
    return out, torch.autograd.grad(scalar, tensors)


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    ("name", "dim"), [(name, dim) for i, name in enumerate(CALLS) for dim in ((0, -1), (-1, 0))[i % 2]]
)
def test_the_same_as_plain_torch(name, dim):
    call, *tensors = CALLS[name]
    want = forward_and_backward(call, [x.clone().requires_grad_() for x in tensors])
    with Mesh(x=4):
        spec = [P(*("x" if d == dim % x.dim() else None for d in range(x.dim()))) if x.dim() else P() for x in tensors]
        sharded = [sl.shard(x, s).requires_grad_() for x, s in zip(tensors, spec, strict=True)]
        got = sl.jit(lambda *t: forward_and_backward(call, list(t)))(*sharded)
    for a, b in zip((want[0], *want[1]), (got[0], *got[1]), strict=True):
        torch.testing.assert_close(b.full_tensor(), a.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: torch.cov(torch.zeros(2, 2, 2)), RuntimeError),
        (lambda: torch.combinations(torch.zeros(2, 2)), RuntimeError),
        (lambda: F.gaussian_nll_loss(X, X, VAR[:3]), ValueError),
        (lambda: torch.zeros(4, 4)[torch.tensor([True] * 4)].sum(), sl.ShardingError),
    ],
)
def test_what_torch_refuses_is_refused_as_before(call, error):
    with Mesh(x=4), pytest.raises(error):
        sl.jit(call)()
