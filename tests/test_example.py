"""The main job: what it computes, and that it can be stopped, resumed and moved to another mesh."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardlib as sl
from shardlib.examples import data, functional
from shardlib.examples.model import GPT, RULES, WEIGHTS
from shardlib.examples.options import Options
from shardlib.examples.train_gpt import Run, optimizer_of, train
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
TINY = Options(
    steps=6,
    batch=4,
    layers=1,
    width=32,
    heads=4,
    context=16,
    megabytes=0.1,
    warmup=2,
    save_every=3,
    eval_every=3,
    sample=8,
)


def _command(options: Options, *more: str) -> list[str]:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if name != "resume"]
    return ["-m", "shardlib.examples.train_gpt", *words, *more]


def _plain_losses(options: Options) -> list[float]:
    """The same training in plain torch, on one device."""
    corpus = data.Corpus.of(data.standard_library(int(options.megabytes * 1e6)))
    torch.manual_seed(options.seed)
    model = GPT(options.config)
    opt, schedule = optimizer_of(model, options)
    losses = []
    for number in range(1, options.steps + 1):
        with sl.no_mesh():
            loss = model(*data.batch(corpus.train, number, options.batch, options.context, options.seed))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def _steps(folder: Path) -> list[int]:
    return sl.Checkpoints(folder / "checkpoints").steps


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return _plain_losses(TINY)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("data_axis", "tensor_axis"), [(2, 4), (1, 1), (4, 2)])
def test_losses_are_those_of_plain_torch(tmp_path: Path, plain: list[float], data_axis: int, tensor_axis: int) -> None:
    run = train(replace(TINY, out=tmp_path, data=data_axis, tensor=tensor_axis))
    assert run.losses.train == pytest.approx(plain, abs=1e-4)


def test_what_a_run_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(replace(TINY, out=tmp_path / "run"))
    assert _steps(tmp_path / "run") == [3, 6]
    written = json.loads((tmp_path / "run" / "losses.json").read_text())
    assert written["train"] == run.losses.train
    assert [step for step, _ in written["validation"]] == [3, 6]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "all_reduce" in (tmp_path / "run" / "plan.txt").read_text()
    assert not list(tmp_path.rglob("*partial*"))
    assert "--- the model goes on from 'def '" in capsys.readouterr().out


def test_moments_live_where_the_weights_do(tmp_path: Path) -> None:
    mesh = sl.Mesh(data=2, tensor=4, rules=RULES)
    run = Run(replace(TINY, out=tmp_path), mesh, data.Corpus.of(data.standard_library(100_000)))
    with mesh:
        run.advance()
    moments = {name: run.opt.state[p] for name, p in run.model.named_parameters()}
    for name, p in run.model.named_parameters():
        assert sl.typeof(p) == sl.typeof(moments[name]["exp_avg"]) == sl.typeof(moments[name]["exp_avg_sq"]), name
    cut = [name for name, p in run.model.named_parameters() if "@tensor" in sl.typeof(p)]
    assert len(cut) == len(WEIGHTS)


def test_a_rate_that_changes_is_no_new_program(tmp_path: Path) -> None:
    assert train(replace(TINY, out=tmp_path)).step.retraces == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("data_axis", "tensor_axis"), [(8, 1), (2, 4)])
def test_resumed_on_any_mesh_it_goes_on_as_if_nothing_had_been(
    tmp_path: Path, plain: list[float], data_axis: int, tensor_axis: int
) -> None:
    shorter = replace(TINY, out=tmp_path, steps=3)
    # The schedule is that of the whole run; only the end comes early.
    first = train(replace(shorter, steps=TINY.steps, save_every=3))
    for path in (tmp_path / "checkpoints").glob("step-000006"):
        path.rename(tmp_path / "gone")
    run = train(replace(TINY, out=tmp_path, data=data_axis, tensor=tensor_axis, resume=True))
    assert run.losses.train[:3] == first.losses.train[:3]
    assert run.losses.train == pytest.approx(plain, abs=1e-4)
    assert [step for step, _ in run.losses.validation] == [3, 6]


def _losses_on_ranks(options: Options, ops: str) -> list[float]:
    with mock.patch.dict(os.environ, {"SHARDLIB_OPS": ops} if ops else {}):
        return train(options).losses.train


_RESUMED = list(itertools.product(("ranks", "virtual"), ((1, 2), (2, 2)), ("", "torch")))
_FAST = (("ranks", (1, 2), ""),)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "shape", "ops"), [pytest.param(*x, marks=[] if x in _FAST else pytest.mark.slow) for x in _RESUMED]
)
def test_resumed_on_ranks_it_goes_on_as_if_nothing_had_been(
    tmp_path: Path, plain: list[float], saved: str, shape: tuple[int, int], ops: str
) -> None:
    """Weights and both moments are read into memory of their own, over what they were placed from."""
    there = replace(TINY, out=tmp_path, data=shape[0], tensor=shape[1])
    ranks = math.prod(shape)
    if saved == "ranks":
        run_ranks(_losses_on_ranks, ranks, there, ops)
    else:
        train(replace(TINY, out=tmp_path, data=4, tensor=2))
    (tmp_path / "checkpoints" / "step-000006").rename(tmp_path / "gone")
    for losses in run_ranks(_losses_on_ranks, ranks, replace(there, resume=True), ops):
        assert losses == pytest.approx(plain, abs=1e-4)


def test_resume_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no checkpoint in .*\n.*begin the run"):
        train(replace(TINY, out=tmp_path, resume=True))
    train(replace(TINY, out=tmp_path, steps=1))
    with pytest.raises(SystemExit, match=r"the checkpoint holds another model: .*'heads': 4.* asked for .*'heads': 2"):
        train(replace(TINY, out=tmp_path, heads=2, resume=True))
    with pytest.raises(SystemExit, match=r"(?s)one of something else.*model.norm.weight is float32\[32\].*\[64\] here"):
        train(replace(TINY, out=tmp_path, width=64, resume=True))


def test_a_new_run_moves_the_former_one_aside(tmp_path: Path) -> None:
    once = replace(TINY, out=tmp_path / "run", steps=1)
    train(once)
    train(once)
    assert _steps(tmp_path / "run.1") == [1]
    assert _steps(tmp_path / "run") == [1]


def test_interrupted_it_leaves_a_usable_checkpoint(tmp_path: Path, plain: list[float]) -> None:
    """SIGINT, as Ctrl-C sends it: the step ends, a checkpoint is written, the exit status is 0."""
    options = replace(TINY, out=tmp_path, steps=100_000, save_every=100_000, eval_every=3)
    process = subprocess.Popen(
        [sys.executable, *_command(options)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "plan.txt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (done,) = _steps(tmp_path)
    assert f"stopped after step {done}; the checkpoint is in {tmp_path / 'checkpoints'}" in out
    assert "give the same command again with --resume" in out
    run = train(replace(options, steps=done + 1, resume=True))
    assert len(run.losses.train) == done + 1


@pytest.mark.ranks
def test_ranks_compute_what_virtual_devices_compute(tmp_path: Path) -> None:
    """Two processes under torchrun: the losses of 6 steps, and a checkpoint that loads on virtual devices."""
    options = replace(TINY, out=tmp_path / "ranks", data=1, tensor=2, steps=6, save_every=6)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *_command(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nats per byte") == 1  # one rank speaks
    losses: dict[str, Any] = json.loads((tmp_path / "ranks" / "losses.json").read_text())
    virtual = train(replace(options, out=tmp_path / "virtual"))
    assert losses["train"] == pytest.approx(virtual.losses.train, abs=1e-4)
    assert losses["train"] == pytest.approx(_plain_losses(options), abs=1e-4)
    resumed = train(replace(options, data=2, tensor=4, steps=8, resume=True))
    assert resumed.done == 8


def test_the_functional_form_trains_as_plain_torch_does(capsys: pytest.CaptureFixture[str]) -> None:
    rules = {"batch": "data", "ff": "tensor"}
    losses = functional.fit(sl.Mesh(data=2, tensor=4, rules=rules), steps=5)
    functional.main()
    assert "all_reduce[tensor]" in capsys.readouterr().out
    torch.manual_seed(0)
    params = {name: p.requires_grad_() for name, p in functional.init().items()}
    opt = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    for sharded in losses:
        x = torch.randn(32, 16)
        loss = functional.loss(params, x, x.flip(1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        assert loss.item() == pytest.approx(sharded, abs=1e-5)
