"""Programs whose annotations contradict each other: bytes that need not be sent, for hardly more time or for none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, einsum

import shardlib as sl
from shardlib import P, shard
from tests.validation.shardy.oracle import ours
from tests.validation.shardy.programs import draw


@dataclass(frozen=True)
class Case:
    """A program, the bytes that a device sends, and those that it would send without what the case is about."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P | None, ...]
    mesh: dict[str, int]
    bytes: float
    before: float


def softmax_held(x: Tensor, y: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    """Cut in its own dim over all devices, softmax would sum over all of them. The batch, whole and free, is offered
    what another result wants that dim to be cut by: what an op sends while it runs counts as well as a reshard."""
    a = x + y
    b = shard(a, P(None, None, None, "tensor"))
    return a - z, torch.softmax(b, -1), shard(b + (x + u), P(None, None, None, ("tensor", "data")))


def rows_beside_a_product(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The large product alone matters for the time; beside it rows take both axes, and nothing is gathered for `b`."""
    y = shard(einsum("bsd,dv->bsv", x, w), P(None, ("data", "tensor"), None))
    return y, einsum("bsh,fs->bhf", einsum("bsd,bsdh->bsh", torch.exp(x), a), b)


def not_for_messages(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gathered for an offer three times as much would be sent, in fewer messages: that is more."""
    return x.amax(0), einsum("bd,hd->bh", x, w), torch.exp(x)


CASES = {
    "softmax held": Case(
        softmax_held, ((32, 256, 8, 128), (32, 256, 8, 128), (32, 256, 8, 128), (256, 8, 128)),
        (P(None, None, None, None), None, P(None, None, None, "tensor"), None),
        {"data": 4, "tensor": 2}, 131_072, 917_504,
    ),
    "rows beside a product": Case(
        rows_beside_a_product, ((64, 256, 128), (128, 4096), (64, 256, 128, 8), (512, 256)),
        (P("tensor"), None, None, None), {"data": 2, "tensor": 2}, 1_048_576, 1_179_648,
    ),
    "not for messages": Case(
        not_for_messages, ((128, 64), (8, 64)), (P("tensor", "pipe"), P("pipe", ("tensor", "data"))),
        {"data": 2, "tensor": 2, "pipe": 4}, 1_040, 6_544,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent(name: str) -> None:
    case = CASES[name]
    with sl.Mesh.abstract(case.mesh):
        plan = sl.jit(case.fn, in_specs=case.specs).plan(*(torch.empty(s, device="meta") for s in case.shapes))
    assert plan.comm_bytes == case.bytes < case.before


@pytest.mark.long
def test_ops_part_for_fewer_bytes() -> None:
    """Where nothing is done twice for it, in hardly more time: 7,040 bytes if ops of one unit stay together."""
    assert ours(draw(1732, conflicts=True)).bytes == 4_736
