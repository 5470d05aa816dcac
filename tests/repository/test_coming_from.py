"""Tables of other libraries' knobs: the code of the shardlib column runs, and does what its row says."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from tests.repository.coming_from_checks import CHECKS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs/coming").glob("*.md")), ROOT / "docs/pipelines.md"]


class Row(NamedTuple):
    page: str
    subject: str
    setup: str
    code: str


def _rows(page: Path) -> Iterator[Row]:
    """Yields the rows of all tables whose last column is shardlib; each runs after the nearest block above it."""
    setup, ours = "", False
    for part in re.split(r"(^```python\n.*?^```$)", page.read_text(), flags=re.M | re.S):
        if part.startswith("```python\n"):
            setup = part.removeprefix("```python\n").removesuffix("```")
            continue
        for line in part.splitlines():
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not cells or set(cells[0]) <= {"-"}:
                ours = ours and bool(cells)
            elif cells[-1] == "shardlib":
                ours = True
            elif ours:
                (code, *_) = re.findall(r"`([^`]*)`", cells[-1]) or [""]
                yield Row(page.stem, cells[0], setup, code)


ROWS = [row for page in PAGES for row in _rows(page)]


def test_every_row_has_a_check() -> None:
    assert {(row.page, row.subject) for row in ROWS} == {(page, row) for page, rows in CHECKS.items() for row in rows}
    assert len(ROWS) == len({(row.page, row.subject) for row in ROWS})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yields a DeviceMesh and a DTensor of a world of one rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    yield {"device_mesh": device_mesh, "dtensor": distribute_tensor(torch.ones(4, 2), device_mesh, [Shard(0)])}
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}-{row.subject[:40]}")
def test_our_side_of_a_row(row: Row, request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {"__name__": "document"}
    if needs_world := re.search(r"\b(device_mesh|dtensor)\b", row.code):
        names |= request.getfixturevalue("world")
    exec("import shardlib as sl; mesh = None" if needs_world else row.setup, names)
    with names["mesh"] or contextlib.nullcontext():
        names["out"] = None
        value = _run(row.code, names)
        names["out"] = names["out"] if value is None else value
        holds = eval(check := CHECKS[row.page][row.subject], {**names, **HELPERS})
    assert holds, f"{row.code} does not give: {check}"


def _run(code: str, names: dict[str, Any]) -> Any:
    """Runs statements, and returns the value of an expression."""
    try:
        expression = compile(code, "row", "eval")
    except SyntaxError:
        exec(code, names)
        return None
    return eval(expression, names)


def _kinds(plan: sl.Plan) -> set[str]:
    return {c.kind for c in plan.collectives}


def _same(x: Any, y: Tensor) -> bool:
    return torch.allclose(x.full_tensor(), y, atol=1e-6)


def _clipped(model: torch.nn.Module, x: Tensor) -> list[float]:
    model(x).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [round(float(value), 3) for value in (norm, *(p.grad.sum() for p in model.parameters()))]


HELPERS = {"copy": copy, "clipped": _clipped, "kinds": _kinds, "same": _same, "typeof": sl.typeof}
