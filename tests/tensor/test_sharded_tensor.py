"""ShardedTensor: placing, gathering, moving, showing and refusing; the oracle is the whole tensor."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError, shard
from shardlib.sharding.layout import Layout
from tests.helpers.ranks import run_ranks

RULES = {"batch": "data", "heads": "tensor", "ff": "tensor"}
X = torch.arange(60.0).view(5, 12)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, tensor=4, rules=RULES) as m:
        yield m


# shape, spec, sizes of factors, layout, local shapes by rank
PLACED = [
    ((8, 4), "batch _", {}, "8@data, 4", [(4, 4)] * 8),
    ((8, 4), "batch ff", {}, "8@data, 4@tensor", [(4, 1)] * 8),
    ((8, 4), P("tensor"), {}, "8@tensor, 4", [(2, 4)] * 8),
    ((8, 4), P(None, ("data", "tensor")), {}, "8, 4@(data tensor:(1)2)", [(8, 1)] * 8),
    ((16, 4), "_@(data tensor) _", {}, "16@(data tensor), 4", [(2, 4)] * 8),
    ((16,), "_@(tensor data)", {}, "16@(tensor data)", [(2,)] * 8),
    ((8, 4), "batch ...", {}, "8@data, 4", [(4, 4)] * 8),
    ((8, 4), P(), {}, "8, 4", [(8, 4)] * 8),
    ((), "", {}, "", [()] * 8),
    # uneven and empty pieces
    ((5, 12), "batch _", {}, "5@data, 12", [(3, 12)] * 4 + [(2, 12)] * 4),
    ((5, 12), "_@tensor _", {}, "5@tensor, 12", [(2, 12), (2, 12), (1, 12), (0, 12)] * 2),
    ((3,), "_@tensor", {}, "3@tensor", [(1,), (1,), (1,), (0,)] * 2),
    ((10,), "_@(tensor data)", {}, "10@(tensor data)", [(2,), (1,)] * 3 + [(1,), (0,)]),
    ((0, 4), "batch _", {}, "0@data, 4", [(0, 4)] * 8),
    # axes that a dim is too small for are used in part
    ((2, 3), "_@tensor _", {}, "2@tensor:(1)2, 3", [(1, 3)] * 8),
    # factors in the middle of a dim
    ((24, 5), "(three heads hd) _", {"three": 3, "heads": 4}, "(3 4@tensor 2), 5", [(6, 5)] * 8),
    ((24, 5), "(three=3 heads=4 hd) _", {}, "(3 4@tensor 2), 5", [(6, 5)] * 8),
    ((18,), "(three heads)", {"three": 3}, "(3 6@tensor)", [(6,), (6,), (6,), (0,)] * 2),
    ((12, 5), "(batch s) _", {"s": 3}, "(4@data 3), 5", [(6, 5)] * 8),
]


def _ordered(shapes: list[tuple[int, ...]], spec: object) -> list[tuple[int, ...]]:
    """The shapes of `10@(tensor data)` are listed by joint index; ranks run over data first."""
    return [shapes[t * 2 + d] for d in range(2) for t in range(4)] if spec == "_@(tensor data)" else shapes


@pytest.mark.parametrize(("shape", "spec", "sizes", "layout", "shapes"), PLACED, ids=lambda x: str(x)[:30])
def test_place_and_gather(shape, spec, sizes, layout, shapes, mesh: Mesh) -> None:  # type: ignore[no-untyped-def]
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = shard(whole, spec, **sizes)
    assert isinstance(x, ShardedTensor)
    assert (x.shape, x.dtype, x.device, x.mesh) == (whole.shape, whole.dtype, whole.device, mesh)
    assert str(x.sharding) == layout
    assert [tuple(s.data.shape) for s in x.shards] == _ordered(shapes, spec)
    assert [(s.rank, s.coords) for s in x.shards] == [(r, mesh.coords(r)) for r in range(8)]
    assert x.to_local() is x.shards[0].data
    for s in x.shards:
        assert torch.equal(s.data, x.sharding.scatter(whole, s.coords))
    assert torch.equal(x.full_tensor(), whole)


def test_placing_a_leaf_makes_a_leaf_and_anything_else_keeps_its_history() -> None:
    w = torch.ones(4, requires_grad=True)
    x = shard(w, "_@data")
    assert x.requires_grad
    assert x.is_leaf
    (shard(w * 2, "_@tensor") * torch.arange(4.0)).sum().backward()
    assert torch.equal(w.grad, 2 * torch.arange(4.0))
    assert x.to_local().requires_grad


def test_equal_pieces_are_shared() -> None:
    x = shard(torch.ones(8, 2), "batch _")
    assert len({s.data.data_ptr() for s in x.shards}) == 2


# --- moving -----------------------------------------------------------------------------------------------------------

MOVES = [
    ("batch _", "_ ff"),
    ("batch ff", "ff batch@data"),
    ("_ _", "batch ff"),
    ("batch ff", "_ _"),
    ("_@(data tensor) _", "_@(tensor data) _"),
    ("_@tensor _", "_ (a=3 b@tensor)"),
    ("_ (a=3 b@tensor)", "_ (a@data b)"),
]


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_redistribute(old: str, new: str) -> None:
    sizes = {"a": 3} if "(a@" in new else {}
    x = shard(X, old)
    y = x.redistribute(new, **sizes)
    assert y.sharding == shard(X, new, **sizes).sharding
    assert torch.equal(y.full_tensor(), X)
    assert torch.equal(x.full_tensor(), X), "the old one is untouched"
    z = shard(x, new, **sizes)  # shard moves what is placed already
    assert isinstance(z, ShardedTensor)
    assert z.sharding == y.sharding


def test_redistribute_to_itself_copies_nothing() -> None:
    x = shard(X, "batch _")
    assert x.redistribute("_@data _").to_local() is x.to_local()


# --- showing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sizes", "shown", "type_"),
    [
        ("batch ff", {}, "batch@data ff@tensor", "f32[5@data, 12@tensor]"),
        (P("data"), {}, "_@data _", "f32[5@data, 12]"),
        ("_ (three heads)", {"three": 3}, "_ (three=3 heads=4@tensor)", "f32[5, (3 4@tensor)]"),
        ("_ embed", {}, "_ embed", "f32[5, 12]"),
        ("_ _@(data tensor)", {}, "_ _@(data tensor)", "f32[5, 12@(data tensor)]"),
    ],
)
def test_spec_and_type(spec: str, sizes: dict[str, int], shown: str, type_: str) -> None:
    x = shard(X, spec, **sizes)
    assert sl.typeof(x) == type_
    again = shard(X, x.spec)
    assert isinstance(x, ShardedTensor)
    assert isinstance(again, ShardedTensor)
    assert again.sharding == x.sharding
    assert str(x.spec).replace("@()", "") == shown


def test_type_of_plain_and_pending(mesh: Mesh) -> None:
    assert sl.typeof(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    layout = Layout.parse("4@data, 2 +tensor", mesh.axes)
    x = ShardedTensor([torch.ones(2, 2)] * 8, layout, mesh)
    assert sl.typeof(x) == "f32[4@data, 2] +tensor"
    assert torch.equal(x.full_tensor(), torch.full((4, 2), 4.0))


def test_pieces_have_no_history(mesh: Mesh) -> None:
    piece = torch.nn.Parameter(torch.ones(2, 2))
    x = ShardedTensor([piece] * 8, Layout.parse("4@data, 2", mesh.axes), mesh)
    assert not any(s.data.requires_grad or s.data.data_ptr() != piece.data_ptr() for s in x.shards)


def test_what_goes_to_another_process_is_a_leaf() -> None:
    x = shard(X.clone().requires_grad_(), "batch _")
    assert torch.equal(pickle.loads(ForkingPickler.dumps(x)).full_tensor(), X)
    with pytest.raises(sl.ShardingError, match=r"(?s)is no leaf.*send x\.detach\(\)"):
        ForkingPickler.dumps(x * 2)
    assert torch.equal(pickle.loads(ForkingPickler.dumps((x * 2).detach())).full_tensor(), 2 * X)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "save"])
def test_copies(way: str, detached: bool) -> None:
    x = shard(X.clone().requires_grad_(), "batch (three heads)", three=3)
    if detached:
        x.detach()
    if way == "save":
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        y = torch.load(file, weights_only=False)
    else:
        y = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}[way](x)
    assert isinstance(y, ShardedTensor)
    assert (y.sharding, y.spec, y.mesh, y.requires_grad) == (x.sharding, x.spec, x.mesh, True)
    assert torch.equal(y.full_tensor(), X)
    assert len({s.data.data_ptr() for s in y.shards}) == len({s.data.data_ptr() for s in x.shards}), (
        "equal pieces stay shared"
    )
    with torch.no_grad():
        y.add_(1)
    assert torch.equal(x.full_tensor(), X + 1 if way == "copy" else X), "only a shallow copy is the same memory"


def test_deep_copies_have_gradients_of_their_own() -> None:
    x = shard(X.clone().requires_grad_(), "batch ff")
    (x * 2).sum().backward()
    y = copy.deepcopy({"first": x, "second": x})
    assert y["first"] is y["second"]
    y["first"].grad.zero_()
    assert x.grad.sum().item() == 2 * X.numel()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)


def test_stored_tensors_come_back_onto_the_current_mesh_if_it_has_their_axes(mesh: Mesh) -> None:
    x = shard(X, "batch ff")
    text = pickle.dumps(torch.nn.Parameter(x))
    other = Mesh(mesh.axes, rules={"batch": "tensor"})
    with other:
        y = pickle.loads(text)
        assert y.mesh is other
    with Mesh(x=3):
        z = pickle.loads(text)
        assert z.mesh == mesh
    assert isinstance(y, torch.nn.Parameter)
    assert torch.equal(y.full_tensor(), X)
    assert (y.sharding, z.sharding) == (x.sharding, x.sharding)


def test_files_hold_nothing_but_tensors_text_and_numbers() -> None:
    file = io.BytesIO()
    torch.save({"w": shard(X, "batch ff")}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["w"].full_tensor(), X)


def ranks_store() -> bytes:
    with Mesh(data=2):
        return pickle.dumps(shard(torch.arange(4.0), "_@data"))


@pytest.mark.ranks
def test_a_rank_stores_its_own_piece() -> None:
    mine, other = run_ranks(ranks_store, 2)
    assert run_ranks(ranks_load, 2, [mine, other]) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(ShardingError, match="it is the shard of rank 1, this process is no rank"):
        pickle.loads(other)


def ranks_load(stored: list[bytes]) -> list[float]:
    rank = torch.distributed.get_rank()
    with pytest.raises(ShardingError, match=f"the shard of rank {1 - rank}, this is rank {rank}"):
        pickle.loads(stored[1 - rank])
    found: list[float] = pickle.loads(stored[rank]).tolist()
    return found


# --- errors -----------------------------------------------------------------------------------------------------------

BAD = [
    ("batch ff@tensr", {}, "dim 1 `ff@tensr`: the mesh has no axis 'tensr'; did you mean 'tensor'?"),
    ("batch", {}, "the spec has 1 dim, the tensor has 2 dims"),
    ("heads ff", {}, "axis 'tensor' is used"),
    ("_ (three heads)", {"three": 5}, "three=5 does not divide the dim's size 12"),
    ("_ (three heads)", {}, "the sizes of three, heads are not known"),
    ("batch _", {"three": 3}, "three=3 is given, but the spec has no 'three'"),
]


@pytest.mark.parametrize(("spec", "sizes", "text"), BAD)
def test_bad_specs(spec: str, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ShardingError) as error:
        shard(X, spec, **sizes)
    assert text in str(error.value)
    assert "on shape [5, 12]" in str(error.value)
    with pytest.raises(ShardingError) as error:
        shard(X, P()).redistribute(spec, **sizes)  # type: ignore[attr-defined]
    assert text in str(error.value)
    assert str(error.value).startswith("redistribute(x) with spec")


def test_abstract_mesh() -> None:
    with (
        Mesh.abstract(data=2),
        pytest.raises(ShardingError, match=r"of shape \[5, 12\] cannot be placed on Mesh.abstract"),
    ):
        shard(X, "_@data _")


def test_virtual_tensors_are_no_dtensors() -> None:
    with pytest.raises(ShardingError, match="has no DeviceMesh"):
        sl.to_dtensor(shard(X, "batch _"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("_ (a=3 b@tensor)", "dim 1 is (3 4@tensor)"),
        ("_ _@(tensor data)", "dim 1 is 12@(tensor data): DTensor shards in the order of the mesh's axes"),
        ("(a=1 b@data) (c@tensor d=3)", "dim 1 is (4@tensor 3)"),
    ],
)
def test_layouts_that_dtensor_cannot_say(spec: str, text: str) -> None:
    with pytest.raises(ShardingError) as error:
        sl.to_dtensor(shard(X, spec))  # type: ignore[arg-type]
    assert text in str(error.value)
    assert "Remedy: x.redistribute(spec) first" in str(error.value)


def test_outside_any_mesh(mesh: Mesh) -> None:
    x = shard(X, "batch _")
    mesh.__exit__(None, None, None)
    try:
        with pytest.raises(ShardingError, match=r"shard\(x, 'batch _'\) on shape \[5, 12\] is outside any mesh"):
            shard(X, "batch _")
        assert isinstance(x, ShardedTensor)
        assert torch.equal(x.redistribute(P()).full_tensor(), X), "a placed tensor knows its mesh"
        assert float((x + 1).sum()) == float((X + 1).sum())
    finally:
        mesh.__enter__()
