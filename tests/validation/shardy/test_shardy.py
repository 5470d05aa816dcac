"""Shardy's propagation as an oracle, on generated programs (needs jax)."""

from __future__ import annotations

import dataclasses

import pytest

from shardlib.sharding.layout import Layout
from tests.validation.shardy.oracle import differences, layout_text, our_shardings, shardy_shardings
from tests.validation.shardy.programs import draw
from tests.validation.shardy.scores import agreement, scores, traffic

pytest.importorskip("jax", reason="Shardy comes with jax")
pytestmark = pytest.mark.peer


def test_programs_without_conflicts_are_sharded_alike() -> None:
    score = scores(agreement, range(40))
    assert not score.unexplained, "\n".join(score.unexplained)


def test_conflicts_cost_no_more_than_with_shardy() -> None:
    score = scores(traffic, range(40))
    assert score.good >= 0.9 * score.programs, "\n".join((*score.explained, *score.unexplained))


def test_a_sharding_that_differs_is_seen() -> None:
    """The comparison must notice one annotation less."""
    seen = 0
    for seed in range(10):
        p = draw(seed, conflicts=False)
        bare = dataclasses.replace(p, inputs=tuple((v, None) for v, _ in p.inputs))
        seen += bool(differences(p, shardy_shardings(p), our_shardings(bare)))
    assert seen > 3


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("8@data, 4", "[data, -]"),
        ("(8 4@tensor), 4@data", "[tensor inside, data]"),
        ("(2@data 4@tensor)", "[data tensor]"),
        ("16@tensor:(1)2", "[tensor:(1)2]"),
    ],
)
def test_layouts_in_shardys_terms(layout: str, text: str) -> None:
    assert layout_text(Layout.parse(layout, {"data": 2, "tensor": 4})) == text
