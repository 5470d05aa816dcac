"""The main job: what it computes, and that it can be stopped, resumed and moved to another mesh."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardlib as sl
from shardlib.examples import data, functional
from shardlib.examples.model import GPT, WEIGHTS
from shardlib.examples.options import Options
from shardlib.examples.train_gpt import Run, main, make_optimizer, train
from tests.helpers.ranks import apart, heard, run_ranks

pytestmark = pytest.mark.together
ROOT = Path(__file__).parents[2]
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
    corpus = data.Corpus.from_text(data.standard_library(int(options.megabytes * 1e6)))
    torch.manual_seed(options.seed)
    model = GPT(options.config)
    opt, schedule = make_optimizer(model, options)
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


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run, whose folder the tests read and copy, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = train(replace(TINY, out=tmp_path_factory.mktemp("first") / "run"))
    return run, said.getvalue()


def _copied(first: tuple[Run, str], folder: Path) -> Path:
    return Path(shutil.copytree(first[0].options.out, folder))


@pytest.mark.slow
@pytest.mark.parametrize(("data_axis", "tensor_axis"), [(1, 1), (4, 2)])
def test_losses_are_those_of_plain_torch(tmp_path: Path, plain: list[float], data_axis: int, tensor_axis: int) -> None:
    run = train(replace(TINY, out=tmp_path, data=data_axis, tensor=tensor_axis))
    assert run.losses.train == pytest.approx(plain, abs=1e-4)


@pytest.mark.long
def test_what_a_run_leaves(first: tuple[Run, str], plain: list[float]) -> None:
    run, said = first
    folder = run.options.out
    assert (run.options.data, run.options.tensor) == (2, 4)
    assert run.losses.train == pytest.approx(plain, abs=1e-4)
    assert run.step.retraces == [], "a rate that changes is no new program"
    assert _steps(folder) == [3, 6]
    written = json.loads((folder / "losses.json").read_text())
    assert written["train"] == run.losses.train
    assert [step for step, _ in written["validation"]] == [3, 6]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "all_reduce" in (folder / "plan.html").read_text(encoding="utf-8")
    sample = (folder / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith("def ")
    assert not [path for path in folder.parent.rglob("*") if "part" in path.name]
    for text in (
        "train_step on data=2, tensor=4 (8 devices, virtual)",
        "2 steps to go, ",
        f"--- the model goes on from 'def ':\n{sample}---",
        f"loss {run.losses.train[0]:.3f} -> {run.losses.train[-1]:.3f} nats per byte",
        "--data 8 --tensor 1: ",
        "--resume --steps 12: ",
        f"{folder}/plan.html, ",
    ):
        assert text in said, text


@pytest.mark.long
def test_moments_live_where_the_weights_do(first: tuple[Run, str]) -> None:
    run, _ = first
    moments = {name: run.opt.state[p] for name, p in run.model.named_parameters()}
    for name, p in run.model.named_parameters():
        assert sl.typeof(p) == sl.typeof(moments[name]["exp_avg"]) == sl.typeof(moments[name]["exp_avg_sq"]), name
    cut = [name for name, p in run.model.named_parameters() if "@tensor" in sl.typeof(p)]
    assert len(cut) == len(WEIGHTS)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("data_axis", "tensor_axis"), [(8, 1), (2, 4)])
def test_resumed_on_any_mesh_it_goes_on_as_if_nothing_had_been(
    tmp_path: Path, first: tuple[Run, str], plain: list[float], data_axis: int, tensor_axis: int
) -> None:
    out = _copied(first, tmp_path / "run")
    # The schedule is that of the whole run; only the end comes early.
    (out / "checkpoints" / "step-000006").rename(tmp_path / "gone")
    run = train(replace(TINY, out=out, data=data_axis, tensor=tensor_axis, resume=True))
    assert run.losses.train[:3] == first[0].losses.train[:3]
    assert run.losses.train == pytest.approx(plain, abs=1e-4)
    assert [step for step, _ in run.losses.validation] == [3, 6]


def _losses_on_ranks(options: Options, ops: str) -> list[float]:
    with mock.patch.dict(os.environ, {"SHARDLIB_OPS": ops} if ops else {}):
        return train(options).losses.train


_RESUMED = list(itertools.product(("ranks", "virtual"), ((1, 2), (2, 2)), ("", "torch")))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("saved", "shape", "ops"), _RESUMED)
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


@pytest.mark.long
def test_resume_says_what_is_wrong(tmp_path: Path, first: tuple[Run, str]) -> None:
    with pytest.raises(SystemExit, match=r"there is no checkpoint in .*\n.*begin the run"):
        train(replace(TINY, out=tmp_path, resume=True))
    out = _copied(first, tmp_path / "run")
    with pytest.raises(SystemExit, match=r"the checkpoint holds another model: .*'heads': 4.* asked for .*'heads': 2"):
        train(replace(TINY, out=out, heads=2, resume=True))
    with pytest.raises(SystemExit, match=r"(?s)one of something else.*model.norm.weight is float32\[32\].*\[64\] here"):
        train(replace(TINY, out=out, width=64, resume=True))


@pytest.mark.long
def test_a_new_run_moves_the_former_one_aside(tmp_path: Path, first: tuple[Run, str]) -> None:
    train(replace(TINY, out=_copied(first, tmp_path / "run"), steps=1))
    assert _steps(tmp_path / "run.1") == [3, 6]
    assert _steps(tmp_path / "run") == [1]


def _told(pipe: Connection, words: list[str]) -> None:
    """The command, its exit status, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = main(words)
    pipe.send((status, said.getvalue()))


@pytest.mark.long
@pytest.mark.ranks
def test_interrupted_it_leaves_a_usable_checkpoint(tmp_path: Path, plain: list[float]) -> None:
    """SIGINT, as Ctrl-C sends it: the step ends, a checkpoint is written, the exit status is 0."""
    options = replace(TINY, out=tmp_path, steps=100_000, save_every=100_000, eval_every=3)
    process, pipe = apart(_told, _command(options)[2:])
    deadline = time.monotonic() + 120
    while not (tmp_path / "plan.html").exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    status, out = heard(pipe)
    process.join()
    assert status == 0
    (done,) = _steps(tmp_path)
    assert f"stopped after step {done}; the checkpoint is in {tmp_path / 'checkpoints'}" in out
    assert "give the same command again with --resume" in out
    run = train(replace(options, steps=done + 1, resume=True))
    assert len(run.losses.train) == done + 1


def _by_torchrun(options: Options) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *_command(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nats per byte") == 1  # one rank speaks


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "torchrun"])
def test_ranks_compute_what_virtual_devices_compute(tmp_path: Path, plain: list[float], launched: bool) -> None:
    """Two processes: the losses of 6 steps, and a checkpoint that loads on virtual devices."""
    options = replace(TINY, out=tmp_path / "ranks", data=1, tensor=2, steps=6, save_every=6, eval_every=6, sample=1)
    _by_torchrun(options) if launched else run_ranks(_losses_on_ranks, 2, options, "")
    losses: dict[str, Any] = json.loads((tmp_path / "ranks" / "losses.json").read_text())
    assert losses["train"] == pytest.approx(plain, abs=1e-4)
    resumed = train(replace(options, data=2, steps=7, resume=True))
    assert resumed.done == 7


@pytest.mark.long
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
