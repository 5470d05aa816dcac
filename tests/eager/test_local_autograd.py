"""A tensor's shards as plain tensors, and tensors made of plain ones: values and gradients, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.sharding.layout import Layout
from tests.helpers.ranks import only, run_ranks

W = torch.arange(6.0, dtype=torch.float64).view(3, 2) / 7 + 0.3
X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 11 - 0.6
FACTOR = torch.arange(10.0, dtype=torch.float64).view(5, 2) - 3

# axes of the mesh, the spec of X @ W, given sizes
PLACES: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({"data": 1}, "r@data _", {}),
    ({"data": 2}, "r@data _", {}),
    ({"data": 4}, "r@data _", {}),  # uneven: 2, 2, 1, 0 rows
    ({"data": 2}, "r@data _", {"sizes": {"r": [1, 4]}}),
    ({"data": 3}, "r _", {}),  # copies
    ({"data": 2, "tensor": 2}, "r@data _", {}),  # copies of each shard
    ({"data": 2, "tensor": 2}, "r@tensor c@data", {}),
    ({"data": 2, "tensor": 2}, "r@(data tensor) _", {}),
]
PLACE = pytest.mark.parametrize(("axes", "spec", "how"), PLACES, ids=lambda x: str(x).replace(" ", ""))


def _cut(value: Tensor, spec: str, how: dict[str, Any]) -> list[Tensor]:
    """The plain shards of a value, computed one by one, with its history."""
    like: Any = sl.shard(torch.empty(value.shape), spec, **how)
    return [like.sharding.scatter(value * 1, shard.coords) for shard in like.shards]


def _grads(loss: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, and that of its square: a double backward."""
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), w, retain_graph=True)
    return grad.detach(), second


@PLACE
def test_what_made_shards_gets_the_gradient(axes: dict[str, int], spec: str, how: dict[str, Any]) -> None:
    def loss(joined: Tensor) -> Tensor:
        return (joined.pow(3) * FACTOR).sum()

    w = W.clone().requires_grad_()
    want = _grads(loss(X @ w), w)
    with Mesh(**axes):
        joined = sl.from_local(_cut(X @ w, spec, how), spec, **how)
        assert torch.equal(joined.full_tensor(), X @ w)
        assert not joined.is_leaf
        torch.testing.assert_close(_grads(loss(joined).full_tensor(), w), want)


@PLACE
def test_shards_have_the_history_of_their_tensor(axes: dict[str, int], spec: str, how: dict[str, Any]) -> None:
    w = W.clone().requires_grad_()

    def loss(shards: list[Tensor]) -> Tensor:
        return torch.stack([(k + 1) * shard.pow(3).sum() for k, shard in enumerate(shards)]).sum()

    with Mesh(**axes):
        want = _grads(loss(_cut(X @ w, spec, how)), w)
        placed: Any = sl.shard(X @ w, spec, **how)
        torch.testing.assert_close(_grads(loss([shard.data for shard in placed.shards]), w), want)
        first = _grads(loss(_cut(X @ w, spec, how)[:1]), w)
        torch.testing.assert_close(_grads(loss([placed.to_local()]), w), first)
        leaf: Any = sl.shard(X.clone().requires_grad_(), spec, **how)
        leaf.to_local().sum().backward()
        assert leaf.grad.sharding == leaf.sharding
        again = sl.from_local([2 * shard.data for shard in placed.shards], spec, **how)
        torch.testing.assert_close(_grads(again.pow(2).sum().full_tensor(), w), _grads(4 * (X @ w).pow(2).sum(), w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_pieces_that_are_leaves_get_their_gradients(dtype: torch.dtype) -> None:
    pieces = [torch.ones(2, 2, dtype=dtype, requires_grad=True), torch.ones(2, 2, dtype=dtype)]
    with Mesh(data=2):
        joined = sl.from_local(pieces, "r@data _")
        joined.retain_grad()
        seen: list[Any] = []
        pieces[0].register_hook(lambda grad: seen.append(grad.clone()))
        (joined * 3).abs().sum().backward()
    assert pieces[0].grad is not None
    assert torch.equal(pieces[0].grad, torch.full((2, 2), 3, dtype=dtype))
    assert torch.equal(seen[0], pieces[0].grad)
    assert pieces[1].grad is None
    pieces[0].grad.zero_()
    assert joined.grad is not None
    assert bool((joined.grad.full_tensor() == 3).all()), "a gradient has memory of its own"


def test_copies_share_the_gradient_of_their_piece() -> None:
    w, piece = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with Mesh(data=2):
        sl.from_local([w, w], "_").sum().backward()
        assert w.grad is not None
        assert w.grad.tolist() == [1, 1]
        sl.from_local([piece, piece.detach()], "_").sum().backward()
        assert piece.grad is not None
        assert piece.grad.tolist() == [1, 1], "a copy without history takes none of it"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch makes its duals with it
def test_forward_mode_follows_shards() -> None:
    def through(x: Tensor) -> Tensor:
        placed: Any = sl.shard(x * 2, "r@data _")
        return sl.from_local([shard.data * 3 for shard in placed.shards], "r@data _").full_tensor()

    with Mesh(data=2, tensor=2), torch.autograd.forward_ad.dual_level():
        out = torch.autograd.forward_ad.unpack_dual(through(torch.autograd.forward_ad.make_dual(X, X + 1)))
    torch.testing.assert_close(out.primal, 6 * X)
    torch.testing.assert_close(out.tangent, 6 * (X + 1))


def test_several_cotangents_at_once() -> None:
    w = W.clone().requires_grad_()
    with Mesh(data=2):
        rows: Any = sl.shard(X @ w, "r@data _")
        out = sl.from_local([shard.data.pow(2) for shard in rows.shards], "r@data _").full_tensor().sum(0)
    want = torch.autograd.grad((X @ w).pow(2).sum(0), w, torch.eye(2, dtype=torch.float64), is_grads_batched=True)
    got = torch.autograd.grad(out, w, torch.eye(2, dtype=torch.float64), is_grads_batched=True)
    torch.testing.assert_close(got, want)


def test_without_gradients_nothing_has_a_history() -> None:
    x = X.clone().requires_grad_()
    with Mesh(data=2), torch.no_grad():
        assert not sl.from_local([x * 1, x * 1], "_ _").requires_grad
        placed: Any = sl.shard(x, "r@data _")
        assert placed.requires_grad
        assert placed.to_local() is placed.shards[0].data
        assert not placed.to_local().requires_grad


def test_addends_and_other_placements_are_refused() -> None:
    with Mesh(data=2) as mesh:
        x: Any = sl.shard(X.clone().requires_grad_(), "r@data _")
        with pytest.raises(sl.ShardingError, match=r"rank 0 has a shard of shape \[3, 3\], and a gradient of \[5, 3\]"):
            x.to_local(grad_placements=[Replicate()])
        with pytest.raises(sl.ShardingError, match="2 placements for Mesh"):
            x.to_local(grad_placements=[Shard(0), Replicate()])
        addends = _partial(mesh, "2 +data", [torch.ones(2)] * 2)
        with pytest.raises(sl.ShardingError, match="the gradient of a partial sum belongs to the sum"):
            addends.to_local()
        assert addends.detach().to_local().tolist() == [1, 1]
        whole: Any = sl.shard(torch.ones(2, requires_grad=True), "_")
        (2 * whole.to_local(grad_placements=[Partial()])).sum().backward()
        assert whole.grad.full_tensor().tolist() == [2, 2]


READS: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda x: x.to_local().sum(),
    "shards": lambda x: x.shards[0].data.sum(),
    "full_tensor": lambda x: x.full_tensor().sum(),
    "redistribute": lambda x: x.redistribute("_").sum(),
}


@pytest.mark.parametrize("name", READS)
def test_a_program_makes_no_constant_of_a_tensor_that_it_closes_over(name: str) -> None:
    with Mesh(data=2):
        x = sl.shard(torch.ones(4), "n@data")
        with pytest.raises(sl.ShardingError, match=rf"the traced function reads \.{name} of a tensor"):
            sl.jit(lambda y: y + READS[name](x))(torch.ones(2))
        number = sl.shard(torch.ones(()), "")
        with pytest.raises(sl.ShardingError, match="needs the value of"):
            sl.jit(lambda y: y * float(number))(torch.ones(2))


def test_from_local_is_refused_in_a_program() -> None:
    with Mesh(data=2), pytest.raises(sl.ShardingError, match=r"from_local.* is in a traced function"):
        sl.jit(lambda x: sl.from_local([x, x], "_"))(torch.ones(2))


def _against_dtensor() -> list[tuple[str, list[Tensor]]]:
    """Each door and DTensor's, with the gradients that this rank's plain tensors get."""
    rank, out = dist.get_rank(), []
    with Mesh(data=2, tensor=2) as mesh:
        for placements, spec in [
            ([Shard(0), Replicate()], "r@data _"),
            ([Replicate(), Shard(1)], "_ c@tensor"),
            ([Replicate(), Replicate()], "_ _"),
        ]:
            whole = torch.arange(16.0).view(4, 4)
            piece = sl.shard(whole, spec).to_local() * 1  # type: ignore[attr-defined]
            mine, theirs = piece.clone().requires_grad_(), piece.clone().requires_grad_()
            sl.from_local(mine * 2, spec).pow(2).sum().backward()
            DTensor.from_local(theirs * 2, mesh.device_mesh, placements).pow(2).sum().backward()
            out.append((f"from_local {spec}", [mine.grad, theirs.grad]))

            ours: Any = sl.shard(whole.clone().requires_grad_(), spec)
            dtensor = distribute_tensor(whole, mesh.device_mesh, placements).requires_grad_()
            for x in (ours, dtensor):
                (x.to_local().pow(2) * 3).sum().backward()
            out.append((f"to_local {spec}", [ours.grad.full_tensor(), dtensor.grad.full_tensor()]))

            if spec == "_ _":
                ours.grad = dtensor.grad = None
                partial = [Partial(), Partial()]
                for x in (ours, dtensor):
                    (x.to_local(grad_placements=partial) * (rank + 1)).sum().backward()
                out.append(("grad_placements", [ours.grad.full_tensor(), dtensor.grad.full_tensor()]))

            ours.grad = None
            sl.to_dtensor(ours * 2).pow(2).sum().to_local().backward()
            out.append((f"to_dtensor {spec}", [ours.grad.full_tensor(), 8 * whole]))
            dtensor.grad = None
            back = sl.from_dtensor(dtensor * 2, mesh)
            back.pow(2).sum().backward()
            out.append((f"from_dtensor {spec}", [dtensor.grad.full_tensor(), 8 * whole]))
    return out


@pytest.mark.long
@pytest.mark.ranks
def test_gradients_on_ranks_are_those_of_dtensor() -> None:
    for results in run_ranks(_against_dtensor, 4):
        for door, (mine, theirs) in results:
            assert torch.equal(mine, theirs), door


def _partial_as_dtensor() -> list[float]:
    with Mesh(data=2) as mesh:
        layout = Layout.parse("2 +data", mesh.axes)
        x = sl.ShardedTensor([torch.full((2,), dist.get_rank() + 1.0)], layout, mesh)
        return [*sl.to_dtensor(x).full_tensor().tolist(), *x.redistribute("_").to_local().tolist(), *x.tolist()]


def _partial(mesh: Mesh, text: str, addends: list[Tensor]) -> Any:
    layout = Layout.parse(text, mesh.axes)
    return sl.ShardedTensor([addends[d] for d in range(mesh.size)], layout, mesh, requires_grad=True)


@pytest.mark.parametrize(
    "text", ["2 +data", "2 +(data tensor)", "2 +tensor +data", "2 max+data", "2 min+(data tensor)"]
)
@pytest.mark.parametrize("spec", ["_", "_@data", "_@(tensor data)"])
def test_a_partial_sum_is_added_up_where_it_is_redistributed(text: str, spec: str) -> None:
    with Mesh(data=2, tensor=2) as mesh:
        x = _partial(mesh, text, [torch.tensor([i, 1.0]) for i in ([0, 0, 2, 2] if "tensor" not in text else range(4))])
        want = x.detach().full_tensor()
        moved = x.redistribute(spec)
        assert torch.equal(moved.full_tensor(), want)
        if "m" not in text:
            (moved * torch.tensor([1.0, 5.0])).sum().backward()
            assert x.grad.full_tensor().tolist() == [1, 5]


@pytest.mark.ranks
def test_a_partial_sum_becomes_a_dtensor_of_one() -> None:
    assert only(run_ranks(_partial_as_dtensor, 2)) == [3] * 6


def test_pieces_without_values_are_refused() -> None:
    x = torch.ones(4)
    with Mesh(data=2):
        with pytest.raises(
            ShardingError, match=r"inside a transform of torch\.func\n.*\nRemedy: put from_local in front"
        ):
            torch.func.grad(lambda x: sl.from_local([x[:2], x[2:]], "b@data").full_tensor().sum())(x)
        with pytest.raises(ShardingError, match="the shards are on cpu and meta"):
            sl.from_local([x[:2], torch.ones(2, device="meta")], "b@data")
