"""The automatic cut of graphs that are too large for exhaustive search, against a bound."""

from __future__ import annotations

import pytest

from shardlib.compiler.stages.partition import CutNode, TiedParameter
from tests.compiler.stages.test_partition import Case, chain


def transformer(n: int, head: float, ops: int = 1) -> list[CutNode]:
    """Residual layers with two branches of `ops` nodes each, and a head that takes `head` seconds."""
    nodes = [CutNode("embed", 1.0, (), 4, memory=20)]
    for layer in range(n):
        for branch, seconds in (("attn", 2.0), ("mlp", 4.0)):
            x = len(nodes) - 1
            for i in range(ops):
                nodes.append(CutNode(f"{layer}.{branch}.{i}", seconds / ops, (len(nodes) - 1,), 8, memory=4, saved=1))
            nodes.append(CutNode(f"{layer}.{branch}.add", 0.125, (x, len(nodes) - 1), 4, saved=1))
    return [*nodes, CutNode("head", head, (len(nodes) - 1,), 0, memory=20)]


def deep_unet(levels: int) -> list[CutNode]:
    nodes = [CutNode(f"down{i}", 4.0, (i - 1,) if i else (), 2 ** (levels - i)) for i in range(levels)]
    nodes.append(CutNode("middle", 4.0, (levels - 1,), 1))
    for i in reversed(range(levels)):
        nodes.append(CutNode(f"up{i}", 4.0, (len(nodes) - 1, i), 2 ** (levels - i)))
    return nodes


def long_towers(n: int) -> list[CutNode]:
    """Two towers whose nodes take turns."""
    nodes = [CutNode(f"{'ab'[i % 2]}{i // 2}", 1.0, (i - 2,) if i > 1 else (), 8) for i in range(2 * n)]
    return [*nodes, CutNode("loss", 1.0, (2 * n - 2, 2 * n - 1), 0)]


SIX_TIED = [TiedParameter(f"w{i}", (1 + 4 * i, 49 + 4 * i), 2, 2) for i in range(6)]
# The most that the slowest stage may take, as a multiple of the bound.
SHAPES = {
    "heavy head": (Case(transformer(48, 60.0), 8, link=1 / 1024), 1.01),
    "heavy head of few stages": (Case(transformer(8, 60.0), 4, link=1 / 1024), 1.01),
    "two towers": (Case(long_towers(32), 2, link=1 / 64), 1.03),
    "towers of four stages": (Case(long_towers(32), 4, link=1 / 64), 1.07),
    "U-Net": (Case(deep_unet(8), 4, link=1 / 1024), 1.25),
    "tight memory": (Case(transformer(24, 3.0), 8, link=1 / 1024, memory=64), 1.25),
    "six tied": (Case(transformer(24, 3.0), 4, link=1 / 1024, tied=SIX_TIED, microbatches=4), 1.06),
}
LARGE = {
    "96 layers": (Case(transformer(96, 3.0), 32, link=1 / 1024), 1.12),
    "chain": (Case(chain([1.0 + i % 7 for i in range(20_000)], [4] * 20_000), 32, link=1 / 1024), 1.01),
    "layers of many ops": (Case(transformer(96, 3.0, ops=100), 32, link=1 / 1024), 1.05),
}
CASES = [pytest.param(*case, id=name) for name, case in SHAPES.items()]
CASES += [pytest.param(*case, id=name, marks=pytest.mark.long) for name, case in LARGE.items()]


@pytest.mark.parametrize(("case", "ratio"), CASES)
def test_large_graphs_are_cut_close_to_the_bound(case: Case, ratio: float) -> None:
    cut = case.cut()
    work = [node.seconds for node in case.nodes]
    assert cut.bound == cut.seconds if cut.exact else cut.bound == max(sum(work) / case.stages, *work)
    assert cut.bound <= cut.seconds <= ratio * cut.bound
    assert all(cut.stages[x] <= cut.stages[i] for i, node in enumerate(case.nodes) for x in node.inputs)
    if not case.tied and len(case.nodes) < 1000:  # the oracle looks at all pairs of nodes
        seconds, traffic, memory = case.price(cut.stages, ())
        assert (seconds, traffic) == (pytest.approx(cut.seconds), cut.traffic)
        assert memory == max(cost.memory for cost in cut.costs) <= (case.memory or memory)
