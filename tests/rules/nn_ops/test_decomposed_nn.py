"""Ops of neural networks that are written as other ops: the same values and gradients on shards as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import P
from shardlib.rules.nn_ops.loss import ctc_loss

aten = torch.ops.aten
F64 = torch.float64

Call = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[P, ...]]

TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0], [1, 3, 1], [2, 2, 1]])
LENGTHS = ([8, 7, 8, 6, 8], [3, 2, 1, 3, 3])


def _weight_norm(v: Tensor, g: Tensor) -> Tensor:
    return torch._weight_norm(v, g, 0)


def _ctc(x: Tensor, targets: Tensor, lengths: Any = LENGTHS, reduction: str = "mean") -> Tensor:
    return F.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction)


def _behind_each_other(x: Tensor) -> Tensor:
    return _ctc(x, torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS[1], strict=True)]))


def _fused_loss(x: Tensor, w: Tensor, bias: Tensor, **how: Any) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    target = torch.tensor([0, 2, 1, 2, 0])
    return F.linear_cross_entropy(x, w, target, linear_bias=bias, options=options, **how)


def _padded(*amounts: int, mode: str = "reflect") -> Callable[[Tensor], Tensor]:
    return lambda x: F.pad(x, amounts, mode=mode)


CALLS: dict[str, Call] = {
    "mirrored at the borders": (_padded(2, 1), ((2, 3, 11),), (P(None, None, "x"),)),
    "mirrored, as far as it goes": (_padded(4, 0), ((3, 5),), (P(None, "x"),)),
    "mirrored, and cropped": (_padded(-2, 3), ((3, 9),), (P(None, "x"),)),
    "mirrored in two dims": (_padded(1, 2, 2, 0), ((2, 3, 7, 6),), (P(None, None, "x"),)),
    "mirrored in three dims": (_padded(1, 1, 0, 1, 2, 1), ((2, 3, 5, 4, 3),), (P(None, None, "x"),)),
    "the borders again": (_padded(3, 2, mode="replicate"), ((2, 3, 10),), (P(None, None, "x"),)),
    "the borders again, and cropped": (_padded(2, -3, mode="replicate"), ((3, 9),), (P(None, "x"),)),
    "the borders of two dims again": (_padded(0, 1, 2, 3, mode="replicate"), ((2, 3, 7, 6),), (P(None, None, "x"),)),
    "weight norm": (_weight_norm, ((5, 3), (5, 1)), (P("x"), P("x"))),
    "weight norm over a cut dim": (_weight_norm, ((5, 3), (5, 1)), (P(None, "x"), P(None))),
    "rrelu without training": (lambda x: F.rrelu(x), ((5, 3),), (P("x"),)),
    "ctc": (lambda x: _ctc(x, TARGETS), ((8, 5, 4),), (P(None, "x"),)),
    "ctc, each": (lambda x: _ctc(x, TARGETS, reduction="none"), ((8, 5, 4),), (P(None, "x"),)),
    "ctc, classes cut": (lambda x: _ctc(x, TARGETS), ((8, 5, 4),), (P(None, None, "x"),)),
    "ctc, targets one behind the other": (_behind_each_other, ((8, 5, 4),), (P(None, "x"),)),
}
if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch may be too old
    where = ((5, 4), (3, 4), (3,))
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=F64)
    CALLS |= {
        "fused cross-entropy": (_fused_loss, where, (P("x"), P(None), P(None))),
        "fused cross-entropy, classes cut": (_fused_loss, where, (P(None), P("x"), P("x"))),
        "fused cross-entropy, weighted": (
            lambda *x: _fused_loss(*x, weight=weights),
            where,
            (P("x"), P(None), P(None)),
        ),
        "fused cross-entropy, each": (lambda *x: _fused_loss(*x, reduction="none"), where, (P("x"), P(None), P(None))),
    }


def inputs(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=made, dtype=F64).requires_grad_() for shape in shapes]


def pulled(fn: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = fn(*tensors)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


def whole(values: Any) -> list[Tensor]:
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in values]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", ["eager", "jit"])
def test_right_on_shards(name: str, way: str) -> None:
    fn, shapes, specs = CALLS[name]
    expected = pulled(fn, inputs(shapes))
    with sl.Mesh(x=4):
        tensors = [sl.shard(x, spec) for x, spec in zip(inputs(shapes), specs, strict=True)]
        found = (pulled if way == "eager" else sl.jit(pulled, static_argnums=0))(fn, tensors)
    for a, b in zip(whole(found), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_sends_what_crosses(mode: str) -> None:
    """Two rows at each end are near, and pieces of 1028 begin up to four rows later than those of 1024."""
    with sl.Mesh.abstract(x=8):
        x = torch.empty(1, 64, 1024, device="meta")
        plan = sl.jit(_padded(2, 2, mode=mode), in_specs=(P(None, None, "x"),)).plan(x)
    assert {c.kind for c in plan.collectives} == {"ppermute"}
    assert plan.comm_bytes <= 6 * 64 * 4


def test_sequences_of_a_batch_do_not_move() -> None:
    with sl.Mesh(x=4):
        x = sl.shard(torch.zeros(8, 5, 4), P(None, "x"))
        plan = sl.jit(lambda x: _ctc(x, TARGETS, reduction="sum")).plan(x)
    assert not plan.replicated_ops
    assert {c.kind for c in plan.collectives} <= {"all_reduce"}


@pytest.mark.parametrize("targets", [TARGETS, torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS[1], strict=True)])])
def test_lengths_that_only_the_program_knows(targets: Tensor) -> None:
    (x,), lengths = inputs(((8, 5, 4),)), tuple(map(torch.tensor, LENGTHS))
    with sl.Mesh(x=4):
        placed = [sl.shard(n, P("x")) for n in lengths]
        found = whole([sl.jit(_ctc)(sl.shard(x, P(None, "x")), targets, placed)])[0]
    torch.testing.assert_close(found, _ctc(x, targets, lengths), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["mean", "sum", "none"])
def test_sequences_as_torch_takes_them(how: str) -> None:
    (x,) = inputs(((8, 5, 4),))
    short = ([8, 7, 2, 6, 8], [3, 2, 3, 3, 0])  # two frames are too few for three labels
    calls = [
        ((x, TARGETS, *LENGTHS), {}),
        ((x, TARGETS, *short), {"zero_infinity": True}),
        ((x[:, 0], TARGETS[0], torch.tensor(8), torch.tensor(3)), {}),
        ((x[:, 0], TARGETS[0], (8,), (3,)), {"blank": 0}),
    ]
    for args, more in calls:
        torch.testing.assert_close(ctc_loss(*args, reduction=how, **more), F.ctc_loss(*args, reduction=how, **more))


def test_slopes_are_drawn_alike_on_every_mesh() -> None:
    def drawn(ways: int) -> Tensor:
        torch.manual_seed(5)
        with sl.Mesh(x=ways):
            return whole([F.rrelu(sl.shard(-torch.ones(5, 3), P("x")), 0.25, 0.5, training=True)])[0]

    assert torch.equal(drawn(1), drawn(4))
    assert drawn(4).ge(-0.5).all()
    assert drawn(4).le(-0.25).all()
    assert drawn(4).unique().numel() > 1


# Ops for one kind of device, written as ops that are on all -----------------------------------------------------------


def _cudnn_batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return aten.cudnn_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0]  # type: ignore[no-any-return]


DEVICES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "batch norm": (
        _cudnn_batch_norm,
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((5, 3, 2, 2), (3,), (3,)),
    ),
    "grid": (
        aten.cudnn_grid_sampler,
        lambda x, grid: F.grid_sample(x, grid, align_corners=True),
        ((5, 2, 3, 3), (5, 2, 2, 2)),
    ),
    "grid, on CPUs": (
        lambda x, grid: aten._grid_sampler_2d_cpu_fallback(x, grid, 0, 0, True),
        lambda x, grid: F.grid_sample(x, grid, align_corners=True),
        ((5, 2, 3, 3), (5, 2, 2, 2)),
    ),
    "affine grid": (
        lambda theta: aten.cudnn_affine_grid_generator(theta, 5, 2, 3, 4),
        lambda theta: F.affine_grid(theta, [5, 2, 3, 4], align_corners=True),
        ((5, 2, 3),),
    ),
}


@pytest.mark.parametrize("name", DEVICES)
def test_ops_for_one_kind_of_device(name: str) -> None:
    if name == "grid, on CPUs" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 has its gradient in float32 alone")
    fn, plain, shapes = DEVICES[name]
    expected = pulled(plain, inputs(shapes))
    with sl.Mesh(x=4):
        tensors = [sl.shard(x, P("x")) for x in inputs(shapes)]
        loss = lambda *xs: ((out := fn(*xs)).square().sum(), out)
        each = tuple(range(len(tensors)))
        grads, (_, out) = sl.jit(torch.func.grad_and_value(loss, each, has_aux=True))(*tensors)
    for a, b in zip(whole([out, *grads]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
