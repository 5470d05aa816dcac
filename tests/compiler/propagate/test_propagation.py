"""What propagation decides: small programs, and the collectives that they should come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

RULES = {"batch": "data", "ff": "tensor", "heads": "tensor", "vocab": "tensor"}
MESH = sl.Mesh.abstract(data=2, tensor=4, rules=RULES)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


def qkv(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    return (x @ wq).sin() + (x @ wk).cos() + (x @ wv)


def residual(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x = sl.shard(x, "batch seq@tensor embed")
    return sl.shard(x + torch.relu(x @ up) @ down, "batch seq@tensor embed")


def square(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def head(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ w).flatten(0, 1), targets.flatten())


def grads(fn: Callable[..., Tensor], *argnums: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: fn(*args).square().sum(), argnums=argnums)


X = meta(16, 256)
X3 = meta(16, 128, 256)
UP, DOWN = meta(256, 1024), meta(1024, 256)
MEGATRON = ("batch embed", "embed ff", "ff embed")

# program, arguments, in_specs -> the collectives, as (kind, axes), in order
CASES = {
    "nothing annotated": (mlp, (X, UP, DOWN), None, []),
    "data parallel forward": (mlp, (X, UP, DOWN), ("batch embed", None, None), []),
    "data parallel gradients, once each": (
        grads(mlp, 1, 2), (X, UP, DOWN), ("batch embed", None, None), [("all_reduce", "data")] * 2,
    ),
    "gradients land like their parameters": (
        grads(mlp, 1), (meta(65536, 256), meta(256, 64), meta(64, 256)),
        ("batch embed", "embed@data ff@()", "ff@() embed"),
        [("all_gather", "data"), ("reduce_scatter", "data")],
    ),
    "megatron forward": (mlp, (X, UP, DOWN), MEGATRON, [("all_reduce", "tensor")]),
    "sums are added before they are reduced": (
        grads(qkv, 0), (X3, UP, UP, UP), ("batch seq embed", "embed ff", "embed ff", "embed ff"),
        [("all_reduce", "tensor")],
    ),
    "sequence parallel": (
        residual, (meta(16, 128, 256), meta(256, 4096), meta(4096, 256)), ("batch _? embed", "embed ff", "ff embed"),
        [("all_gather", "tensor"), ("reduce_scatter", "tensor")],
    ),
    "a class that meets itself is gathered on one side": (
        square, (meta(1, 128, 256),), ("b seq@data e",), [("all_gather", "data")],
    ),
    "a class that meets itself leaves the axis to the batch": (
        square, (X3,), ("b seq@data e",), [("all_to_all", "data")],
    ),
    "logits are never gathered": (
        head, (X3, meta(256, 4096), meta(16, 128, dtype=torch.int64)), ("batch s e", "e vocab", "batch s"),
        [("all_reduce", axes) for axes in ("tensor", "data", "tensor", "data tensor")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_collectives(name: str) -> None:
    fn, args, specs, expected = CASES[name]
    with MESH:
        plan = sl.jit(fn, in_specs=specs).plan(*args)
    assert [(c.kind, " ".join(c.axes)) for c in plan.collectives] == expected


def test_a_fused_weight_is_cut_by_heads() -> None:
    """One factor in the middle of a dim reaches attention without any communication."""

    def attend(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (3, 8, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def fused(x: Tensor, w: Tensor) -> Tensor:
        return attend(x, sl.shard(w, "embed (three heads hd)", three=3, heads=8))

    with MESH:
        plan = sl.jit(fused, in_specs=("batch seq embed", None)).plan(X3, meta(256, 384))
    assert plan.collectives == ()
    assert str(plan.layout_of("w")) == "256, (3 128@tensor)"  # whole heads: the head's own dim melts into them
    assert str(plan.layout_of("result")) == "16@data, 8@tensor, 128, 16"


def test_few_heads_use_a_part_of_the_axis() -> None:
    """4 KV heads on a tensor axis of 8: query heads use all of it, keys and values a part."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with sl.Mesh.abstract(tensor=8):
        step = sl.jit(attend, in_specs=("b heads@tensor s d", "b kv@tensor s d", "b kv@tensor s d"))
        plan = step.plan(meta(2, 16, 32, 8), meta(2, 4, 32, 8), meta(2, 4, 32, 8))
    assert plan.collectives == ()
    assert str(plan.layout_of("k")) == "2, 4@tensor:(1)4, 32, 8"
    assert str(plan.layout_of("result")) == "2, 16@tensor, 32, 8"


def test_depth_does_not_change_decisions() -> None:
    def deep(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        for up, down in layers:
            x = x + mlp(x, up, down)
        return x

    with MESH:
        step = sl.jit(deep, in_specs=("batch embed", [("embed ff", "ff embed")]))
        one = step.plan(X, [(UP, DOWN)])
        step = sl.jit(deep, in_specs=("batch embed", [("embed ff", "ff embed")] * 5))
        five = step.plan(X, [(UP, DOWN)] * 5)
    assert five.comm_bytes == 5 * one.comm_bytes


def test_planning_touches_no_device_and_any_mesh_size() -> None:
    with sl.Mesh.abstract(pod=8, data=64, tensor=16, rules={"batch": ("pod", "data"), "ff": "tensor"}):
        plan = sl.jit(mlp, in_specs=MEGATRON).plan(meta(4096, 256), UP, DOWN)
    assert plan.mesh.size == 8192
    assert [(c.kind, c.axes) for c in plan.collectives] == [("all_reduce", ("tensor",))]
    assert str(plan.layout_of("x")) == "4096@(pod data), 256"


def test_a_constant_result_lands_where_its_spec_says() -> None:
    with sl.Mesh(data=2):
        step = sl.jit(lambda x: (x, torch.arange(6), torch.zeros(4, 2)), out_specs=(None, "n@data", "_ m@data"))
        out = step(torch.ones(2))
    assert [sl.typeof(x) for x in out] == ["f32[2]", "i64[6@data]", "f32[4, 2@data]"]
    assert out[1].full_tensor().tolist() == list(range(6))


# Conflicts ------------------------------------------------------------------------------------------------------------


def _kinds(fn: Any, shapes: list[tuple[int, ...]], specs: tuple[sl.P | None, ...]) -> list[tuple[str, float]]:
    with sl.Mesh.abstract(data=2):
        plan = sl.jit(fn, in_specs=specs).plan(*(torch.empty(s, device="meta") for s in shapes))
    return [(c.kind, c.bytes) for c in plan.collectives]


def test_annotations_that_nothing_contradicts_are_followed() -> None:
    """To gather x, and to work twice, would be cheaper than the sum; but nobody wants the axis elsewhere."""
    found = _kinds(lambda x, w: x @ w, [(64, 128), (128, 72)], (sl.P(None, "data"), None))
    assert [kind for kind, _ in found] == ["all_reduce"]


def test_dims_that_nobody_annotated_are_offered_the_axis_where_a_sum_is_large() -> None:
    found = _kinds(lambda x, w: x @ w, [(64, 128), (128, 4096)], (sl.P(None, "data"), None))
    assert found == [("all_gather", 64 * 128 * 4 / 2)]


def test_ops_of_one_unit_part_where_their_neighbors_differ() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x + y
        return a + z, sl.shard(a, sl.P(None, None, None))

    assert (
        _kinds(fn, [(32, 512, 64), (512, 64), (32, 512, 64)], (sl.P(None, None, None), None, sl.P(None, None, "data")))
        == []
    )


def test_a_sum_that_is_returned_has_its_price() -> None:
    """With b cut, the sum over it is 128 MB; gathering x costs 8 kB."""
    found = _kinds(lambda x, w: (x * 2).t() @ w, [(32, 64), (32, 2**19)], (sl.P("data", None), sl.P(None, None)))
    assert sum(n for _, n in found) < 1e5


def test_an_input_that_is_placed_by_a_shard_is_whole_for_nobody() -> None:
    with sl.Mesh.abstract(data=2):
        plan = sl.jit(lambda x: torch.exp(sl.shard(x, sl.P("data", None)))).plan(torch.empty(64, 128, device="meta"))
    assert str(plan.layout_of("x")) == str(plan.layout_of("result")) == "64@data, 128"


@pytest.mark.parametrize("backward", [False, True])
def test_inputs_are_held_for_a_backward_pass_only(backward: bool) -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sum()

    specs = (sl.P("data", None), sl.P("data", None))
    with sl.Mesh.abstract(data=2):
        step = sl.jit(sl.grad(fn, argnums=(0, 1)) if backward else fn, in_specs=specs)
        plan = step.plan(torch.empty(64, 64, device="meta"), torch.empty(8, 64, device="meta"))
    held = [record for record in plan.compiled.propagated.search.problem.records if record.held]
    assert bool(held) == backward


def test_of_offers_that_are_as_fast_the_one_that_sends_less_is_taken() -> None:
    """Cut over d, the small product would be faster, too, but its sum would be sent; f is cut for nothing."""

    def fn(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.einsum("bd,bfs->dfs", x, a), torch.exp(x.sum(0) @ b) @ c

    shapes = [(64, 128), (64, 1024, 512), (128, 4096), (4096, 16)]
    assert _kinds(fn, shapes, (None, None, None, sl.P(None, "data"))) == []


@pytest.mark.long
@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("readers", [24, 70])
def test_a_value_that_many_read_is_gathered_once(readers: int) -> None:
    """More kinds of readers than all choices of can be written down, and than an array has dims."""
    weights = [meta(256, 8 * (i + 1)) for i in range(readers)]
    step = sl.jit(lambda x, ws: [x @ w for w in ws], in_specs=("b@data d", [f"d o{i}@data" for i in range(readers)]))
    with sl.Mesh.abstract(data=2):
        plan = step.plan(meta(64, 256), weights)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 64 * 256 * 4 / 2)]


def test_sums_that_meet_behind_what_is_complete_are_sent_once() -> None:
    """`(x + q) + k`, where more devices than heads of k leave sums: all are sent in one, so nobody gathers for k."""

    def fn(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        q, k, v = ((x @ w).view(2, 256, -1, 64).transpose(1, 2) for w in (wq, wk, wv))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return (x + out.transpose(1, 2).flatten(2) @ wo).square().mean()

    shapes = [(2, 256, 1024), (1024, 1024), (1024, 256), (1024, 256), (1024, 1024)]
    step = sl.jit(sl.grad(fn, (0, 1, 2, 3, 4)), in_specs=("_ _ _", *["_ h@tensor"] * 3, "h@tensor _"))
    with sl.Mesh.abstract(tensor=8):
        plan = step.plan(*(meta(*shape) for shape in shapes))
    sent = [c for c in plan.collectives if "[tensor]" in str(c)]
    assert [(c.kind, c.bytes) for c in sent] == [("all_reduce", 2 * 256 * 1024 * 4 * 2 * 7 / 8)] * 2
    assert not [r for r in plan.redundant if r.op == "mm"]


def test_what_could_not_be_improved_is_tried_again_when_something_around_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = sl.jit(lambda x, w: torch.relu(x @ w) @ w.t(), in_specs=("b@data d", "d o@data"))
    with sl.Mesh.abstract(data=4):
        search = step.plan(meta(64, 256), meta(256, 128)).compiled.propagated.search
    tried: list[int] = []
    monkeypatch.setattr(search, "improve", lambda *args: bool(tried.append(1)))
    whole = search.domains((kind,) for kind in range(len(search.choices)))
    variable = next(iter(whole))
    last: dict[Any, Any] = {}
    for _ in range(2):
        search._improve_around(variable, whole, lambda choices: True, {}, 0.0, 1 << 13)
    assert len(tried) == 2, "each search begins anew"
    for _ in range(2):
        search._improve_around(variable, whole, lambda choices: True, last, 0.0, 1 << 13)
    assert len(tried) == 3, "all is as it was"
    (kind,), orders = variable, whole[variable][0].orders
    other = next(choice for choice in orders if choice != search.choices[kind])
    search.choices = [other if k == kind else choice for k, choice in enumerate(search.choices)]
    search._improve_around(variable, whole, lambda choices: True, last, 0.0, 1 << 13)
    assert len(tried) == 4
