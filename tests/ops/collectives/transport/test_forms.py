"""The choice of a collective's form by the machine model, against counts of every message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from shardlib.ops.collectives.transport.forms import OPS, Form, choose_form
from shardlib.ops.collectives.transport.levels import find_levels
from shardlib.sharding.mesh.machine import Link, Span

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(2, 4), (2, 2), (3, 2), (4, 1), (8, 2)]  # machines, ranks on each
M = 48_000_000


INNER, OUTER = Link(1e9, 1e-5), Link(1e8, 5e-5, 4)


def span(far: int, near: int, inner: Link = INNER, outer: Link = OUTER) -> Span:
    return Span(near, far, inner, outer)


def all_forms(op: str, s: Span, nbytes: int = M, dtype: torch.dtype = F32, kind: str = "") -> dict[str, Form]:
    form = choose_form(op, nbytes, True, dtype, kind, s, limit=float("inf"))
    return {x.name: x for x in (form, *form.others)}


# An independent count: every message of every form, as (sender, receiver, bytes).

Messages = Iterator[tuple[int, int, float]]


def ring(p: int, k: int, nbytes: float) -> Messages:
    for _, rank in itertools.product(range(p - 1), range(p)):
        yield rank, (rank + 1) % p, nbytes / p


def exchange(p: int, k: int, nbytes: float) -> Messages:
    for pair in itertools.permutations(range(p), 2):
        yield *pair, nbytes / p


def two_level(p: int, k: int, nbytes: float) -> Messages:
    for a, b in itertools.permutations(range(p), 2):
        if a // k == b // k:
            yield a, b, nbytes / p * (p // k)
        elif a % k == b % k:
            yield a, b, nbytes / p


def two_level_exchange(p: int, k: int, nbytes: float) -> Messages:
    for a, b in itertools.permutations(range(p), 2):
        if a // k == b // k or a % k == b % k:
            yield a, b, nbytes / p * (p // k if a // k == b // k else k)


MESSAGES = {
    ("all_gather", "ring"): (ring, 1),
    ("all_gather", "exchange"): (exchange, 1),
    ("all_gather", "two_level"): (two_level, 1),
    ("reduce_scatter", "exchange"): (exchange, 1),
    ("reduce_scatter", "two_level"): (two_level, 1),
    ("all_reduce", "ring"): (ring, 2),
    ("all_reduce", "two_level"): (two_level, 2),
    ("all_reduce", "scatter_gather"): (exchange, 2),
    ("all_to_all", "exchange"): (exchange, 1),
    ("all_to_all", "two_level"): (two_level_exchange, 1),
}


@pytest.mark.parametrize(("far", "near"), SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_bytes_across_are_those_of_all_messages(op, far, near):
    p = far * near
    forms = all_forms(op, span(far, near))
    for name, form in forms.items():
        if (op, name) == ("all_reduce", "exchange"):  # of whole tensors
            make, times = exchange, p
        else:
            make, times = MESSAGES[op, name]
        for machine in range(far):
            leaving = [n for a, b, n in make(p, near, M) if a // near == machine != b // near]
            assert times * sum(leaving) == pytest.approx(form.across), (name, machine)
    assert ("two_level" in forms) == (near > 1)


@pytest.mark.parametrize(("far", "near"), [shape for shape in SHAPES if shape[1] > 1])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_two_levels_save_the_bytes_that_a_machine_has(op, far, near):
    p = far * near
    assert all_forms(op, span(far, near))["two_level"].across == pytest.approx((p - near) / p * M)


@pytest.mark.parametrize(
    ("op", "nbytes", "even", "dtype", "kind", "s", "text"),
    [
        (
            "all_gather",
            M,
            True,
            F32,
            "",
            span(2, 4),
            "two_level: 24 MB leave each machine (ring 42 MB, exchange 96 MB)",
        ),
        # Each rank has a card of its own: a ring keeps all links busy.
        (
            *("all_gather", M, True, F32, "", span(2, 2, Link(1.5e8, 1e-5), Link(1e8, 5e-5))),
            "ring: 36 MB leave each machine (exchange 48 MB, two_level 24 MB)",
        ),
        ("all_gather", M, False, F32, "", span(2, 4), "exchange: 96 MB leave each machine (sizes differ)"),
        ("all_gather", M, True, F32, "", span(4, 1), "ring: 36 MB leave each machine (exchange 36 MB)"),
        ("reduce_scatter", M, True, F32, "sum", span(2, 4), "two_level: 24 MB leave each machine (exchange 96 MB)"),
        # Short floats are added as float32, so twice their bytes cross; gathered they are short again.
        ("reduce_scatter", M, True, BF16, "sum", span(2, 4), "two_level: 48 MB leave each machine (exchange 96 MB)"),
        ("reduce_scatter", M, True, BF16, "max", span(2, 4), "two_level: 24 MB leave each machine (exchange 96 MB)"),
        (
            *("all_reduce", M, True, BF16, "sum", span(2, 4)),
            "two_level: 72 MB leave each machine (scatter_gather 192 MB, "
            "gloo does not reduce bfloat16 exactly, exchange needs 336 MB of buffers)",
        ),
        (
            *("all_reduce", 8, True, F32, "sum", span(2, 2, Link(1e9, 1e-4), Link(1e8, 1e-5))),
            "exchange: 32 B leave each machine (two_level 16 B, scatter_gather 16 B, ring 12 B)",
        ),
        # The same bytes cross: two levels only have fewer messages.
        ("all_to_all", M, True, F32, "", span(2, 4), "exchange: 96 MB leave each machine (two_level 96 MB)"),
        ("all_to_all", 64, True, F32, "", span(2, 4), "two_level: 128 B leave each machine (exchange 128 B)"),
    ],
)
def test_the_fastest_form_is_chosen(op, nbytes, even, dtype, kind, s, text):
    assert str(choose_form(op, nbytes, even, dtype, kind, s)) == text


def test_buffers_are_limited():
    s = span(2, 4)
    assert choose_form("all_gather", M, True, F32, "", s, limit=M / 8).name == "ring"
    least = choose_form("reduce_scatter", M, True, F32, "sum", s, limit=1.0)  # none fits
    assert (least.name, least.buffers) == ("two_level", M / 2)


def test_a_form_prints_as_a_way_over_torch():
    choice = choose_form("all_gather", M, True, F32, "", span(2, 2, Link(1.5e8, 1e-5), Link(1e8, 5e-5))).choice
    assert (choice.name, choice.reason) == (
        "torch/native",
        "36 MB leave each machine (exchange 48 MB, two_level 24 MB)",
    )


@pytest.mark.parametrize(
    ("group", "near", "split"),
    [
        ((0, 1, 2, 3), 2, (((0, 1), (2, 3)), ((0, 2), (1, 3)))),
        ((3, 2, 0, 1), 2, (((3, 2), (0, 1)), ((3, 0), (2, 1)))),
        ((0, 2), 1, (((0,), (2,)), ((0, 2),))),
        ((0, 1, 2), 2, "the machine model has 2 of each group on a machine, but rank 2 has one to itself"),
        ((0, 1, 2, 3), 4, "the machine model has 4 of each group on a machine, but ranks 0, 1 share one"),
        ((0, 2, 1, 3), 2, "ranks of a machine do not follow each other in the group 0, 2, 1, 3"),
    ],
)
def test_levels_follow_machines(group, near, split):
    assert find_levels((group,), {rank: f"machine {rank // 2}" for rank in range(4)}, near) == split
