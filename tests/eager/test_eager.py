"""Operations on ShardedTensors outside jit: the oracle is the same line of plain torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError, shard
from shardlib.eager import prepare
from shardlib.eager.prepare import infer_results as meta
from shardlib.tensor.eager_cache import PROGRAMS
from tests.helpers.ranks import only, run_ranks


@pytest.fixture(autouse=True)
def _mesh() -> Iterator[None]:
    with Mesh(data=2, tensor=2):
        yield


def _whole(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(ShardedTensor, lambda t: t.full_tensor(), x)


X = torch.arange(48.0).view(4, 12).sin()

OPS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x * 2 + x.exp(),
    "plain operand": lambda x: x + torch.ones(12),
    "plain first": lambda x: torch.ones(12) - x,
    "matmul": lambda x: x @ x.t(),
    "plain matmul": lambda x: x @ torch.ones(12, 3),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (12,)),
    "views": lambda x: x.view(2, 2, 3, 4).transpose(0, 2).flatten(),
    "slice": lambda x: x[1:3, ::2],
    "select": lambda x: x[2],
    "split": lambda x: x.split(5, 1),
    "topk": lambda x: tuple(x.topk(3)),
    "cat": lambda x: torch.cat([x, torch.ones(1, 12), x]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "compare": lambda x: x == x,
    "dtype": lambda x: x.to(torch.float64).sum(0),
    "one": lambda x: x.new_ones(3) + torch.zeros_like(x)[0, :3],
    "int or float": lambda x: (x // 1, x // 1.0, x.long() * 1, x.long() * 1.0, x.long() * True),
    "signed zeros": lambda x: (1 / (x * 0 + 0.0), x.new_full((), 0.0), x.new_full((), -0.0)),
    "detach": lambda x: x.detach() + 1,
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(2, 2, 3, 4),) * 3, is_causal=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor", "_ f@(data tensor)", "(a=2 b@data) _"])
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, spec: str) -> None:
    out = OPS[name](shard(X, spec))
    assert all(isinstance(x, ShardedTensor) for x in torch.utils._pytree.tree_leaves(out))
    torch.testing.assert_close(_whole(out), OPS[name](X))


def test_layouts_follow() -> None:
    x, w = shard(X, "b@data _"), shard(torch.ones(12, 6), "_ f@tensor")
    assert sl.typeof(x @ w) == "f32[4@data, 6@tensor]"
    assert sl.typeof((x @ w).t()) == "f32[6@tensor, 4@data]"
    assert sl.typeof((x @ w).view(2, 2, 6)) == "f32[2@data, 2, 6@tensor]"


def test_programs_are_kept() -> None:
    x = shard(X, "b@data _")
    x * 3
    n = len(PROGRAMS)
    x * 3
    x * 4
    assert len(PROGRAMS) == n, "numbers of a pointwise op only enter its arithmetic"
    x * 3.0
    shard(X, "_ f@tensor") * 3
    assert len(PROGRAMS) == n + 2


def test_numbers_that_do_not_change_the_program_change_the_result() -> None:
    x = shard(X, "b@data _")
    for value in (2, 3, 2.5, -0.0, float("inf")):
        torch.testing.assert_close((x * value).full_tensor(), X * value, equal_nan=True)
        torch.testing.assert_close(x.add(x, alpha=value).full_tensor(), X.add(X, alpha=value), equal_nan=True)
        moved = x.addcmul(shard(X, "_ f@tensor"), x, value=value)  # this one moves its operands first
        torch.testing.assert_close(moved.full_tensor(), X.addcmul(X, X, value=value), equal_nan=True)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers() -> None:
    total = shard(X, "b@data _").sum()
    assert float(total) == total.item() == pytest.approx(float(X.sum()))
    assert bool(total > -100)
    assert int(shard(torch.arange(4), "_@data").sum()) == 6
    assert f"{total.item():.3f}" == f"{X.sum():.3f}"
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(shard(X, "b@data _"))


def test_repr() -> None:
    x = shard(X, "b@data f@tensor")
    assert repr(x) == "ShardedTensor(f32[4@data, 12@tensor] on Mesh(data=2, tensor=2))"
    text = """ShardedTensor f32[4@data, 12@tensor] on Mesh(data=2, tensor=2)
spec: b@data f@tensor
""" + repr(X)
    assert str(x) == f"{x}" == text
    assert f"{x.sum():.3f}" == f"{X.sum():.3f}"
    assert "<svg" in x._repr_html_()


# --- writes in place --------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1.5),
    "mul_": lambda x: x.mul_(torch.linspace(0, 1, 12)),
    "copy_": lambda x: x.copy_(torch.ones(4, 12)),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "setitem": lambda x: x.masked_fill_(x > 0, 0.0),
    "addcmul_": lambda x: x.addcmul_(x, x, value=0.5),
    "out=": lambda x: torch.sin(x + 1, out=x),
    "operator": lambda x: x.__iadd__(x),
    "itself": lambda x: x.sub_(x).add_(x, alpha=2).copy_(x + 1),
}


@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor", "_ f@(data tensor)"])
@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, spec: str) -> None:
    expected, x = X.clone(), shard(X, spec)
    before = x.sharding
    WRITES[name](expected)
    assert WRITES[name](x) is x
    assert x.sharding == before
    torch.testing.assert_close(x.full_tensor(), expected)


def test_a_write_does_not_reach_the_tensor_that_was_placed() -> None:
    plain = torch.ones(4)
    shard(plain, "_").add_(1)
    assert torch.equal(plain, torch.ones(4))


def test_a_write_reaches_aliases() -> None:
    x = shard(torch.ones(4), "_@data")
    alias = x.detach()
    x.add_(1)
    alias.mul_(3)
    x.data.add_(1)
    assert float(x.sum()) == float(alias.sum()) == 28


def test_lists() -> None:
    xs = [shard(torch.ones(4), "_@data"), shard(torch.ones(6), "_")]
    torch._foreach_add_(xs, [torch.ones(4), torch.ones(6)])
    assert [float(x.sum()) for x in xs] == [8, 12]


# --- views: a write through one is seen by all ------------------------------------------------------------------------

THROUGH: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[1:].zero_(),
    "element": lambda x: x.view(-1).__setitem__(0, 1.0),
    "transpose": lambda x: x.t().add_(1),
    "view of a view": lambda x: x[1:].t()[2:4].mul_(3),
    "chunks": lambda x: [c.mul_(i) for i, c in enumerate(x.chunk(3, 1))],
    "pieces of a list": lambda x: [c.add_(i) for i, c in enumerate(x.split([5, 7], 1))],
    "rows": lambda x: [row.mul_(i) for i, row in enumerate(x)],
    "setitem int": lambda x: x.__setitem__(1, 5.0),
    "setitem slices": lambda x: x.__setitem__((slice(1, 3), slice(None, None, 2)), torch.ones(6)),
    "setitem mask": lambda x: x.__setitem__(x > 0, 5.0),
    "setitem mask of rows": lambda x: x.__setitem__(torch.tensor([True, False, True, False]), torch.ones(12)),
    "setitem integers": lambda x: x.__setitem__(torch.tensor([0, 2]), torch.ones(12)),
    "setitem itself": lambda x: x.__setitem__(0, x[1]),
    "diagonal": lambda x: x.diagonal().fill_(7.0),
    "column": lambda x: x[:, 3].copy_(torch.ones(4)),
    "row times row": lambda x: x[0].mul_(x[1]),
    "flatten is a view": lambda x: x.flatten()[3:5].zero_(),
    "reshape is a view": lambda x: x.reshape(-1).add_(1),
    "reshape is a copy": lambda x: x.t().reshape(-1).add_(1),
    "contiguous is a copy": lambda x: x.t().contiguous().add_(1),
    "contiguous is itself": lambda x: x.contiguous().add_(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0).add_(1),
    "strided": lambda x: x.as_strided((2, 3), (12, 1), 1).add_(1),
    "detached": lambda x: x.detach()[1].zero_(),
    "data": lambda x: x.data.add_(1),
    "out=": lambda x: torch.add(x[0], 1, out=x[1]),
    "masked_fill_": lambda x: x[1:].masked_fill_(x[1:] > 0, 0.0),
    "in place of itself": lambda x: x.detach().t_().unsqueeze_(0)[0, 2].add_(1),
    "another dtype": lambda x: x[1:].add_(torch.ones(12, dtype=torch.int64)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor", "_ f@(data tensor)", "(a=2 b@data) _"])
@pytest.mark.parametrize("name", THROUGH)
def test_writes_through_views(name: str, spec: str) -> None:
    expected, x = X.clone(), shard(X.clone(), spec)
    before = x.sharding
    old, seen = x.t(), expected.t()
    THROUGH[name](expected)
    THROUGH[name](x)
    assert x.sharding == before
    torch.testing.assert_close(x.full_tensor(), expected)
    torch.testing.assert_close(old.full_tensor(), seen, msg="a view from before the write shows it")


def test_a_write_reaches_views_of_views_and_no_copies() -> None:
    x = shard(torch.zeros(4, 6), "b@data _")
    rows, copy = x[1:], x.clone()
    column = rows[:, 2]
    x.add_(1)
    column.mul_(5)
    assert column.tolist() == [5, 5, 5]
    assert rows.sum().item() == 18 + 12
    assert x[0].tolist() == [1] * 6
    assert copy.sum().item() == 0


def test_views_outlive_their_tensor() -> None:
    view = shard(torch.zeros(4, 6), "b@data _")[1:]
    view[0].add_(2)
    assert view.sum().item() == 12


def test_a_view_that_cannot_be_written_through() -> None:
    with pytest.raises(ShardingError, match=r"a write through aten\.unfold\.default cannot be traced"):
        shard(X.clone(), "b@data _").unfold(1, 3, 3).add_(1)
    x = shard(X, "b@data _")
    assert torch.equal(x.full_tensor(), X), "nothing was written"


OUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, ...]]] = {
    "of the same shape": (lambda x, out: torch.add(x, 1, out=out), (4, 12)),
    "without elements": (lambda x, out: torch.mul(x, 2, out=out), (0,)),
    "beside scratch memory of torch": (lambda x, out: torch.msort(x, out=out), (4, 12)),
    "of an op made of others": (lambda x, out: torch.linalg.det(x[:, :4], out=out), ()),
    "whose shape values decide": (lambda x, out: torch.masked_select(x, x > 0, out=out), (0,)),
    "resized": (lambda x, out: out.resize_(3).zero_(), (0,)),
    "of a product whose batch folds": (lambda x, out: torch.matmul(x.view(4, 4, 3), x[:3, :3], out=out), (4, 4, 3)),
}


@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor"])
@pytest.mark.parametrize("name", OUTS)
def test_out(name: str, spec: str) -> None:
    call, shape = OUTS[name]
    expected, out = torch.ones(shape), shard(torch.ones(shape), P())
    call(X, expected)
    assert call(shard(X, spec), out) is out
    torch.testing.assert_close(out.full_tensor(), expected)


@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor"])
def test_a_list_of_outs(spec: str) -> None:
    outs = [shard(torch.ones(12), "_@tensor") for _ in X]
    assert torch.unbind_copy(shard(X, spec), 0, out=outs) is None
    assert all(torch.equal(out.full_tensor(), row) for out, row in zip(outs, X, strict=True))


ABOVE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rank": lambda x, out: torch.linalg.matrix_rank(x[:, :4], out=out),
    "rank, tol": lambda x, out: torch.linalg.matrix_rank(x[:, :4], 0.5, out=out),
    "rank, tol tensor": lambda x, out: torch.linalg.matrix_rank(x[:, :4], torch.tensor(0.5), out=out),
    "rank, atol": lambda x, out: torch.linalg.matrix_rank(x[:, :4], atol=0.5, rtol=0.1, out=out),
}


@pytest.mark.parametrize("sharded", ["both", "out", "x"])
@pytest.mark.parametrize("name", ABOVE)
def test_ops_that_torch_decides_above_dispatch(name: str, sharded: str) -> None:
    """Torch hands subclasses a new tensor instead of writing to `out`."""
    expected, out = torch.full((), -1), torch.full((), -1)
    ABOVE[name](X, expected)
    x = X if sharded == "out" else shard(X, "b@data f@tensor")
    out = out if sharded == "x" else shard(out, P())
    assert ABOVE[name](x, out) is out
    assert out.item() == expected.item() > 0


@pytest.mark.parametrize("spec", ["...", "i@data _"])
@pytest.mark.parametrize("classes", [-1, 0, 5, 7])
@pytest.mark.parametrize("worst", [-1, 4, 5])
def test_classes_that_do_not_exist_are_refused_as_by_torch(worst: int, classes: int, spec: str) -> None:
    x = torch.tensor([[0, 1], [3, worst]])

    def said(x: Tensor) -> Any:
        try:
            return F.one_hot(x, classes).tolist()
        except RuntimeError as error:
            return str(error)

    assert said(shard(x, spec)) == said(x)


def test_plain_and_fake_tensors_never_come_by() -> None:
    out = torch.full((), -1)
    assert torch.linalg.matrix_rank(torch.eye(3), out=out) is out
    assert out.item() == 3
    with FakeTensorMode():
        assert torch.matmul(torch.empty(4, 4, 3), torch.empty(3, 3), out=torch.empty(4, 4, 3)).shape == (4, 4, 3)


def test_out_refuses_gradients_as_torch_does() -> None:
    x, out = shard(X.clone(), "b@data _").requires_grad_(), shard(torch.empty(4, 4), P())
    with pytest.raises(RuntimeError, match=r"matmul\(\): functions with out="):
        torch.matmul(x, x.mT, out=out)
    with torch.no_grad():
        torch.matmul(x, x.mT, out=out)
    torch.testing.assert_close(out.full_tensor(), X @ X.mT)


@pytest.mark.parametrize("where", [torch.tensor([1, 3]), torch.tensor(2)], ids=["at", "into"])
def test_splitting_where_a_tensor_says(where: Tensor) -> None:
    expected = torch.tensor_split(X, where)
    x = shard(X.clone(), "b@data f@tensor").requires_grad_()
    parts = torch.tensor_split(x, shard(where, P()))
    assert [p.shape for p in parts] == [p.shape for p in expected]
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(parts, expected, strict=True))
    parts[0].sum().backward()
    assert x.grad is not None
    assert x.grad.full_tensor().sum().item() == parts[0].numel()


def test_nothing_of_a_dim_that_is_cut() -> None:
    part = shard(X, "b@data f@tensor").narrow(1, 12, 0)
    assert (part * 2).full_tensor().shape == part.clone().shape == (4, 0)


STRIDED: dict[str, Callable[[Tensor], Any]] = {
    "of a transpose": lambda x: x.t().as_strided((3, 2), (1, 5)),
    "with the offset of a slice": lambda x: x[1:].as_strided((2, 2), (5, 1)),
    "outside of a slice": lambda x: x[1:].as_strided((2, 2), (5, 1), 0),
    "overlapping": lambda x: x.as_strided((3, 3), (1, 1)),
    "from before a write": lambda x: (x.as_strided((3, 3), (1, 1), 2), x.add_(1))[0],
    "of a view of a view": lambda x: x[:, 1][2:].as_strided((2,), (1,)),
    "of a view of a part": lambda x: x.split(4, 1)[1][1:, 2:].as_strided((2,), (1,)),
    "of nothing": lambda x: x[:, 1][:0].as_strided((2,), (1,)),
    "of one that was strided": lambda x: x[1:].as_strided((4, 2), (3, 1))[2:].as_strided((2,), (1,)),
    "of real parts": lambda x: torch.complex(x, -x)[1:].imag[1:].as_strided((2,), (1,)),
    "of a conjugate": lambda x: torch.complex(x, -x)[1:].conj()[1:].as_strided((2,), (1,)),
    "of a conjugate's part": lambda x: torch.complex(x, -x).conj()[1:].imag.as_strided((2,), (1,)),
    "of the part of a strided conjugate": lambda x: torch.complex(x, -x).conj()[1:].as_strided((2,), (1,)).imag,
    "repeated": lambda x: x.as_strided((2, 3), (0, 2)),
    "one element": lambda x: x.as_strided((3,), (0,), 4),
    "filled, as bytes": lambda x: (x.fill_(-1), x.view(torch.int16).as_strided((2,), (1,)))[1],
    "of bytes": lambda x: x[1:].view(torch.int16)[1:].as_strided((2,), (1,)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_shows_the_memory_of_the_owner(name: str) -> None:
    ours, theirs = STRIDED[name](shard(X.clone(), "b@data _")), STRIDED[name](X.clone())
    torch.testing.assert_close(ours.full_tensor(), theirs)
    assert ours.storage_offset() == theirs.storage_offset()


def test_new_data() -> None:
    x, y = shard(torch.zeros(4), "_@data"), shard(torch.ones(6, dtype=torch.float64), "_@tensor")
    view = x[1:]
    x.data = y
    y.add_(1)
    assert (sl.typeof(x), x.dtype, x.tolist()) == ("f64[6@tensor]", torch.float64, [2.0] * 6)
    assert view.tolist() == [0, 0, 0]
    with pytest.raises(ShardingError, match="is set to a plain tensor of shape"):
        x.data = torch.ones(6)


# --- reading ----------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], Any]] = {
    "indices": lambda x: [x[None, ..., 0], x[[0, 2]], x[torch.tensor([1, -1])], x[..., None], x[-1], x[1, 2], x[::2]],
    "masks": lambda x: [x[x > 0], x[torch.tensor([True, False, True, True])], x.masked_select(x < 0)],
    "shapes that values decide": lambda x: [(x > 0).nonzero(), torch.unique((x > 0).long()), torch.where(x > 0)],
    "python values": lambda x: [len(x), x.tolist(), bool(x[0, 0] == 0), x[1, 1].item(), 0.0 in x, [0][x[0, 0].long()]],
    "comparisons": lambda x: [torch.equal(x, x.clone()), torch.allclose(x, x + 1e-9), torch.equal(x, x + 1)],
    "iteration": lambda x: [row.sum() for row in x],
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "dtypes": lambda x: [x.double(), x.half(), x.to(torch.int64), x.bool()],
    "new ones": lambda x: [x.new_tensor([1.0, 2.0]), x.new_zeros(3), torch.zeros_like(x), x.new_full((2,), 3)],
    "lists": lambda x: [torch.cat([x, x]), torch.stack([x, x], 1), torch._foreach_mul([x, x], 2.0)],
    "norms": lambda x: [x.norm(), torch.linalg.vector_norm(x, dim=1), x.var(), x.std(0)],
    "complex": lambda x: [torch.complex(x, x + 1).conj() * 1j, torch.complex(x, x + 1).conj().imag],
    "complex rows": lambda x: [torch.complex(x, -x).logsumexp(d, k) for d in (0, 1, (0, 1)) for k in (False, True)],
    "shapes alone": lambda x: (x + 1).to("meta").shape,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", ["_ _", "b@data f@tensor", "b@(data tensor) _"])
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, spec: str) -> None:
    torch.testing.assert_close(_whole(READS[name](shard(X, spec))), READS[name](X))


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_inference_mode(made: str) -> None:
    before = shard(X.clone(), "b@data _")
    with torch.inference_mode():
        x = shard(X, "b@data _") if made == "inside" else before
        torch.testing.assert_close((x * 2).full_tensor(), X * 2)
        torch.testing.assert_close(x[0].full_tensor(), X[0])
        torch.testing.assert_close(F.linear(x, torch.ones(3, 12)).full_tensor(), X @ torch.ones(12, 3))
        torch.testing.assert_close(
            x.view(2, 2, 12).as_strided((2, 2), (12, 1)).full_tensor(), X.as_strided((2, 2), (12, 1))
        )
        assert x.chunk(2)[0].detach().t().is_inference() == (made == "inside")
        x[1:].detach().add_(1)
        assert x[1:].full_tensor().sum().item() == pytest.approx(X[1:].sum().item() + 36)


# --- gradients --------------------------------------------------------------------------------------------------------


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.layer_norm(F.gelu(x @ w + b) @ v, (6,)), target)


def _mlp() -> tuple[list[Tensor], Tensor, Tensor]:
    params = [torch.randn(12, 8), torch.randn(8), torch.randn(8, 6)]
    return params, torch.randn(4, 12), torch.tensor([0, 5, 2, 2])


SPECS = ["_ ff@tensor", "ff@tensor", "ff@tensor _"]


def test_backward() -> None:
    params, x, target = _mlp()
    plain = [p.clone().requires_grad_() for p in params]
    placed = [shard(p.clone().requires_grad_(), spec) for p, spec in zip(params, SPECS, strict=True)]
    assert all(p.is_leaf and p.requires_grad for p in placed)
    for _ in range(2):  # gradients add up
        expected = mlp(x, *plain, target)
        expected.backward()
        loss = mlp(shard(x, "b@data _"), *placed, shard(target, "b@data"))
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(placed, plain, strict=True):
        assert isinstance(p.grad, ShardedTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        assert p.grad.sharding == p.sharding


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers(optimizer: Any, set_to_none: bool) -> None:
    params, x, target = _mlp()
    plain = [p.clone().requires_grad_() for p in params]
    placed = [shard(p.clone().requires_grad_(), spec) for p, spec in zip(params, SPECS, strict=True)]
    options = {"lr": 0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})}
    for tensors in (plain, placed):
        step = optimizer(tensors, **options)
        for _ in range(2):
            step.zero_grad(set_to_none=set_to_none)
            mlp(x, *tensors, target).backward()
            step.step()
    for p, q in zip(placed, plain, strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)


def test_functional_gradient() -> None:
    params, x, target = _mlp()
    placed = [shard(p, spec) for p, spec in zip(params, SPECS, strict=True)]
    expected = torch.func.grad(mlp, argnums=(1, 2, 3))(x, *params, target)
    found = torch.func.grad(mlp, argnums=(1, 2, 3))(shard(x, "b@data _"), *placed, target)
    torch.testing.assert_close(_whole(found), expected)


def test_gradients_through_writes() -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        y = (x @ w.t()).clone()
        y[1:] = y[1:] * 2
        y[0].mul_(3)
        y.t()[2].add_(w[:, 0].sum())
        return (y**2).sum()

    w = torch.randn(6, 12)
    plain, placed = w.clone().requires_grad_(), shard(w.clone().requires_grad_(), "f@tensor _")
    f(plain, X).backward()
    f(placed, shard(X, "b@data _")).backward()
    torch.testing.assert_close(placed.grad.full_tensor(), plain.grad)


def test_double_backward_hooks_and_retained_gradients() -> None:
    def f(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        h = x.sin()
        h.retain_grad()
        h.register_hook(lambda g: g * 2)
        (g,) = torch.autograd.grad((h * x).sum(), x, create_graph=True)
        (g**2).sum().backward()
        return [x.grad, h.grad]

    torch.testing.assert_close(_whole(f(shard(X, "b@data _"))), f(X))


def test_moving_has_gradients() -> None:
    w = torch.randn(4, 6)
    x = shard(w.clone().requires_grad_(), "b@data _")
    weight = torch.randn(4, 6)
    (x.redistribute("_ f@tensor") * shard(weight, P())).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), weight)
    assert x.grad.sharding == x.sharding
    x.grad = None
    (x.full_tensor() * weight).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), weight)


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "vjp": lambda x: torch.func.vjp(lambda y: y.sin() * y, x)[1](torch.ones_like(x)),
    "jvp": lambda x: torch.func.jvp(lambda y: (y.sin() * y).sum(1), (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: torch.func.jacrev(lambda y: y.sin().sum(0))(x),
    "hessian": lambda x: torch.func.hessian(lambda y: (y**3).sum())(x[0]),
    "vmap": lambda x: torch.func.vmap(lambda row: row.sin().sum())(x),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(lambda row: F.linear(row, x).sin().sum()))(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp calls it
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    torch.testing.assert_close(_whole(TRANSFORMS[name](shard(X, "b@data f@tensor"))), TRANSFORMS[name](X))


def test_pieces_carry_no_marks() -> None:
    """A piece that is only marked as a conjugate, or as negated, would be sent without its mark."""
    z = torch.complex(shard(X, "b@data _"), shard(X, "b@data _"))
    for marked in (z.conj(), z.conj().imag):
        assert not any(s.data.is_conj() or s.data.is_neg() for s in marked.shards)


# --- modules ----------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(12, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


PLACES = {"up.weight": "f@tensor _", "up.bias": "f@tensor", "down.weight": "_ f@tensor", "down.bias": "_@data"}


def _net() -> tuple[Net, Net]:
    """The same network twice: plain, and with placed parameters."""
    torch.manual_seed(0)
    plain, placed = Net(), Net()
    for name, p in plain.named_parameters():
        module, _, last = name.rpartition(".")
        setattr(
            placed.get_submodule(module), last, torch.nn.Parameter(shard(p.detach().clone(), PLACES.get(name, P())))
        )
    return plain, placed


TARGET = torch.tensor([0, 5, 2, 2])


def _loss(net: Net, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), TARGET)


def _checkpointed(net: Net, x: Tensor) -> None:
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    F.cross_entropy(checkpoint(net, x, use_reentrant=False), TARGET).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def _steps(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Net, Tensor], None]:
    def train(net: Net, x: Tensor) -> None:
        optimizer = make(net.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            _loss(net, x).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    return train


def _averaged(net: Net, x: Tensor) -> None:
    other = copy.deepcopy(net)
    _steps(lambda p: torch.optim.SGD(p, lr=0.1))(net, x)
    with torch.no_grad():
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, 0.3).mul_(0.9).add_(theirs, alpha=0.1)


def _stored(net: Net, x: Tensor) -> None:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    for p in net.parameters():
        p.data.zero_()
    net.load_state_dict(torch.load(file, weights_only=True))


def _assigned(net: Net, x: Tensor) -> None:
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()}, assign=True)


MODULES: dict[str, Callable[[Net, Tensor], None]] = {
    "sgd": _steps(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "sgd foreach": _steps(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)),
    "adamw": _steps(lambda p: torch.optim.AdamW(p, amsgrad=True)),
    "adamw foreach": _steps(lambda p: torch.optim.AdamW(p, foreach=True)),
    "checkpointing": _checkpointed,
    "averaging": _averaged,
    "state in a file": _stored,
    "state assigned": _assigned,
    "dtype": lambda net, x: net.to(torch.float64).float().bfloat16().float() and None,
    "frozen": lambda net, x: net.requires_grad_(False) and None,
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    plain, placed = _net()
    before = [p.sharding for p in placed.parameters()]
    MODULES[name](plain, X)
    MODULES[name](placed, shard(X, "b@data _"))
    for p, q in zip(placed.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, torch.nn.Parameter)
        assert (p.dtype, p.requires_grad) == (q.dtype, q.requires_grad)
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=1e-4, atol=1e-5)
    assert [p.sharding for p in placed.parameters()] == before


def test_threads() -> None:
    x = shard(X, "b@data _")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: (x * i).sum().item(), range(16)))
    assert found == pytest.approx([float(X.sum() * i) for i in range(16)], rel=1e-5)


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks() -> list[float]:
    with Mesh(data=2):
        x, w = shard(X.clone(), "b@data _"), shard(torch.ones(12, 6).requires_grad_(), "_ f@data")
        view = x.t()
        x[1:].mul_(2)
        y = F.layer_norm(x @ w, (6,)) + view.t()[:, :6]
        (y**2).sum().backward()
        again = pickle.loads(pickle.dumps(x))
        return [y.sum().item(), w.grad.sum().item(), again.sum().item(), x[x > 0].sum().item()]


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_compute_what_virtual_devices_do() -> None:
    assert only(run_ranks(on_ranks, 2)) == pytest.approx(on_ranks(), rel=1e-5)


# --- errors -----------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "address": (lambda x: x.data_ptr(), r"has no address(.|\n)*save full tensors, \{name: x\.full_tensor\(\)"),
    "resize": (lambda x: x.resize_(3), "keeps its size"),
    "storage": (lambda x: x.set_(), "has no storage of its own"),
    "sparse": (lambda x: x.to_sparse(), "is strided"),
    "wrong out=": (lambda x: torch.add(x, 1, out=x.new_zeros(3)), "that it does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ShardingError, match=text):
        call(shard(X, "b@data _"))


@pytest.mark.parametrize(
    "call", [lambda x: x @ x, lambda x: x + torch.ones(5), lambda x: x.view(5), lambda x: x.t().view(-1)]
)
def test_errors_of_torch_are_torchs(call: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError) as expected:
        call(X)
    with pytest.raises(type(expected.value)) as found:
        call(shard(X, "b@data _"))
    assert not isinstance(found.value, ShardingError)


ALIKE: dict[str, Callable[[Tensor], Any]] = {
    "layer_norm": lambda x: torch.native_layer_norm(x, (12,), torch.ones(12), None, 1e-5),
    "layer_norm of 16 bits": lambda x: F.layer_norm(x.bfloat16(), (12,)),
    "square": lambda x: x + torch.ones(len(x), 12),
    "column": lambda x: x * torch.ones(len(x), 1),
    "reduced": lambda x: x.amax(1, keepdim=True),
    "softmax": lambda x: F.log_softmax(x, 1),
    "two dtypes": lambda x: (F.log_softmax(x.double(), 1), F.log_softmax(x, 1)),
    "gelu": F.gelu,
    "transposed": lambda x: F.gelu(x.t()),
    "top": lambda x: x.topk(3),
    "to double": lambda x: x.to(torch.float64),
    "compare": lambda x: (x > 0, torch.where(x > 0, x, 1)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ALIKE)
def test_first_calls_in_other_sizes(name: str) -> None:
    """What one call gave is taken for the next one's: also where sizes coincide, are 1 or 0, or do not divide."""
    for n in (4, 6, 12, 2, 1, 5, 0, 8):
        x = torch.arange(12.0 * n).view(n, 12).sin()
        for spec in ("b@data _", "b@(data tensor) _", "_ _@data"):
            expected, found = ALIKE[name](x), ALIKE[name](shard(x, spec))
            pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
            for want, got in pairs:
                assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
                torch.testing.assert_close(got.full_tensor(), want)


def test_torch_is_asked_once_for_calls_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(prepare, "infer_results", lambda op, *rest: (asked.append(op), meta(op, *rest))[1])
    for n in (10, 14, 22):
        F.layer_norm(shard(torch.ones(n, 26), "b@data _"), (26,))
    assert asked == [torch.ops.aten.native_layer_norm.default]


def test_a_call_like_one_that_ran_may_still_be_wrong() -> None:
    """The op itself says so, each time: a size that is wrong is not cut, so every piece has it."""
    x = torch.arange(40.0).view(4, 10)
    shard(x, "b@data _").topk(9)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not in range") as found:
            shard(x[:, :8].contiguous(), "b@data _").topk(9)
        assert not isinstance(found.value, ShardingError)


def test_two_meshes() -> None:
    x = shard(X, "b@data _")
    with Mesh(data=4):
        y = shard(X, "b@data _")
    with pytest.raises(ShardingError, match="all tensors of a program live on one mesh"):
        x + y


def test_closed_over() -> None:
    x = shard(X, "b@data _")
    same = sl.jit(lambda y: x + y)(X)
    assert torch.equal(same.full_tensor(), X + X)


@pytest.mark.parametrize(
    "value", [torch.tensor(7), torch.tensor(7.0, dtype=torch.float64), torch.tensor(True)], ids=str
)
def test_a_mask_takes_one_value_of_another_dtype(value):
    whole = torch.arange(12.0).reshape(4, 3)
    with sl.Mesh(data=2):
        x = sl.shard(whole, "a@data _")
        x[x > 3] = value
    whole[whole > 3] = value
    assert torch.equal(x.full_tensor(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_the_last_batch_of_an_evaluation(jitted: bool, dtype: torch.dtype) -> None:
    """It may be too small for all devices; parameters may be of another dtype."""
    norm, x = torch.nn.BatchNorm1d(6).eval(), torch.randn(5, 6, dtype=dtype)
    norm.running_mean.normal_()
    want = norm(x)
    want.sum().backward()
    grads = [p.grad.clone() for p in norm.parameters()]
    norm.zero_grad()
    with Mesh(a=4):
        out = (sl.jit(norm) if jitted else norm)(shard(x, "n@a c"))
        out.sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    for p, grad in zip(norm.parameters(), grads, strict=True):
        torch.testing.assert_close(_whole(p.grad), grad)


def test_conjugates_say_that_they_are() -> None:
    z = torch.complex(X, -X)
    ours = shard(z, "b@data _")
    for view in (
        lambda z: z,
        lambda z: z.conj(),
        lambda z: z.conj()[1:],
        lambda z: z.conj().conj(),
        lambda z: z.conj().imag,
        lambda z: z.conj().real,
        lambda z: z.mH,
        lambda z: z.conj() * 1,
        lambda z: z.conj().resolve_conj(),
    ):
        assert (view(ours).is_conj(), view(ours).is_neg()) == (view(z).is_conj(), view(z).is_neg())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_whose_input_needs_no_gradient(dtype: torch.dtype) -> None:
    """Its backward has no tensor for the first result, and is cut along the normalized dim."""
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 6, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(8).to(dtype)
    with Mesh(data=2, tensor=2):
        mine = [sl.shard(w, "e@tensor").requires_grad_(), sl.shard(b, "e@tensor").requires_grad_()]
        F.layer_norm(sl.shard(x, "_ _ e@tensor"), (8,), *mine).square().sum().backward()
    plain = [w.clone().requires_grad_(), b.clone().requires_grad_()]
    F.layer_norm(x, (8,), *plain).square().sum().backward()
    for p, q in zip(mine, plain, strict=True):
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_refused(bag: bool) -> None:
    look = F.embedding_bag if bag else F.embedding
    with Mesh(data=2):
        w = sl.shard(torch.randn(5, 3), "v@data d").requires_grad_()
        out = look(sl.shard(torch.tensor([[0, 1, 4], [2, 2, 3]]), "_ _"), w, sparse=True)
        with pytest.raises(sl.ShardingError, match=r"its result of shape \[5, 3\] is sparse_coo"):
            out.sum().backward()


def test_gradients_of_what_has_no_elements() -> None:
    with Mesh(data=2, tensor=2):
        x = sl.shard(torch.randn(7), "_").requires_grad_()
        nothing = sl.shard(x.narrow(0, 5, 0), "a@(tensor data)")
        (torch.cat([-nothing[0:], nothing[:0]]).sum() + x.sum()).backward()
        assert isinstance(x.grad, sl.ShardedTensor)
        assert torch.equal(x.grad.full_tensor(), torch.ones(7))
