"""Pipelines with other options: memory budgets, recomputation, offload, mixed precision and gradient scalers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.core.fragment_tag import NO_TAG, current_tag
from tests.helpers.pipelines import Case, mlp, next_token_loss, train
from tests.helpers.ranks import only, run_ranks

# Memory --------------------------------------------------------------------------------------------------------------


def _in_two_stages(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    with sl.stage(0):
        x = x @ v
    with sl.stage(1):
        return x @ w


def _plan(placed: bool, **options: Any) -> Any:
    """Plans on 2 stages: x and v have 128 and 256 bytes, w has 128; x @ v has 512 bytes, and its product with w 64."""
    with sl.Mesh(stage=2, stages="stage") as mesh:
        tensors = torch.ones(8, 4), torch.ones(4, 16), torch.ones(16, 2)
        if placed:
            tensors = tensors[0], *(sl.shard(x, "...", mesh=mesh.at(stage=i)) for i, x in enumerate(tensors[1:]))
        return sl.jit(_in_two_stages, **options).plan(*tensors)


@pytest.mark.parametrize(
    ("placed", "peaks"),
    [
        (True, [128 + 256 + 512, 128 + 128 + 512 + 64]),  # plain x is on all ranks
        (False, [128 + 256 + 128 + 512, 128 + 256 + 128 + 512 + 64]),
    ],
)
def test_a_stage_counts_what_its_devices_hold(placed: bool, peaks: list[int]) -> None:
    plan = _plan(placed)
    assert [s.peak_memory for s in plan.pipeline.stages] == peaks
    assert plan.peak_memory == plan.simulate().peak_memory == max(peaks)
    exact = _plan(placed, memory=f"{max(peaks)} B")
    assert [s.peak_memory for s in exact.pipeline.stages] == peaks


@pytest.mark.parametrize(("budget", "stages"), [(895, [0]), (831, [0, 1])])
def test_a_budget_names_the_stages_that_exceed_it(budget: int, stages: list[int]) -> None:
    with pytest.raises(sl.ShardingError, match="cannot run on these stages as the options request") as caught:
        _plan(True, memory=f"{budget} B")
    least = {0: 896, 1: 832}
    for i, peak in least.items():
        line = (
            f"stage {i}: the program does not fit into memory={budget} bytes: the least peak that was found is {peak}"
        )
        remedy = f'for stage {i}, memory="{peak} B"'
        assert (line in str(caught.value)) == (remedy in str(caught.value)) == (i in stages)


def _train_plan(schedule: str = "1f1b", stages: bool = True, rows: int = 64, **options: Any) -> Any:
    """Plans a step of SGD with 4 microbatches on 4 blocks, 2 of them on each stage."""
    example = mlp(4)
    with sl.Mesh(stage=2, stages="stage"):
        model = sl.parallelize(example.model, stages=example.patterns(2) if stages else None)

        def loss(batch: Tensor) -> Tensor:
            loss = next_token_loss(model, batch) / 4
            loss.backward()
            return loss.detach()

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = sl.microbatch(loss, batch, n=4, schedule=schedule, reduce="sum")
            optimizer.step()
            return total

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sl.jit(step, **options).plan(model, optimizer, torch.zeros(rows, 6, dtype=torch.long))


def _peaks(plan: Any) -> list[int]:
    return [s.peak_memory for s in plan.pipeline.stages]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_remat_lowers_the_peak_of_every_stage(schedule: str) -> None:
    plan = _train_plan(schedule, remat="full")
    assert all(less < more for less, more in zip(_peaks(plan), _peaks(_train_plan(schedule)), strict=True))
    recomputed = plan.compiled.recomputed
    assert recomputed.values >= 4 * 4, "at least one value of every block and microbatch"
    assert f"the backward pass recomputes {recomputed.values} values" in str(plan)


@pytest.mark.long
@pytest.mark.parametrize("named", [True, False])
def test_a_budget_below_the_peak_recomputes_or_offloads(named: bool) -> None:
    """An automatic cut, too: one that cannot keep all values is no reason to refuse the budget."""
    budget = max(_peaks(_train_plan(stages=named))) * 3 // 4
    assert max(_peaks(_train_plan(stages=named, memory=f"{budget} B"))) <= budget


@pytest.mark.long
def test_names_hold_for_all_stages() -> None:
    """A name of a module on one stage is a name; one of no stage is refused once."""
    plan = _train_plan(remat=["layers.3"])
    assert plan.compiled.recomputed.values > 0
    with pytest.raises(sl.ShardingError, match=r"remat names what the forward pass does not make(.|\n)*'layers.9' is"):
        _train_plan(remat=["layers.9"])


# Values --------------------------------------------------------------------------------------------------------------

SAVED, STATE = sl.Schedule(offload="saved"), sl.Schedule(offload=("parameters", "moments"))
COMBINED = [
    *(
        Case(model, 2, 4, schedule, inside, door, "patterns", options, parallel)
        for schedule in ("1f1b", "zb_h1")
        for model, inside, door, options, parallel in (
            ("mlp", "none", "inside", {"remat": "full"}, {}),
            ("mlp", "fsdp", "around", {"remat": ["layers.1", "tanh"]}, {}),
            ("mlp", "tensor", "loop", {}, {"remat": "full"}),
            ("checkpointed", "none", "inside", {}, {}),
            ("checkpointed", "fsdp", "around", {}, {}),
            ("checkpointed", "none", "loop", {}, {}),
            ("mlp", "none", "inside", {"schedule": SAVED}, {}),
            ("mlp", "fsdp", "around", {"schedule": STATE}, {}),
            ("mlp", "ddp", "loop", {}, {"schedule": SAVED}),
        )
    ),
    Case("mlp", 2, 4, "1f1b", "none", "inside", "automatic", {"memory": "36 kB"}),
    Case("checkpointed", 4, 4, "1f1b", "none", "inside", "automatic"),
]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardlib.RematWarning")
@pytest.mark.parametrize("case", COMBINED, ids=lambda case: f"{case}{case.parallel or ''}")
def test_options_leave_values_equal_to_one_device(case: Case) -> None:
    outcome = train(case)
    assert max(outcome.loss, outcome.parameters) <= outcome.tolerance
    if "schedule" in case.options:
        assert outcome.staged is not None
        assert all(program.copied for program in outcome.staged.programs), "every stage moves values"


@pytest.mark.long
def test_a_checkpoint_leaves_no_stage_behind() -> None:
    """Its second pass ends by an exception, behind which torch calls no hook of a module in a trace."""
    outcome = train(Case("checkpointed", 2, 2, "1f1b", "none", "around"), steps=1)
    gc.collect()
    assert current_tag() == NO_TAG
    assert outcome.parameters <= outcome.tolerance


# Mixed precision -----------------------------------------------------------------------------------------------------


def _train_in_bfloat16(kind: str, schedule: str, mesh: sl.Mesh) -> list[Tensor]:
    """Returns the losses of 2 steps, and the gradients of the second one."""
    torch.manual_seed(0)
    example = mlp(4)
    model, stages = example.model, example.patterns(2) if mesh.stage_axis else None
    strategy = "fsdp" if "data" in mesh.axes else None
    precision = torch.bfloat16 if kind == "precision" else None
    with mesh:
        model = sl.parallelize(model, strategy=strategy, stages=stages, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)

        @sl.jit
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
            optimizer.zero_grad()

            def loss(rows: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    return next_token_loss(model, rows)

            total = sl.microbatch(loss, batch, n=4, schedule=schedule)
            total.backward()
            optimizer.step()
            return total.detach()

        losses = [step(model, optimizer, example.batch(16)) for _ in range(2)]
        gradients = [p.grad for p in model.parameters()]
        return [_full(x) for x in (*losses, *gradients)]


def _full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("kind", ["autocast", "precision"])
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_bfloat16_on_stages_is_that_without(kind: str, schedule: str, axes: dict[str, int]) -> None:
    """Sums over microbatches are in float32, and in one order: the program without stages has the same bits."""
    expected = _train_in_bfloat16(kind, schedule, sl.Mesh(**axes or {"data": 1}))
    staged = _train_in_bfloat16(kind, schedule, sl.Mesh(stage=2, stages="stage", **axes))
    for mine, theirs in zip(staged, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert {x.dtype for x in staged[2:]} == {torch.float32}, "gradients"


# Gradient scalers ----------------------------------------------------------------------------------------------------


def _skip_the_second_step(door: str, stages: int, overflows: int, schedule: str = "1f1b") -> list[Tensor]:
    """Trains 3 steps with a scaler; in the second one, the gradient of parameter `overflows` is infinite.

    Checks on this process that this step changes no parameter and no moment on any stage, and halves the scale; returns
    the parameters.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    batches = torch.randn(3, 8, 4)
    with sl.Mesh(stage=stages, stages="stage") if stages > 1 else sl.Mesh(data=1):
        patterns = {f"{i}": i * stages // 4 for i in range(4)} if stages > 1 else None
        model = sl.parallelize(model, stages=patterns)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, factor: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = sl.microbatch(lambda rows: model(rows).square().mean(), batch, n=2, schedule=schedule)
            scaler.scale(loss).backward()
            p = [*model.parameters()][overflows]
            p.grad = p.grad * factor  # type: ignore[operator]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        run: Callable[..., Any] = sl.jit(step) if door == "jit" else step
        scales = []
        for i, batch in enumerate(batches):
            before = _state(model, optimizer)
            run(model, optimizer, batch, torch.tensor(float("inf") if i == 1 else 1.0))
            after = _state(model, optimizer)
            changed = [not torch.equal(x, y) for x, y in zip(before, after, strict=False)]
            assert any(changed) != (i == 1)
            assert all(changed[:8]) != (i == 1), "all parameters change, or none"
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0]
        return [_full(p.detach()) for p in model.parameters()]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns copies of the parameters and moments."""
    moments = [optimizer.state[p][name] for p in optimizer.state for name in ("exp_avg", "exp_avg_sq")]
    return [_full(x.detach()).clone() for x in (*model.parameters(), *moments)]


@pytest.mark.long
@pytest.mark.parametrize("door", ["jit", "loop"])
@pytest.mark.parametrize("overflows", [0, 7], ids=["on the first stage", "on the last stage"])
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (2, "zb_h1"), (4, "gpipe")])
def test_all_stages_skip_the_step_of_a_scaler(stages: int, schedule: str, overflows: int, door: str) -> None:
    expected = _skip_the_second_step(door, 1, overflows)
    for mine, theirs in zip(_skip_the_second_step(door, stages, overflows, schedule), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("door", ["jit", "loop"])
@pytest.mark.parametrize("overflows", [0, 7], ids=["on the first stage", "on the last stage"])
def test_all_ranks_skip_the_step_of_a_scaler(overflows: int, door: str) -> None:
    expected = _skip_the_second_step(door, 1, overflows)
    for parameters in run_ranks(_skip_the_second_step, 2, door, 2, overflows, timeout=400):
        for mine, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def _train_with(options: dict[str, Any]) -> list[float]:
    outcome = train(Case("mlp", 2, 2, "1f1b", "none", "inside", "patterns", options))
    return [outcome.loss, outcome.parameters]


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardlib.RematWarning")
@pytest.mark.parametrize("options", [{"remat": "full"}, {"schedule": SAVED}, {"schedule": STATE}], ids=str)
def test_options_on_ranks(options: dict[str, Any]) -> None:
    assert max(only(run_ranks(_train_with, 2, options, timeout=400))) <= 1e-10
