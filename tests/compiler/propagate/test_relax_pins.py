"""Inputs and outputs whose cuts stand in the way are exchanged once; values and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl
from tests.validation.best.blocks.fused import fused_attention, gated, heads, lstm

FLAT = ("b s d", "d f@x", "f@x d")


def _attention(*args: Tensor) -> Tensor:
    return fused_attention(*args, heads=8)


def _six(*args: Tensor) -> Tensor:
    return heads(*args, n=6)


def _gradients(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which)


def _step(x: Tensor, w: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    return tuple(p - 0.1 * g for p, g in zip((w, out), _gradients(_attention, 1, 2)(x, w, out), strict=True))


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(0, (16, -1)).softmax(1).flatten(0, 1)


def _turned(x: Tensor) -> Tensor:
    return x.unflatten(0, (8, -1)).transpose(0, 1).flatten(0, 1).sin()


CASES: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], tuple[str, ...], dict[str, int]]] = [
    ("fused weight", _attention, [(2, 16, 64), (64, 192), (64, 64)], FLAT, {"x": 8}),
    ("its gradients", _gradients(_attention, 0, 1, 2), [(2, 16, 64), (64, 192), (64, 64)], FLAT, {"x": 4}),
    ("its step", _step, [(2, 16, 64), (64, 192), (64, 64)], FLAT, {"x": 4}),
    ("gates", lstm, [(16, 5, 32), (32, 128), (32, 128)], ("b t d", "d g@x", "h g@x"), {"x": 8}),
    ("heads", _six, [(2, 64, 96), *[(96, 96)] * 4], ("b s d", *["d h@x"] * 3, "h@x d"), {"x": 4}),
    ("heads, uneven", _six, [(2, 64, 96), *[(96, 96)] * 4], ("b s d", *["d h@x"] * 3, "h@x d"), {"x": 5}),
    ("gradients of heads", _gradients(_six, 1, 2, 3, 4), [(2, 64, 96), *[(96, 96)] * 4],
     ("b s d", *["d h@x"] * 3, "h@x d"), {"x": 4}),
    ("two axes", _gradients(_attention, 1, 2), [(4, 16, 64), (64, 192), (64, 64)], ("b@d s d", *FLAT[1:]),
     {"d": 2, "x": 4}),
    ("blocks", _blocks, [(48, 5)], ("t@x d",), {"x": 7}),
    ("gradients of blocks", _gradients(_blocks, 0), [(160, 5)], ("t@x d",), {"x": 6}),
    ("gradients of turned blocks", _gradients(_turned, 0), [(160, 5)], ("t@x d",), {"x": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("program", "shapes", "specs", "mesh"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_values(program: Callable[..., Any], shapes: Any, specs: Any, mesh: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    with sl.Mesh(mesh):
        step = sl.jit(program, in_specs=specs)
        found, plan = step(*args), step.plan(*args)
    assert plan.compiled.propagated.propagation.pin_twins, "nothing stands apart"
    for mine, plain in zip(pytree.tree_leaves(found), pytree.tree_leaves(program(*args)), strict=True):
        torch.testing.assert_close(mine.full_tensor(), plain)


def test_what_is_returned_in_place_of_an_input_is_where_that_was() -> None:
    _, program, shapes, specs, mesh = CASES[2]
    with sl.Mesh.abstract(mesh):
        plan = sl.jit(program, in_specs=specs, out_specs=specs[1:]).plan(
            *[torch.empty(s, device="meta") for s in shapes]
        )
    before, after = plan.compiled.program.inputs[1], plan.compiled.program.outputs[0]
    assert str(before.layout) == str(after.layout) == "64, 192@x"


def test_a_cut_that_nothing_takes_apart_stays() -> None:
    with sl.Mesh.abstract(x=8):
        step = sl.jit(gated, in_specs=("n d", "d (two=2 f@x)", "f@x d"))
        plan = step.plan(*[torch.empty(s, device="meta") for s in ((256, 64), (64, 512), (256, 64))])
    assert not plan.compiled.propagated.propagation.pin_twins
    assert [c.kind for c in plan.collectives] == ["all_reduce"]


def test_blocks_come_and_their_gradients_go_home() -> None:
    """What a device sends that sends most: the rows of a piece, and those of three blocks."""
    with sl.Mesh.abstract(x=7):
        step = sl.jit(_gradients(_blocks, 0), in_specs="t@x d", out_specs="t@x d")
        plan = step.plan(torch.empty(2048, 64, device="meta"))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_to_all", rows * 64 * 4) for rows in (293, 384)]
