"""A plan in a notebook: what its text says, as one well-formed table."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh


def _mlp(x: Any, ws: Any) -> Any:
    for w in ws:
        x = torch.relu(x @ w["<up>"]) @ w["d&own"]
    return {"<b>": x, "n": 3}


def _plan(layers: int) -> sl.Plan:
    x = torch.ones(8, 4)
    ws = [{"<up>": torch.ones(4, 16), "d&own": torch.ones(16, 4)} for _ in range(layers)]
    with Mesh(data=2, tensor=2, rules={"ff": "tensor"}):
        step: Any = sl.jit(_mlp, in_specs=("batch@data _", [{"<up>": "embed ff", "d&own": "ff embed"}] * layers))
        return step.plan(x, ws)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_table_says_what_the_text_says(layers: int) -> None:
    plan = _plan(layers)
    root = ET.fromstring(plan._repr_html_())  # well-formed, so everything in it is escaped
    rows = [" ".join("".join(td.itertext()) for td in tr) for tr in root.iter("tr")]
    text = "\n".join(["".join(root[0].itertext()), *rows])
    # Without their columns, the two have the same words, line by line.
    assert [line.split() for line in text.splitlines()] == [line.split() for line in plan.full.splitlines() if line]


def test_names_are_escaped() -> None:
    page = _plan(1)._repr_html_()
    assert "<up>" not in page
    assert "<b>" not in page
    assert "&lt;up&gt;" in page
    assert "d&amp;own" in page


def test_collectives_stand_out() -> None:
    root = ET.fromstring(_plan(1)._repr_html_())
    marked = [tr for tr in root.iter("tr") if "background" in tr[0].attrib["style"]]
    assert ["".join(tr[0].itertext()).split()[:2] for tr in marked] == [["!", "all_reduce[tensor]"]]


def test_the_table_needs_nothing_else() -> None:
    page = _plan(1)._repr_html_()
    assert not re.search(r"<(script|link|img|style)|https?:|class=", page)
    widths = {sum(int(td.get("colspan", 1)) for td in tr) for tr in ET.fromstring(page).iter("tr")}
    assert len(widths) == 1
