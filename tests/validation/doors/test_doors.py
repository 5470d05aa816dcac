"""Families of models on meshes: three steps of Adam through each door, and what Megatron's plan is by hand.

`python -m tests.validation.doors` runs all families, meshes, doors and dtypes; here each family takes one of them.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.validation import doors

CELLS = [(family, list(doors.WAYS)[i % len(doors.WAYS)]) for i, family in enumerate(doors.FAMILIES)]
LONG = [cell for cell in itertools.product(doors.FAMILIES, doors.WAYS) if cell not in CELLS]


@pytest.mark.long
@pytest.mark.sampled(28)
@pytest.mark.parametrize(("family", "way"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in LONG)])
def test_three_steps_are_those_of_one_device(family: str, way: str) -> None:
    door = doors.DOORS[(doors.FAMILIES.index(family) + list(doors.WAYS).index(way)) % 2]
    found, at = doors.error(family, doors.WAYS[way], door, torch.float64)
    assert found <= doors.TOLERANCE[torch.float64], at


# What Megatron sends by hand over the tensor axis, forward and backward, of 2 layers: a sum after attention and after
# the feed-forward (one after both, where they are parallel), one of the embedding; backward one in front of each norm
# that a layer begins with, and of the head. T5 has 2 layers of 2 parts and 2 of 3, and the gradient of the encoder.
MEGATRON = dict.fromkeys(doors.FAMILIES, (5, 5)) | {"gptj": (3, 3), "gptneox": (3, 5), "t5": (11, 12)}
MEGATRON |= {"deepseek3": (6, 7)}  # routed and shared experts, and what is normalized between two matrices


@pytest.mark.long
@pytest.mark.sampled(14)
@pytest.mark.parametrize("family", [name for name in doors.FAMILIES if name not in ("llama, 2 KV heads", "ncf")])
def test_weights_alone_give_megatrons_plan(family: str) -> None:
    """Of few tokens, so that weights are what is large; numbers per row of the loss are small."""
    model, specs, args = doors.build(family)
    args = {k: x[:2, :8].contiguous() if isinstance(x, torch.Tensor) else x for k, x in args.items()}
    with sl.Mesh(tensor=4, rules=doors.RULES):
        plan = sl.parallelize(model, specs).forward.plan(**args)
    large = [c for c in plan.collectives if c.bytes > 1000]
    kinds = {c.kind for c in large}
    forward, backward = (sum(c.backward == way for c in large) for way in (False, True))
    assert kinds == ({"all_reduce", "all_gather"} if family == "t5" else {"all_reduce"})  # T5's table is read twice
    assert forward <= MEGATRON[family][0]
    assert backward <= MEGATRON[family][1]
    assert not any("whole" in c.reason for c in plan.collectives if c.bytes > 1000 and family != "t5")


def test_tensor_parallelism_across_the_batch() -> None:
    """The batch is cut over both axes, weights by rows: inside a tensor group rows are exchanged for columns, and what
    comes out is summed back to rows."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 1024, bias=False), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    model, x = copy.deepcopy(plain), torch.randn(64, 256)
    with sl.Mesh(data=2, tensor=4, rules={"batch": ("data", "tensor")}):
        sl.parallelize(model, {"*.weight": "out in@tensor"})
        plan = model.forward.plan(x)
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4)
    forward = [(c.kind, c.axes) for c in plan.collectives if not c.backward]
    first, *_, last = forward
    assert (first, last) == (("all_to_all", ("tensor",)), ("reduce_scatter", ("tensor",)))


def _sums(fn: Any, mesh: sl.Mesh, *args: torch.Tensor) -> list[float]:
    """The bytes of every reduction, where matrices are cut along what they contract."""
    with mesh:
        step = sl.jit(fn, in_specs=("n e", *["n k@tensor", "k@tensor e"] * ((len(args) - 1) // 2)))
        found = [c.bytes for c in step.plan(*args).collectives]
        torch.testing.assert_close(step(*args).full_tensor(), fn(*args))
    return found


@pytest.mark.parametrize(
    ("order", "reductions"),
    [
        (lambda x, a, b, c, d: (x + a @ b) + c @ d, 1),
        (lambda x, a, b, c, d: (a @ b + x) + c @ d, 1),
        (lambda x, a, b, c, d: c @ d + (x + a @ b), 1),
        (lambda x, a, b, c, d: ((x + a @ b) + c @ d) + a @ d, 1),
        (lambda x, a, b, c, d: (x + a @ b) - c @ d, 2),
        (lambda x, a, b, c, d: torch.add(x + a @ b, c @ d, alpha=2), 2),
        (lambda x, a, b, c, d: (y := x + a @ b) + c @ d + y.tanh(), 2),
        (lambda x, a, b, c, d: (x + a @ b).tanh() + c @ d, 2),
        (lambda x, a, b, c, d: (x + (p := a @ b)) + c @ d + p, 2),
    ],
)
def test_sums_that_are_added_are_one(order: Any, reductions: int) -> None:
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=g) for shape in ((8, 8), (8, 16), (16, 8), (8, 16), (16, 8))]
    assert len(_sums(order, sl.Mesh(tensor=4), *args)) == reductions


class _Kept(torch.autograd.Function):
    """A sum of the forward pass that only an addition of the way back reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x + a @ b)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return (grad + kept) + grad, None, None


def test_what_is_kept_for_the_way_back_is_complete() -> None:
    g = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=g) for shape in ((8, 8), (8, 16), (16, 8)))
    found = []
    for mesh in (None, sl.Mesh(tensor=4)):
        leaf = x.clone().requires_grad_()
        with mesh or sl.no_mesh():
            step = sl.jit(_Kept.apply, in_specs=("n e", "n k@tensor", "k@tensor e")) if mesh else _Kept.apply
            step(leaf, a, b).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1].full_tensor() if isinstance(found[1], sl.ShardedTensor) else found[1], found[0])
