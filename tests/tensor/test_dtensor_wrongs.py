"""What the released DTensor gets silently wrong, on real Gloo processes: here each of it is right, or refused.

Every case is a function of plain tensors, which runs on one device as it stands; on ranks its tensors are placed, and
it runs op by op on ShardedTensors and as a jitted function. Values and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import P
from tests.helpers.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    """`fn` of float64 tensors of these shapes (or of the tensors given instead), placed by `specs`.

    Gradients are taken of the operands `of`. The mesh has one axis, x, unless the case is for `x=2, y=2`.
    """

    fn: Callable[..., Tensor]
    shapes: tuple[Any, ...]
    specs: tuple[P, ...]
    of: tuple[int, ...] = (0,)
    square: bool = False

    def tensors(self) -> list[Tensor]:
        """The same on every rank, and on one device."""
        made = torch.Generator().manual_seed(7)
        rand = lambda shape: torch.rand(shape, generator=made, dtype=torch.float64) * 0.8 + 0.1
        tensors = [x.clone() if isinstance(x, Tensor) else rand(x) for x in self.shapes]
        return [x.requires_grad_(i in self.of) for i, x in enumerate(tensors)]


X, N, TWICE = P("x"), P(None), P(("x", "y"))
ROWS = {"uneven": 5, "even": 8, "empty": 2}  # of a batch over 4 devices

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy,
    "bce_logits": F.binary_cross_entropy_with_logits,
    "soft_margin": F.soft_margin_loss,
    "l1": F.l1_loss,
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "poisson_nll": F.poisson_nll_loss,
}


def _classes(n: int, count: int = 3) -> Tensor:
    return torch.arange(n) * 2 % count


def _weighted(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x, target, weight)


def _ignoring(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x, target, weight, ignore_index=2)


def _smoothed(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x, target, weight, label_smoothing=0.1)


def _filled(x: Tensor, y: Tensor) -> Tensor:
    """`empty_like` of a product whose sum over devices is pending."""
    total = x @ y
    return torch.empty_like(total).fill_(1.0) + 0 * total


def _layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, [5], weight) * x


def _batch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, training=True) * x


def _sorted(x: Tensor) -> Tensor:
    return x.sort(0).values * torch.arange(1.0, 6.0, dtype=x.dtype)[:, None]


def _scattered(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return torch.scatter_add(x, 0, index, source).square()


CASES: dict[str, Case] = {
    **{
        f"{name}, {how} batch": Case(loss, ((n, 3), (n, 3)), (X, X))
        for name, loss in LOSSES.items()
        for how, n in ROWS.items()
    },
    **{
        f"{name} cross_entropy, {how} batch": Case(fn, ((n, 3), _classes(n), (3,)), (X, X, N))
        for name, fn in {"weighted": _weighted, "ignoring": _ignoring, "smoothed": _smoothed}.items()
        for how, n in ROWS.items()
    },
    "weighted cross_entropy, classes cut": Case(_weighted, ((5, 3), _classes(5), (3,)), (P(None, "x"), N, X)),
    "weighted cross_entropy of images": Case(
        _weighted, ((5, 3, 2), _classes(10).view(5, 2), (3,)), (P("x", None, "y"), P("x", "y"), N), square=True
    ),
    "fill of a pending sum": Case(_filled, ((3, 8), (8, 3)), (P(None, "x"), X), (0, 1)),
    **{
        f"5x3 cut twice on a dim, {name}": Case(fn, ((5, 3),) * len(specs), specs, tuple(range(len(specs))), True)
        for name, fn, specs in (
            ("full_tensor", lambda x: x * 1, (TWICE,)),
            ("minor first", lambda x: x * 1, (P(("y", "x")),)),
            ("sum", lambda x: x.sum(0) + x.sum(), (TWICE,)),
            ("mean", lambda x: x.mean(0) * x.mean(), (TWICE,)),
            ("matmul", lambda x, y: x @ y.t(), (TWICE, TWICE)),
            ("matmul over it", lambda x, y: x.t() @ y, (TWICE, TWICE)),
        )
    },
    "sort": Case(_sorted, ((5, 3),), (X,)),
    "norm": Case(lambda x: x.norm() + x.norm(dim=0).sum(), ((5, 3),), (X,)),
    "amax": Case(lambda x: x.amax(0) + x.amax(), ((5, 3),), (X,)),
    "linear": Case(F.linear, ((5, 6), (7, 6), (7,)), (X, P("y"), P("y")), (0, 1, 2), square=True),
    "linear, inner dim cut": Case(F.linear, ((3, 5), (7, 5), (7,)), (P(None, "x"), P(None, "x"), N), (0, 1, 2)),
    "matmul": Case(
        torch.matmul, ((2, 5, 3), (2, 3, 7)), (P(None, "x"), P(None, None, "y")), (0, 1), square=True
    ),
    "view": Case(lambda x: x.view(3, 10).sin(), ((3, 5, 2),), (P(None, "x"),)),
    "view of the cut dim": Case(lambda x: x.view(2, 3, 5).sin(), ((6, 5),), (X,)),
    "scatter_add": Case(_scattered, ((5, 3), _classes(15, 5).view(5, 3), (5, 3)), (X, X, X), (0, 2)),
    "conv, output channels cut": Case(F.conv2d, ((2, 3, 5, 4), (6, 3, 3, 3), (6,)), (N, X, X), (0, 1, 2)),
    "layer_norm, normalized dim cut": Case(_layer_norm, ((3, 5), (5,)), (P(None, "x"), X), (0, 1)),
    "batch_norm": Case(_batch_norm, ((5, 3, 2), (3,)), (X, N), (0, 1)),
}  # fmt: skip


def _whole(values: Sequence[Tensor]) -> list[Tensor]:
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in values]


def _pulled(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of the sum of its squares."""
    out = case.fn(*tensors)
    return _whole([out.detach(), *torch.autograd.grad(out.square().sum(), [tensors[i] for i in case.of])])


def _jitted(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out = case.fn(*tensors)
        return out.square().sum(), out

    grads, (_, out) = sl.jit(torch.func.grad_and_value(loss, case.of, has_aux=True))(*(x.detach() for x in tensors))
    return _whole([out, *grads])


def compare(names: Sequence[str], mesh: dict[str, int]) -> list[str]:
    """What differs from one device."""
    wrong = []
    for name in names:
        case = CASES[name]
        expected = _pulled(case, case.tensors())
        for run in (_pulled, _jitted):
            with sl.Mesh(mesh):
                found = run(case, [sl.shard(x, spec) for x, spec in zip(case.tensors(), case.specs, strict=True)])
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-12, atol=1e-12):
                    wrong.append(f"{name},{run.__name__}: {'gradient' if i else 'value'} is {a}, not {b}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if i % 9 == 0 else pytest.mark.slow) for i, name in enumerate(CASES)]
)
def test_right_on_four_ranks(name: str) -> None:
    assert run_ranks(compare, 4, [name], {"x": 2, "y": 2} if CASES[name].square else {"x": 4}) == [[]] * 4


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.sampled(8)
@pytest.mark.parametrize("part", range(8))
def test_right_on_two_ranks(part: int) -> None:
    names = [name for name, case in CASES.items() if not case.square]
    assert run_ranks(compare, 2, names[part::8], {"x": 2}) == [[]] * 2


def unflatten_nothing() -> tuple[int, ...]:
    with sl.Mesh(x=2):
        return tuple(sl.shard(torch.zeros(4, 0), X).unflatten(1, (2, 0, 0, 0)).full_tensor().shape)


@pytest.mark.ranks
def test_unflatten_of_nothing_does_not_hang() -> None:
    assert run_ranks(unflatten_nothing, 2) == [(4, 2, 0, 0, 0)] * 2
