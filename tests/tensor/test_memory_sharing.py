"""Whose memory is whose: nothing that is written elsewhere shows in a ShardedTensor, and the other way round."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError
from shardlib.sharding.layout import Layout
from tests.helpers.oracle import whole
from tests.helpers.ranks import run_ranks
from tests.helpers.training import step

aten = torch.ops.aten
X = torch.arange(48.0).view(8, 6)


@pytest.fixture(params=[{"data": 2, "tensor": 2}, {"data": 1, "tensor": 1}], ids=["2x2", "1x1"])
def mesh(request: Any) -> Iterator[Mesh]:
    with Mesh(request.param) as mesh:
        yield mesh


def _fills(x: ShardedTensor) -> bool:
    """Whether no piece keeps more memory alive than it shows."""
    return all(s.data.untyped_storage().nbytes() == s.data.numel() * s.data.itemsize for s in x.shards)


# --- placing ----------------------------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: X.clone(),
    "transposed": lambda: X.t().contiguous().t(),
    "a part of more": lambda: torch.cat([X, X])[8:],
    "expanded": lambda: X[:1].clone().expand(8, 6),
    "conjugated": lambda: X.to(torch.complex64).conj(),
    "of numpy": lambda: torch.from_numpy(np.arange(48.0).reshape(8, 6)),
    "a parameter": lambda: torch.nn.Parameter(X.clone()),
    "computed": lambda: X.clone().requires_grad_() * 1,
}
SPECS = ["_ _", "_@data _", "_ _@tensor", "_@(data tensor) _", "_@data _@tensor", "(_=2 _=4@data) _", "_@data=[3 5] _"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("source", SOURCES)
def test_writing_to_what_was_placed_changes_nothing(source: str, spec: str) -> None:
    x = SOURCES[source]()
    before = x.detach().clone()
    with Mesh(data=2, tensor=2):
        placed = sl.shard(x, spec)
    assert isinstance(placed, ShardedTensor)
    assert _fills(placed)
    (x.detach() if source != "expanded" else x._base).fill_(-1)  # type: ignore[union-attr]
    assert torch.equal(placed.full_tensor().detach(), before)
    with torch.no_grad():
        placed.mul_(2)
    assert bool((x.detach() == -1).all())


def test_a_buffer_that_is_filled_again_and_again(mesh: Mesh) -> None:
    buffer, xs = torch.zeros(4, 2), []
    for i in range(3):
        buffer.fill_(i)
        xs.append(sl.shard(buffer, "b@data e"))
    assert [float(x.full_tensor().max()) for x in xs] == [0, 1, 2]


def test_gradients_do_not_share_what_backward_is_given(mesh: Mesh) -> None:
    x = sl.shard(X, "_ _").requires_grad_()
    given = torch.ones(8, 6)
    x.full_tensor().backward(given)
    given.fill_(5)
    assert torch.equal(x.grad.full_tensor(), torch.ones(8, 6))


def test_donated_it_is_taken_over(mesh: Mesh) -> None:
    x = X.clone()
    kept = sl.shard(x, "_ _", donate=True)
    assert kept.to_local().data_ptr() == x.data_ptr()
    part = sl.shard(x[:4], "_ _", donate=True)
    assert part.to_local().data_ptr() != x.data_ptr(), "it would keep the rest alive"
    step = sl.jit(lambda w: w * 2, donate_argnums=0)
    step(kept)
    assert torch.equal(x, X), "its memory is not written over while somebody holds it"
    assert sl.jit(lambda w: sl.shard(w, "_@data _", donate=True) + 1)(x).shape == x.shape


# --- results of jit ---------------------------------------------------------------------------------------------------

CLOSED = torch.ones(8, 6)
RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "t": lambda x: x.t(),
    "view": lambda x: x.view(48),
    "reshape": lambda x: x.reshape(2, 4, 6),
    "flatten": lambda x: x.flatten(),
    "slice": lambda x: x[2:4],
    "select": lambda x: x[3],
    "expand": lambda x: x.unsqueeze(0).expand(1, 8, 6),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "expand_as": lambda x: x.expand_as(x),
    "real": lambda x: x.real,
    "resolve_conj": lambda x: x.resolve_conj(),
    "dropout of nothing": lambda x: torch.nn.functional.dropout(x, 0.0, training=False),
    "squeeze": lambda x: x.squeeze(),
    "a part, copied": lambda x: x.chunk(2)[0].clone(),
    "chunks": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2, 1),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [3, 5]),
    "lift": lambda x: aten.lift(x),
    "lift_fresh": lambda x: aten.lift_fresh(x),
    "annotated": lambda x: sl.shard(x, "_ _"),
    "annotated and cut": lambda x: sl.shard(x, "_@data _"),
    "closed over": lambda x: (x + 1, CLOSED),
    "a part of what is closed over": lambda x: (x + 1, CLOSED[1:]),
    "several of one": lambda x: (x, x.t(), x[1:], (y := x * 2), y.t(), y[2:]),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", ["plain", "parameter", "sharded", "cut"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_have_memory_of_their_own(mesh: Mesh, name: str, kind: str) -> None:
    fn, plain = RESULTS[name], X.clone()
    CLOSED.fill_(1)
    given: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: plain,
        "parameter": lambda: torch.nn.Parameter(plain),
        "sharded": lambda: sl.shard(plain, "_ _"),
        "cut": lambda: sl.shard(plain, "_@data _@tensor"),
    }
    x = given[kind]()
    out = sl.jit(fn)(x)
    leaves: list[ShardedTensor] = list(out) if isinstance(out, tuple | list) else [out]
    wanted = [t.clone() for t in pytree.tree_leaves(fn(X.clone()))]
    theirs = {s.data.untyped_storage().data_ptr() for leaf in leaves for s in leaf.shards}
    mine = [x.to_local()] if isinstance(x, ShardedTensor) else [plain]
    assert not theirs & {t.untyped_storage().data_ptr() for t in (*mine, CLOSED)}
    with torch.no_grad():
        plain.fill_(-7)
        CLOSED.fill_(-7)
        for i, leaf in enumerate(leaves):
            assert torch.equal(leaf.full_tensor(), wanted[i])
            leaf.fill_(-9)  # seen by no other result
    if isinstance(x, ShardedTensor):
        assert torch.equal(x.full_tensor(), X)


STRIDES: dict[str, Callable[[Tensor], Any]] = {
    **RESULTS,
    "repeated": lambda x: x[:, :1].expand(8, 6),
    "every other": lambda x: x[:, ::2] * 1,
    "turned, and written": lambda x: (x + 1).t().mul_(2),
    "filled": lambda x: torch.empty(6, 8).t().copy_(x),
    "sorted": lambda x: x.t().sort(0),
    "channels last": lambda x: x.view(1, 2, 4, 6).to(memory_format=torch.channels_last) + 1,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(2, 4, 2, 3).transpose(1, 2)] * 3),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", ["_ _", "_@data _@tensor"])
@pytest.mark.parametrize("name", STRIDES)
def test_results_have_the_strides_of_one_device(mesh: Mesh, name: str, spec: str) -> None:
    fn = STRIDES[name]
    found = pytree.tree_leaves(sl.jit(fn)(sl.shard(X, spec)))
    for x, y in zip(found, pytree.tree_leaves(fn(X.clone())), strict=True):
        assert x.stride() == y.stride()
        assert x.is_contiguous() == y.is_contiguous()
        assert torch.equal((x + 1).full_tensor(), y + 1)
        assert torch.equal(x.full_tensor(), y)
        assert x.full_tensor().stride() == y.clone().stride()


def test_a_reshape_of_a_result_copies_where_one_device_copies(mesh: Mesh) -> None:
    y = sl.jit(lambda x: x.t())(X.clone())
    y.reshape(-1).zero_()
    assert torch.equal(y.full_tensor(), X.t())
    y.t().view(-1).zero_()
    assert not y.full_tensor().any()


def test_strides_of_gradients_are_those_of_their_tensors(mesh: Mesh) -> None:
    w = sl.shard(X, "_@data _").t().detach().requires_grad_()
    loss = sl.jit(lambda w: (w * 2).sum())
    loss(w).backward()
    loss(w).backward()
    assert w.grad is not None
    assert w.grad.stride() == w.stride() == (1, 6)


def test_what_lies_between_the_elements_of_a_result_is_not_there(mesh: Mesh) -> None:
    y = sl.jit(lambda x: x[:, ::2])(X.clone())
    with pytest.raises(ShardingError, match=r"a result has memory of its own[\s\S]*contiguous"):
        y.as_strided((2, 2), (1, 1))
    with pytest.raises(ShardingError, match="shows every element once"):
        sl.jit(lambda x: x[:, :1].expand(8, 6))(X).add_(1)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_that_is_returned_twice_is_one(mesh: Mesh, requires_grad: bool) -> None:
    x = sl.shard(X, "_@data _").requires_grad_(requires_grad)
    a, rest = sl.jit(lambda x: ((y := x * 2), {"again": [y, x + 1]}))(x)
    assert a is rest["again"][0]
    if requires_grad:
        (a.sum() + 3 * rest["again"][0].sum()).backward()
        assert x.grad is not None
        assert torch.equal(x.grad.full_tensor(), torch.full((8, 6), 8.0))
    a, b = sl.jit(lambda x: (x, x), out_specs=("_@data _", "_ _"))(X)
    assert (a.sharding == b.sharding) == (a is b) == (mesh.size == 1)


def test_donated_memory_is_handed_on_without_a_copy(mesh: Mesh) -> None:
    step = sl.jit(lambda w, g: (w, w + g), donate_argnums=0)
    w = sl.jit(lambda x: x * 1)(X)
    at = w.to_local().data_ptr()
    out, more = step(w, torch.ones(8, 6))
    assert out.to_local().data_ptr() == at
    assert torch.equal(out.full_tensor(), X)
    assert torch.equal(more.full_tensor(), X + 1)


def test_moving_to_fewer_bytes_frees_the_rest(mesh: Mesh) -> None:
    assert _fills(sl.shard(X, "_ _").redistribute("_@data _@tensor"))


# --- what is written over while a program runs ------------------------------------------------------------------------

SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [3, 5]),
    "chunk": lambda x: x.chunk(2),
    "lift": lambda x: [aten.lift(x)],
    "lift_fresh": lambda x: [aten.lift_fresh(x)],
    "detach": lambda x: [x.detach()],
    "unbind": lambda x: x.unbind(1),
    "diagonal": lambda x: [x.diagonal()],
    "unfold": lambda x: [x.unfold(0, 2, 2)],
    "as_strided": lambda x: [x.as_strided((4, 3), (12, 2))],
    "view_as": lambda x: [x.view_as(x)],
    "swapaxes": lambda x: [x.swapaxes(0, 1)],
    "reshape": lambda x: [x.reshape(4, 12)],
    "reshape of a transpose": lambda x: [x.t().reshape(48)],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["plain", "parameter", "sharded"])
@pytest.mark.parametrize("name", SPLITS)
def test_arguments_are_not_written_over(mesh: Mesh, name: str, kind: str) -> None:
    split, plain = SPLITS[name], X.clone()
    make: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda x: x,
        "parameter": torch.nn.Parameter,
        "sharded": lambda x: sl.shard(x, "_@data _"),
    }
    x = make[kind](plain)
    fn = lambda x: [(c + 1) * 2 for c in split(x)]
    found = sl.jit(fn)(x)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(found, fn(X), strict=True))
    assert torch.equal(plain, X)
    assert torch.equal(sl.jit(lambda x: x * 1)(x).full_tensor(), X)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPLITS)
def test_what_is_read_again_is_not_written_over(mesh: Mesh, name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 1 + 0.5
        parts = [c.exp() for c in SPLITS[name](y)]
        return y.sum() + parts[0].sum()

    assert torch.allclose(sl.jit(fn)(X / 48).full_tensor(), fn(X / 48))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", [n for n in SPLITS if n not in ("lift_fresh", "unfold", "reshape of a transpose")])
def test_writes_through_views_that_say_nothing_are_seen(mesh: Mesh, name: str, jitted: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 1
        SPLITS[name](y)[0].add_(100)
        return y

    found = sl.jit(fn)(X) if jitted else fn(sl.shard(X, "_@data _"))
    assert torch.equal(found.full_tensor(), fn(X))


def test_the_only_member_of_a_group_keeps_what_it_has() -> None:
    x = X.clone()
    with Mesh(a=1, b=2):
        step = sl.shard_map(lambda q: sl.psum(q, "a") + 1, in_specs=(P(),), out_specs=P())
        assert torch.equal(sl.jit(step)(x).full_tensor(), X + 1)
    assert torch.equal(x, X)


# --- handing out ------------------------------------------------------------------------------------------------------

OUT: dict[str, Callable[[ShardedTensor], Tensor]] = {
    "full_tensor": lambda x: x.full_tensor(),
    "redistributed": lambda x: x.redistribute("_ _").full_tensor(),
}


@pytest.mark.parametrize("spec", ["_ _", "_@data _", "_@data _@tensor"])
@pytest.mark.parametrize("name", OUT)
def test_what_is_handed_out_may_be_written_to(mesh: Mesh, name: str, spec: str) -> None:
    x = sl.shard(X, spec)
    OUT[name](x).fill_(3)
    assert torch.equal(x.full_tensor(), X)


def test_an_array_of_values_is_not_written_to(mesh: Mesh) -> None:
    x = sl.shard(X, "_@data _")
    for array in (x.numpy(), np.asarray(x), x.detach().numpy(force=True)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert x.numpy().copy().flags.writeable


CONJUGATES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda z: z.conj().mul_(2),
    "imag": lambda z: z.conj().imag.fill_(2.0),
    "real": lambda z: z.conj()[1:].real.mul_(2.0),
    "transposed": lambda z: z.mH.imag[0].add_(z.mH.imag[0]),
    "twice": lambda z: z.conj().conj().imag.fill_(2.0),
    "resolved": lambda z: torch.view_as_real(z.conj().resolve_conj()).fill_(1.0),
    "a part resolved": lambda z: z.conj()[1:].imag.resolve_neg().fill_(2.0),
    "negated, resolved": lambda z: torch._neg_view(z.real).resolve_neg().fill_(2.0),
    "negated twice": lambda z: torch._neg_view(z.conj().imag).resolve_neg().fill_(2.0),
    "filled": lambda z: torch.view_as_real(z).__setitem__(..., 1.0),
    "from a transpose": lambda z: torch.view_as_real(z).copy_(torch.ones(2, *z.shape).movedim(0, -1)),
    "pairs, conjugated": lambda z: torch.view_as_complex(torch.view_as_real(z)).conj().add_(1),
    "not negated": lambda z: z.conj().real.resolve_neg().fill_(2.0),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CONJUGATES)
def test_writes_through_conjugates(mesh: Mesh, name: str, jitted: bool) -> None:
    write, expected = CONJUGATES[name], torch.complex(X.sin(), X.cos())
    z = sl.shard(expected, "_@data _")
    write(expected)
    if jitted:
        sl.jit(lambda z: (write(z), None)[1])(z)
    else:
        write(z)
    assert torch.equal(z.full_tensor(), expected)


# --- pieces that do not fit -------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "too few": (lambda: [torch.ones(3, 8)], "there are 1, this process holds 2 of Mesh(data=2)"),
    "too many": (lambda: [torch.ones(3, 8)] * 3, "there are 3, this process holds 2 of Mesh(data=2)"),
    "other rows": (lambda: [torch.ones(2, 8), torch.ones(3, 8)], "rank 0: shape [2, 8], where 5@data, 8 has [3, 8]"),
    "one dim less": (lambda: [torch.ones(24), torch.ones(2, 8)], "rank 0: shape [24], where 5@data, 8 has [3, 8]"),
    "another dtype": (
        lambda: [torch.ones(3, 8), torch.ones(2, 8).double()],
        "rank 1: torch.float64, where the first shard is torch.float32",
    ),
    "on meta": (
        lambda: [torch.ones(3, 8, device="meta"), torch.ones(2, 8)],
        "rank 0: on meta, where the mesh is on cpu",
    ),
    "no tensor": (lambda: [None, torch.ones(2, 8)], "rank 0: a NoneType, which is no plain tensor"),
    "sparse": (lambda: [torch.ones(3, 8).to_sparse(), torch.ones(2, 8)], "rank 0: a Tensor, which is no plain tensor"),
    "sharded": (
        lambda: [sl.shard(torch.ones(3, 8), "_ _"), torch.ones(2, 8)],
        "rank 0: a ShardedTensor, which is no plain tensor",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_pieces_are_checked(name: str) -> None:
    make, text = MISFITS[name]
    with Mesh(data=2) as mesh, pytest.raises(ShardingError, match="is given shards that do not fit") as error:
        ShardedTensor(make(), Layout.parse("5@data, 8", mesh.axes), mesh)
    assert f"* {text}" in str(error.value)
    assert "shard(x, spec) splits a whole tensor into shards that fit" in str(error.value)


def test_a_layout_of_another_mesh_is_refused() -> None:
    layout = Layout.parse("5@data, 8", {"data": 4})
    with pytest.raises(ShardingError, match=r"axis data has size 4 in the layout, 2 in the mesh"):
        ShardedTensor([torch.ones(3, 8), torch.ones(2, 8)], layout, Mesh(data=2))


@pytest.mark.parametrize("way", ["pickle", "save"])
def test_what_is_read_from_a_file_is_checked(way: str) -> None:
    with Mesh(data=2):
        x = sl.shard(torch.ones(5, 8), "_@data _")
        x._locals = x._locals[::-1]  # 2 and 3 rows, where the layout says 3 and 2
        file = io.BytesIO()
        (pickle.dump if way == "pickle" else torch.save)(x, file)
        file.seek(0)
        with pytest.raises(ShardingError, match=r"rank 0: shape \[2, 8\], where 5@data, 8 has \[3, 8\]"):
            (pickle.load if way == "pickle" else torch.load)(file)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def _placed_on_ranks() -> None:
    with Mesh(data=2) as mesh:
        for spec in ("_@data _", "_ _@data", "_ _"):
            x = torch.arange(4096.0).view(64, 64)
            before, placed = x.clone(), sl.shard(x, spec)
            assert _fills(placed), spec
            x.fill_(-1)
            assert torch.equal(placed.full_tensor(), before), spec
            for made in (placed.full_tensor, lambda y=placed: torch.from_numpy(y.numpy())):
                made().fill_(3)
                assert torch.equal(placed.full_tensor(), before), spec
            if spec != "_ _@data":
                whole = sl.to_dtensor(placed)
                back = sl.from_dtensor(whole, mesh)
                whole.to_local().fill_(4)
                assert torch.equal(placed.full_tensor(), before), spec
                assert torch.equal(back.full_tensor(), before), spec
            assert _fills(placed.redistribute("_@data _"))
        out = sl.jit(lambda x: (x, x[1:], x.t()))(before)
        before.zero_()
        assert all(float(o.full_tensor().max()) == 4095 for o in out)


def _wrong_dtensor() -> str:
    with Mesh(data=2) as mesh:
        rows = 2 + mesh.rank  # chunks of 5 over 2 devices are 3 and 2
        local = DTensor.from_local(
            torch.ones(rows, 8), mesh.device_mesh, [Shard(0)], run_check=False, shape=torch.Size([5, 8]), stride=(8, 1)
        )
        try:
            sl.from_dtensor(local, mesh)
        except ShardingError as error:
            return str(error)
    return ""


@pytest.mark.ranks
def test_ranks_own_what_they_keep() -> None:
    run_ranks(_placed_on_ranks, 2)


@pytest.mark.ranks
def test_a_dtensor_of_other_pieces_is_refused() -> None:
    for rank, text in enumerate(run_ranks(_wrong_dtensor, 2)):
        assert f"rank {rank}: shape [{2 + rank}, 8], where 5@data, 8 has [{3 - rank}, 8]" in text


def _loaded_from_one_source(folder: str) -> None:
    """Three tensors made of one, of which a checkpoint is loaded into two."""
    with Mesh(data=2):
        full = {name: sl.shard(torch.full((6, 4), i + 1.0), "_@data _") for i, name in enumerate("ab")}
        dcp.save(full, checkpoint_id=folder)
        zeros = torch.zeros(6, 4)
        for spec in ("_@data _", "_ _@data", "_ _"):
            blank = {name: sl.shard(zeros, spec) for name in "abc"}
            rest = blank.pop("c")
            dcp.load(blank, checkpoint_id=folder)
            assert [float(blank[name].full_tensor().mean()) for name in "ab"] == [1, 2], spec
            assert not rest.full_tensor().any()
            assert not zeros.any()
            dtensors = {name: sl.to_dtensor(sl.shard(zeros, spec)) for name in "ab"}
            dcp.load(dtensors, checkpoint_id=folder)
            found = {name: sl.from_dtensor(x) for name, x in dtensors.items()}
            assert [float(found[name].full_tensor().mean()) for name in "ab"] == [1, 2], spec
            assert not zeros.any()


@pytest.mark.ranks
def test_checkpoints_are_read_into_memory_of_ones_own(tmp_path: Path) -> None:
    run_ranks(_loaded_from_one_source, 2, str(tmp_path))


def _swapped(x: Tensor, y: Tensor) -> Tensor:
    torch.utils.swap_tensors(x, y)
    return x * 1


@pytest.mark.parametrize(
    ("fn", "given", "said"),
    [
        (lambda x: x[0].add_(1), lambda: [X[:1].expand(6, 6)], "writes to an argument whose elements share memory"),
        (lambda x: x.copy_(x + 1), lambda: [X.flatten().unfold(0, 4, 2)], "with strides [2, 1]"),
        (lambda x, y: torch.add(x, x, out=y), lambda: [X, torch.empty(0)], "input y is written to at"),
        (lambda x, y: torch.add(x, x, out=y).sum(), lambda: [X, torch.empty(0)], "its shape is [0], that of the"),
        (_swapped, lambda: [X, X + 1], "exchanges what two tensors are (swap_tensors)"),
    ],
)
def test_writes_that_cannot_come_back_are_refused(mesh: Mesh, fn: Any, given: Any, said: str) -> None:
    step, args = sl.jit(fn), given()
    before = [(x.clone(), x.shape) for x in args]
    for _ in range(2):
        with pytest.raises(sl.ShardingError) as error:
            step(*args)
        assert said in str(error.value)
        assert "Remedy: " in str(error.value)
        assert all(x.shape == shape and torch.equal(x, was) for x, (was, shape) in zip(args, before, strict=True))
    apart = [x.contiguous() if x.numel() else torch.empty(X.shape) for x in args]  # the remedy
    if fn is not _swapped:
        same = [x.clone() for x in apart]
        assert torch.equal(step(*apart).full_tensor(), fn(*same))
        assert all(map(torch.equal, apart, same))


@pytest.mark.parametrize("write", [lambda c, k: c.add_(k), lambda c, k: c.zero_(), lambda c, k: c[1:3].copy_(k[:2])])
def test_a_donated_argument_may_be_written_to(write: Any) -> None:
    def step(c: Tensor, k: Tensor) -> Tensor:
        write(c, k)
        return c.sum(0) + k

    with Mesh(data=2):
        run = sl.jit(step, donate_argnums=(0,))
        for spec in ("b@data d", "b d"):
            cache = sl.shard(torch.arange(12.0).view(4, 3), spec)
            found = run(cache, torch.ones(4, 3)).full_tensor()
            assert torch.equal(found, step(torch.arange(12.0).view(4, 3), torch.ones(4, 3)))
            with pytest.raises(ShardingError, match="read after it was donated"):
                cache.full_tensor()


@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_parameters_that_are_parts_of_one_vector_are_stepped(strategy: Any) -> None:
    """`vector_to_parameters` makes them views of it: they share memory, and no element."""

    def run(step: Callable[..., Tensor], place: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        place(model)
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        seen = []
        for _ in range(3):
            vector = nn.utils.parameters_to_vector(model.parameters()).detach()
            seen.append(whole(vector).clone())
            nn.utils.vector_to_parameters(vector * 1.5, model.parameters())
            seen.append(whole(step(model, opt, torch.ones(8, 6, dtype=torch.float64))))
        return seen

    expected = run(step, lambda model: None)
    with sl.Mesh(data=2):
        found = run(sl.jit(step), lambda model: sl.parallelize(model, strategy=strategy))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_parts_of_one_placed_tensor_are_written_where_they_are_apart() -> None:
    fill = sl.jit(lambda a, b: (a.fill_(1.0), b.fill_(2.0))[0].sum())
    with sl.Mesh(data=2):
        x = sl.shard(torch.zeros(4, 6), "a@data b")
        fill(*x.chunk(2, -1))
        assert x.full_tensor().tolist() == [[1.0] * 3 + [2.0] * 3] * 4
        with pytest.raises(sl.ShardingError, match="a and b share memory"):
            fill(x[:, :4], x[:, 3:])
