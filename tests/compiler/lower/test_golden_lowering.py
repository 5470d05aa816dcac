"""Golden texts of lowering: one small function per idea, the sharding that the compiler decides, and its program.

`golden/NAME.txt` holds a function's decisions and its program before any pass. `GOLDEN=write` rewrites all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.program.text import parse, show
from tests.helpers.golden import assert_golden

FOLDER = Path(__file__).parent / "golden"


class Case(NamedTuple):
    """A function, the shapes of its arguments, and their specs, on the mesh `a=2`."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    in_specs: tuple[str, ...]
    out_specs: Any = None


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def relu_of_product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def twice_a_product(x: Tensor, w: Tensor) -> Tensor:
    return (2 * (x @ w)).T


def two_products(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return x @ w + y @ v


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def total(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w, padding=1)


def shifted(x: Tensor) -> Tensor:
    return x[1:] - x[:-1]


ROWS = torch.tensor([3, 0, 5, 3])


def table_rows(table: Tensor) -> Tensor:
    return table[ROWS]


def rows_added_to_a_table(table: Tensor, rows: Tensor) -> Tensor:
    return table.index_add(0, ROWS.repeat(16), rows)


def bag_of_rows(table: Tensor) -> Tensor:
    return table[ROWS.repeat(16)].sum(0)


GROUP_ENDS = torch.tensor([3, 8], dtype=torch.int32)


def expert_products(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch._grouped_mm(x.bfloat16(), w.bfloat16(), GROUP_ENDS)
    return torch._grouped_mm(hidden.relu(), w.bfloat16(), GROUP_ENDS).float()


def ramp(x: Tensor) -> Tensor:
    return x * torch.arange(6, dtype=x.dtype)[:, None]


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(0)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(0)


@sl.shard_map(in_specs=("_@a _",), out_specs="_ _")
def added_by_hand(x: Tensor) -> Tensor:
    return sl.psum(x, "a")


@torch.library.custom_op("test_golden::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.flip(0).clone()


turned.register_fake(torch.empty_like)

CASES = {
    "batch_is_sharded": Case(product, ((6, 4), (4, 8)), ("m@a k", "k n")),
    "partial_sum_is_added": Case(product, ((6, 4), (4, 8)), ("m k@a", "k@a n"), "m n"),
    "partial_sum_is_scattered": Case(product, ((6, 4), (4, 8)), ("m k@a", "k@a n"), "m@a n"),
    "partial_sum_is_added_before_relu": Case(relu_of_product, ((6, 4), (4, 8)), ("m k@a", "k@a n")),
    "partial_sum_passes_linear_ops": Case(twice_a_product, ((6, 4), (4, 8)), ("m k@a", "k@a n"), "n m"),
    "two_partial_sums_are_added_once": Case(
        two_products, ((6, 4), (4, 8), (6, 8), (8, 8)), ("m k@a", "k@a n", "m j@a", "j@a n"), "m n"
    ),
    "result_is_gathered": Case(doubled, ((6, 4),), ("m@a n",), "m n"),
    "result_changes_its_dim": Case(doubled, ((6, 4),), ("m@a n",), "m n@a"),
    "operands_disagree": Case(total, ((6, 4), (6, 4)), ("m@a n", "m n@a")),
    "uneven_shards": Case(doubled, ((5, 4),), ("m@a n",), "m n"),
    "convolution_fetches_a_halo": Case(convolution, ((1, 2, 8), (2, 2, 3)), ("b c l@a", "o c k")),
    "slices_fetch_a_halo": Case(shifted, ((8, 3),), ("m@a n",)),
    "rows_of_a_sharded_table": Case(table_rows, ((6, 4),), ("m@a n",), "m n"),
    "addition_to_rows_of_a_table": Case(rows_added_to_a_table, ((6, 4), (64, 4)), ("m n", "b@a n"), "m n"),
    "gathered_rows_are_added_before_they_are_sent": Case(bag_of_rows, ((6, 4),), ("m@a n",), "n"),
    "experts_compute_their_own_rows": Case(expert_products, ((8, 16), (2, 16, 16)), ("t d", "e@a d f"), "t f"),
    "constant_is_sharded": Case(ramp, ((6, 4),), ("m@a n",)),
    "running_sum_over_shards": Case(running_sum, ((6, 4),), ("m@a n",)),
    "maximum_over_shards": Case(log_softmax, ((6,),), ("m@a",)),
    "shard_map_body": Case(added_by_hand, ((6, 4),), ("m@a n",)),
    "op_without_a_rule": Case(turned, ((6, 4),), ("m@a n",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_is_lowered(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDLIB_DUMP", str(tmp_path))
    case = CASES[name]
    numbers = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=numbers) for shape in case.shapes]
    with Mesh(a=2):
        step = sl.jit(case.function, in_specs=case.in_specs, out_specs=case.out_specs)
        step.plan(*args)
        torch.testing.assert_close(step(*args).full_tensor(), case.function(*args))
    folder = min(tmp_path.iterdir())
    decisions, program = (next(folder.glob(f"*_{stage}.txt")).read_text() for stage in ("decisions", "lowered"))
    assert show(parse(program)) == program.strip()
    assert_golden(FOLDER / f"{name}.txt", f"{decisions}----\n{program}")


def test_every_golden_text_has_a_case() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(CASES)
