"""Eager writes whose operands are what they write to, which autograd has to notice, or which torch refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardlib import Mesh, ShardingError, shard
from tests.helpers.oracle import same

MESH = Mesh(data=2)


def placed(x: Tensor) -> Tensor:
    with MESH:
        return shard(x, " ".join(["_@data", *["_"] * (x.dim() - 1)]))


def _row(x: Tensor) -> None:
    r = x[0]
    r.mul_(r)


def _rows(x: Tensor) -> None:
    for r in x:
        r *= r


def _turned(x: Tensor) -> None:
    x.t_()
    x.add_(x)


def _view_of_all(x: Tensor) -> None:
    v = x.view(-1)
    v.addcmul_(v, v)


def _ahead(x: Tensor) -> None:
    x[1:] *= x[1:]


@pytest.mark.parametrize("write", [_row, _rows, _turned, _view_of_all, _ahead], ids=lambda f: f.__name__)
def test_what_is_written_to_is_read_as_well(write: Callable[[Tensor], None]) -> None:
    for _ in range(2):  # the program that is made, and the one that is found
        x = torch.arange(1.0, 7.0).reshape(3, 2)
        ours = placed(x.clone())
        write(ours)
        write(x)
        same(ours, x)


def test_a_product_is_added_to_its_factor() -> None:
    x = placed(torch.ones(2, 2))
    same(x.addmm_(x, placed(torch.eye(2))), torch.full((2, 2), 2.0))


def test_lists_of_writes_are_noticed_by_autograd() -> None:
    w = placed(torch.ones(4)).requires_grad_()
    opt = torch.optim.SGD([w], lr=1.0, foreach=True)
    w.sum().backward()
    loss = (w * w).sum()
    opt.step()
    assert w._version == 1
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()
    x = placed(torch.ones(4)).requires_grad_()
    whole = x * 1
    part = whole[:2]
    torch._foreach_mul_([whole], 3.0)
    part.sum().backward()
    same(x.grad, torch.tensor([3.0, 3.0, 0.0, 0.0]))


def test_an_optimizer_of_parameters_on_two_meshes() -> None:
    with Mesh(data=3):
        other = shard(torch.ones(6, 2), "_@data _").requires_grad_()
    ours = [placed(torch.ones(4, 2)).requires_grad_(), other]
    plain = [torch.ones(4, 2, requires_grad=True), torch.ones(6, 2, requires_grad=True)]
    for params in (ours, plain):
        opt = torch.optim.Adam(params, 0.1, foreach=True)
        for _ in range(2):
            for p in params:
                (p * p).sum().backward()
            opt.step()
    same(ours, plain)


def test_a_view_with_history_is_not_turned_in_place() -> None:
    x = placed(torch.zeros(2, 3)).requires_grad_()
    view = (x * 1)[:]
    with pytest.raises(ShardingError, match=r"(?s)^t_ of a view whose gradient is recorded.*y = x\.t\(\.\.\.\)"):
        view.t_()
    whole = x * 1
    whole.t_()  # no view
    (whole * torch.arange(6.0).reshape(3, 2)).sum().backward()
    same(x.grad, torch.arange(6.0).reshape(3, 2).t())


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((8,), (torch.tensor([True, False, True]),)),
        ((8, 3), (torch.ones(1, 1, dtype=torch.bool),)),
        ((8, 3), (slice(None), torch.ones(2, dtype=torch.bool))),
    ],
    ids=["short", "1 x 1", "of columns"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_masks_of_another_shape(shape: tuple[int, ...], index: tuple[Any, ...], sharded: bool) -> None:
    x = torch.ones(shape)
    with pytest.raises(IndexError) as plain:
        x[index]
    ours = tuple(placed(i) if sharded and isinstance(i, Tensor) else i for i in index)
    for use in (lambda y: y[ours], lambda y: y.__setitem__(ours, 9.0)):
        with pytest.raises(IndexError) as refused:
            use(placed(x.clone()))
        assert str(refused.value) == str(plain.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func.linearize's own
def test_what_records_operators_is_refused() -> None:
    x, c = placed(torch.ones(4)), placed(torch.ones(4))
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"recorded by torch\.fx"):
            make_fx(lambda x: x * c)(x)
        x * c  # now it is ready
    with pytest.raises(ShardingError, match="linearize records"):
        torch.func.linearize(torch.sin, x)
    same(make_fx(lambda x: x * 2)(x)(c), torch.full((4,), 2.0))


def test_numbers_are_copied() -> None:
    same(placed(torch.ones(4)).copy_(5.0), torch.full((4,), 5.0))
    same(placed(torch.ones(4, dtype=torch.int64)).copy_(True), torch.ones(4, dtype=torch.int64))


def test_losses_of_nothing() -> None:
    x = placed(torch.zeros(0, 3)).requires_grad_()
    loss = F.mse_loss(x, torch.zeros(0, 3))
    loss.backward()
    assert loss.isnan()
    assert x.grad is not None
    assert x.grad.shape == (0, 3)


def test_what_memory_would_be_needed_for() -> None:
    with pytest.raises(ShardingError, match="has no values that Python could go through"):
        placed(torch.zeros(6, 4)).apply_(lambda p: p + 1)
    with pytest.raises(ShardingError, match=r"(?s)keeps its size.*make a new tensor"):
        placed(torch.ones(4)).resize_(2)
