"""Computed values of constants are torch's, for every node of random masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.compiler.simplify.constants.evaluate import Constants
from shardlib.frontend.trace import trace


def rows(s: int) -> Tensor:
    return torch.arange(s)[:, None]


def _draw_mask(rng: random.Random, s: int, t: int) -> Callable[[Tensor], Tensor]:
    """A mask of counted places, compared, shifted, combined and cut at random."""
    ops = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)

    def line(n: int) -> Tensor:
        x = torch.arange(rng.choice([0, 0, 3]), 100)[:n] + rng.randint(-2, 2)
        x = rng.choice([lambda: x, lambda: x, lambda: x * 2, lambda: x % 3, lambda: x.new_zeros(n)])()
        return x.to(rng.choice([torch.int64, torch.int64, torch.int32, torch.int8, torch.float32, torch.float64]))

    def number() -> Any:
        n = rng.randint(-3, 3)
        return rng.choice([n, torch.full((), n), torch.full((), float(n), dtype=torch.float64), torch.full((1, 1), n)])

    def square() -> Tensor:
        q, k = line(s)[:, None], line(t)[None]
        return rng.choice([lambda: q - k, lambda: k - q, lambda: (q - k).abs(), lambda: torch.maximum(q, k)])()

    def list_moves(x: Tensor) -> list[Callable[[], Tensor]]:
        """Turned round once and again; more of it before and behind; parts of it as they were."""
        a, b, fill = rng.randint(0, 2), rng.randint(0, 3), rng.random() < 0.5
        rows, columns = rng.randint(1, s), rng.randint(1, t)
        ends, padded = (columns, t - columns), F.pad(x, (b, 3 - b, a, 2 - a), value=fill)
        return [
            lambda: x.flip(0).logical_not().flip(0) if fill else x.flip(1).flip(0, 1).flip(0),
            lambda: padded[a : a + s, b : b + t] if fill else padded[2 - a :, 3 - b :][:s, :t],
            lambda: torch.cat([x[:rows], x[rows:]] if fill else [x[:, : ends[0]], x[:, ends[0] :]], int(not fill)),
            lambda: torch.cat([torch.full((s, b), fill), x, x[:, :0]], 1)[:, :t],
            lambda: torch.cat([torch.full((a, t), fill), x])[:s],
            lambda: torch.stack([x, x])[1],
        ]

    def mask(depth: int) -> Tensor:
        kind = rng.randrange(13) if depth else rng.randrange(4)
        q, k = line(s)[:, None], line(t)[None]
        if kind == 0:
            return rng.choice(ops)(*rng.choice([(q, k), (k, q)]))
        if kind == 1:
            return rng.choice(ops)(square() * rng.choice([1, 1, 2, -1]) + number(), number())
        if kind == 2:
            one = torch.full((s, t), rng.random() < 0.7)
            return rng.choice([torch.tril, torch.triu])(one, rng.randint(-3, 3))
        if kind == 3:
            wide = rng.choice(ops)(torch.arange(s + 3)[:, None] + rng.randint(-2, 2), torch.arange(t + 4))
            a, b = rng.randint(0, 3), rng.randint(0, 4)
            return wide[a : a + s, b : b + t]
        x = mask(depth - 1)
        if kind == 4:
            return ~x
        if kind == 5:  # a row of it, or a column
            row, column = rng.randrange(s), rng.randrange(t)
            return rng.choice([torch.bitwise_or, torch.logical_and])(x, rng.choice([x[row][None], x[:, column, None]]))
        if kind == 6:  # elsewhere
            moves = [lambda: x.flip(0, 1), lambda: x.roll(1, 0), lambda: torch.cat([x[s // 2 :], x[: s // 2]])]
            moves = [*moves[: 3 if s > 1 else 2], lambda: x.clone(), lambda: x.t().contiguous().t(), *list_moves(x)]
            return rng.choice([*moves, lambda: x.float().cumsum(1).tril() > 1])()
        y = mask(depth - 1)
        if kind < 9:
            return rng.choice([x & y, x & y, x * y, x | y, x ^ y])
        if kind == 9:
            return ~(x | y) if rng.random() < 0.5 else x.logical_not() + y
        if kind == 10:
            return (
                torch.where(x, *rng.sample([y, rng.random() < 0.5], 2))
                if rng.random() < 0.7
                else x.masked_fill(y, rng.random() < 0.5)
            )
        return torch.where(x, y, mask(depth - 1)) if kind == 11 else x.float().masked_fill(y, -1.0) > number()

    return lambda x: mask(3)[None, None] & x.new_ones((), dtype=torch.bool)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(120))
def test_values(seed: int, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each node of a random mask with torch. If squares are too large to compute, some are unknown."""
    s, t = random.Random(seed).choice([(5, 5), (4, 7), (7, 4), (1, 6), (6, 1)])
    gm = trace(lambda x: _draw_mask(random.Random(seed), s, t)(x), (torch.zeros(()),)).graph
    constants, results = Constants(gm), compute_values(gm)
    with monkeypatch.context() as patch:
        patch.setattr("shardlib.compiler.simplify.constants.lookup._LARGE", 15 if large else 1000)
        constant_of = {node: constants.find(node) for node in results}
    for node, result in results.items():
        if (values := constant_of[node]) is None:
            assert large or not result.numel() or node.op == "placeholder", node.format_node()
            continue
        dense = values.to_dense()
        assert dense is not None
        assert dense.dtype == result.dtype, node.format_node()
        assert torch.equal(dense, result), node.format_node()


def compute_values(gm: torch.fx.GraphModule, *args: Tensor) -> dict[torch.fx.Node, Tensor]:
    """Runs a graph, and returns the tensors of all nodes."""
    tensors: dict[torch.fx.Node, Tensor] = {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor) and n.op != "output":
                tensors[n] = value
            return value

    Noting(gm).run(*(args or [torch.zeros(())]))
    return tensors
