"""What several devices do identically: figures by hand, the plan's line, the budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, Plan, ShardingError
from shardlib.compiler.plan.redundant_work import Redundant
from shardlib.compiler.program.steps import Compute
from shardlib.compiler.program.sym_int import apart, everywhere, most
from tests.validation.best import Row, f32, ints
from tests.validation.best.rows import ROWS

EIGHT = Mesh.abstract(tensor=8)


def plan(fn: Callable[..., Any], *args: Any, mesh: Mesh = EIGHT, **options: Any) -> Plan:
    with mesh:
        planned: Plan = sl.jit(fn, **options).plan(*args)
    return planned


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


LINE = f"tests/compiler/plan/test_redundant_work.py:{product.__code__.co_firstlineno + 1}"
MM = 2 * 16 * 32 * 64


def test_a_replicated_product() -> None:
    """Eight devices do all of it: seven eighths of what each does and holds, the others do and hold."""
    planned = plan(product, f32(16, 32), f32(32, 64))
    assert planned.flops == MM
    assert planned.redundant == (Redundant("mm", LINE, False, MM * 7 / 8, 16 * 64 * 4 * 7 // 8, 8, ("tensor",)),)
    assert str(planned.redundant[0]) == (
        f"mm at {LINE}: 57.3 kFLOP and 3.58 kB beyond its share, alike on 8 devices along tensor"
    )
    assert (
        f"\nredundant: 57.3 kFLOP of 65.5 kFLOP per device, 3.58 kB of results; most in mm at {LINE} (tensor)"
        in planned.summary()
    )


@pytest.mark.parametrize("specs", [("m@tensor _", "..."), ("...", "_ n@tensor"), ("_ k@tensor", "k@tensor _")])
def test_nothing_where_it_is_cut(specs: tuple[str, ...]) -> None:
    """Whichever dim is cut; what a sum brings to all devices is a collective's result."""
    planned = plan(product, f32(16, 32), f32(32, 64), in_specs=specs)
    assert planned.redundant == ()
    assert "redundant" not in planned.summary()


def test_along_one_axis_of_two_and_a_part_of_one() -> None:
    """4 rows along an axis of 8 are cut over its major part; the minor part repeats them."""
    planned = plan(product, f32(16, 32), f32(32, 64), mesh=Mesh.abstract(data=2, tensor=4), in_specs=("m@data _", None))
    (one,) = planned.redundant
    assert (one.flops, one.copies, one.axes) == (MM / 2 * 3 / 4, 4, ("tensor",))
    planned = plan(lambda x: x.sin(), f32(4), in_specs=("(m=4@tensor:(1)4)",))
    (one,) = planned.redundant
    assert (one.copies, one.axes) == (2, ("tensor:(4)2",))


@pytest.mark.parametrize("op", [lambda x: x.topk(4, 0), torch.linalg.qr])
def test_not_what_each_found(op: Callable[[Tensor], Any]) -> None:
    """The best of the best of each device, the factor of all factors: the op again, on little."""
    planned = plan(op, f32(8192, 8), in_specs=("n@tensor _",))
    assert not [r for r in planned.redundant if r.flops]


def test_views_hold_nothing_and_what_runs_in_place_nothing_more() -> None:
    records = plan(lambda x: x.sin().view(-1).sum(), f32(8, 8)).redundant
    assert [(r.op, r.flops, r.bytes) for r in records] == [("sin", 56, 224), ("sum", 56, 4)]
    records = plan(lambda x: x.sin().cos(), f32(8, 8)).redundant
    assert [(r.op, r.flops, r.bytes) for r in records] == [("sin", 56, 224), ("cos", 56, 0)]


def test_layers_at_one_line_are_one_record() -> None:
    def layers(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws:
            x = x @ w
        return x

    (one,) = plan(layers, f32(16, 32), [f32(32, 32)] * 3).redundant
    assert (one.times, one.flops) == (3, 3 * 2 * 16 * 32 * 32 * 7 / 8)
    assert str(one).startswith("mm 3 times at tests/compiler/plan/test_redundant_work.py:")


def step(w: Tensor, x: Tensor) -> Tensor:
    g = sl.grad(lambda w: (x @ w).square().sum())(w)
    return w - 0.1 * g


def test_a_data_parallel_step_repeats_its_update_alone() -> None:
    """The product with 0.1 is in front of the sum."""
    planned = plan(step, f32(64, 64), f32(1024, 64), in_specs=("...", "b@tensor _"))
    assert [(r.op, r.flops) for r in planned.redundant if r.flops] == [("sub", 64 * 64 * 7 / 8)]
    assert "redundant" not in planned.summary(), "pointwise work beside products is not worth a line"


def test_the_backward_of_a_line() -> None:
    first, second, *_ = plan(sl.grad(lambda w, x: (x @ w).square().sum()), f32(64, 64), f32(128, 64)).redundant
    assert (first.op, first.backward, second.op, second.backward) == ("mm", False, "mm", True)
    assert first.flops == second.flops == 2 * 64 * 64 * 128 * 7 / 8
    assert str(second).startswith("mm in the backward of tests/compiler/plan/test_redundant_work.py:")


# What a form makes beside the arithmetic of its op, or less, where what it repeats is more than the op had to do; a sum
# over a cut dim may come behind another product; and what the device does that has most.
LOCAL_FORMS = {
    "rows by table": (1.0, 1.05),
    "tables by an index that counts them, cut by features": (0.97, 1.0),
    "adapters of many users, cut by adapters": (1.0, 5.7),
    "LoRA, frozen weights over tensor": (1.0, 1.02),
    "gradients of SSD by sums of segments, heads cut": (1.0, 1.09),  # of matrices by which b and c are multiplied
    "evolution strategies, population cut": (1.0, 1.03),  # numbers multiply what each has, not the sum alike on each
    "gradient of a loss in three parts": (1.0, 1.02),
    "spectral clustering, rows cut": (0.99, 1.0),  # the factors of all devices are a seventh of what each decomposes
    # What is looked up is worked on where it was found, with zeros for what others have.
    "factorization machine, rows cut": (1.0, 5.81),
    "gradient of a factorization machine": (1.0, 5.81),
    "gradients of a factorization machine over a list of tables": (1.0, 5.81),
    "factorization machine of many tables": (1.0, 5.81),
    "factorization machine with weights, rows cut": (1.0, 5.81),
    "update of looked-up rows": (1.0, 4.51),
    "gradient of a table of cut rows": (1.0, 4.51),
    "SGD step of a table of cut rows": (1.0, 1.12),
    "repetition penalty, vocabulary cut": (1.0, 5.68),
    # So is the row at an end, which one device has.
    "torch.gradient along a cut dim": (1.0, 1.02),
    "one-sided differences at both ends": (1.0, 1.02),
    "bags by table": (1.0, 2.01),  # two ops, where bags of whole tables are one
    "gradients of bags by table": (1.0, 1.13),
    "gradients of causal linear attention": (0.99, 1.0),  # a running sum is of what a device has
    "gradients with z-loss, vocabulary cut": (0.99, 1.0),
}


def _mean(step: Compute) -> float:
    """The FLOPs of a device, of which those at the ends of a dim may do less than others, or more."""
    if step.work is None:
        return step.flops
    parts = [step.work.at(coords) for coords in everywhere(apart(step.work.axes))]
    return float(step.flops / most(step.work) * sum(parts) / len(parts))


@pytest.mark.sampled(47)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_without_it_every_device_does_its_share(row: Row) -> None:
    """Products, lookups, shifts, decompositions: all FLOPs of all devices but these are those of one that does all."""
    planned = row.plan()
    with Mesh(dict.fromkeys(row.mesh, 1)):
        alone = sl.jit(row.program).plan(*row.args).flops
    done = sum(_mean(step) for step in planned.compiled.program.steps if isinstance(step, Compute))
    mine = (done - sum(r.flops for r in planned.redundant)) * planned.mesh.size
    low, high = LOCAL_FORMS.get(row.name, (1.0, 1.01))
    assert low * alone <= mine * (1 + 1e-9) <= high * alone + 1e-3, "the rest is what local forms do beside"


def test_offsets_make_results_differ() -> None:
    """A draw, and a lookup in a table of cut rows, depend on where a device is."""
    planned = plan(lambda i, w: torch.nn.functional.embedding(i, w), ints(64), f32(80, 8),
                   in_specs=(None, "v@tensor _"))  # fmt: skip
    assert not [r for r in planned.redundant if r.op == "embedding"]


def test_plain_data() -> None:
    data = plan(product, f32(16, 32), f32(32, 64)).to_dict()["redundant"]
    assert json.loads(json.dumps(data)) == data
    assert data[0]["axes"] == ["tensor"]


# --- the budget -------------------------------------------------------------------------------------------------------


def test_a_budget_names_all_offenders() -> None:
    with pytest.raises(ShardingError) as error:
        plan(product, f32(16, 32), f32(32, 64), redundancy_budget=sl.redundancy_budget(max_share=0.05, max_flops=1000))
    assert (
        str(error.value)
        == f"""\
product exceeds its redundancy budget:
  * 57.3 kFLOP of 65.5 kFLOP per device (87.5 %) are done identically elsewhere, the budget is 5 %
  * 57.3 kFLOP of 65.5 kFLOP per device (87.5 %) are done identically elsewhere, the budget is 1 kFLOP
  * mm at {LINE}: 57.3 kFLOP and 3.58 kB beyond its share, alike on 8 devices along tensor
Rule: redundancy_budget(max_share=0.05, max_flops=1000)
Remedy: cut a dim of the named ops over the named axes (an input, or sl.shard on a line), or raise the budget"""
    )


def test_a_budget_that_is_kept() -> None:
    budget = sl.redundancy_budget(max_share=0.05, max_flops=0)
    plan(product, f32(16, 32), f32(32, 64), in_specs=("m@tensor _", "..."), redundancy_budget=budget)
    plan(product, f32(16, 32), f32(32, 64), redundancy_budget=sl.redundancy_budget(max_share=0.875))
    plan(product, f32(16, 32), f32(32, 64), redundancy_budget=sl.redundancy_budget())


def test_budgets_of_both_kinds_around_calls() -> None:
    run = sl.jit(product)
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with Mesh(tensor=2):
        run(x, w)
        with sl.comm_budget(max_bytes=0), sl.redundancy_budget(max_flops=1e9):
            run(x, w)
        with sl.redundancy_budget(max_flops=10), pytest.raises(ShardingError, match="exceeds its redundancy budget"):
            run(x, w)  # a call that is known already
        both = sl.jit(
            product, comm_budget=sl.comm_budget(max_bytes=0), redundancy_budget=sl.redundancy_budget(max_share=0)
        )
        with pytest.raises(ShardingError, match="redundancy"):
            both(x, w)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sl.redundancy_budget(max_share=5), "a share is a number from 0 to 1"),
        (lambda: sl.jit(product, redundancy_budget=0.05), r"0\.05 is no budget"),
        (lambda: sl.jit(product, redundancy_budget=sl.comm_budget()), r"Remedy: redundancy_budget=sl\.redundancy_bu"),
        (lambda: sl.jit(product, comm_budget=sl.redundancy_budget()), r"Remedy: comm_budget=sl\.comm_budget\(max_by"),
    ],
)
def test_what_is_no_budget(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ShardingError, match=words):
        make()
