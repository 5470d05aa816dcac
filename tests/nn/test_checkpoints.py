"""Checkpoints of a run: on any mesh, whole or not at all."""

from __future__ import annotations

import datetime
import enum
import itertools
import os
import threading
import time
from collections import namedtuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardlib as sl
from shardlib import Checkpoints, Mesh, ShardingError
from tests.helpers.ranks import apart, heard, run_ranks


class Data:
    """A position, as a loader keeps it."""

    def __init__(self) -> None:
        self.at = 0

    def batch(self) -> Tensor:
        self.at += 1
        return torch.randn(8, 8, generator=torch.Generator().manual_seed(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def make(axes: dict[str, int] | None, strategy: str, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 8))
    if axes is not None:
        model = sl.parallelize(model, strategy=strategy, mesh=Mesh(axes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "data": Data(), "note": "", "n": 0}


def steps(run: dict[str, Any], count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = run["model"](run["data"].batch()).square().mean()
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["schedule"].step()
        losses.append(float(loss))
    return losses


MESHES: list[tuple[dict[str, int], str]] = [
    ({"data": 4}, "fsdp"),
    ({"data": 2}, "zero1"),
    ({"replica": 2, "shard": 2}, "hsdp"),
    ({"data": 3}, "zero2"),
]


@pytest.mark.long
@pytest.mark.sampled(7)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", range(len(MESHES)))
def test_a_run_goes_on_on_another_mesh(at: int, background: bool, tmp_path: Path) -> None:
    """With fresh objects, its optimizer too: weights, moments, rate, position and random numbers."""
    first = make(*MESHES[at])
    torch.manual_seed(5)
    steps(first, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {**first, "note": "good", "n": 7}, background=background)
    kept = [float(x) for x in steps(first, 3)]  # while it is written
    checkpoints.wait()
    second = make(*MESHES[(at + 1) % len(MESHES)], seed=1)
    torch.manual_seed(17)
    assert Checkpoints(tmp_path).load(second) == {"note": "good", "n": 7, "step": 3}
    assert steps(second, 3) == pytest.approx(kept, rel=1e-5)
    assert (tmp_path / "newest").read_text() == "step-000003"
    moments = second["optimizer"].state[second["model"][0].weight]["exp_avg"]
    fresh = make(*MESHES[(at + 1) % len(MESHES)])
    steps(fresh, 1)
    assert sl.typeof(moments) == sl.typeof(fresh["optimizer"].state[fresh["model"][0].weight]["exp_avg"])


def test_the_last_ones_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    assert checkpoints.steps == []
    for step in (1, 5, 20):
        checkpoints.save(step, {"x": torch.full((2,), float(step))})
    assert checkpoints.steps == [5, 20]
    x = torch.zeros(2)
    assert checkpoints.load({"x": x}) == {"step": 20}
    assert x.tolist() == [20, 20]
    checkpoints.load({"x": x}, step=5)
    assert x.tolist() == [5, 5]
    checkpoints.save(6, {"x": x})  # of a run that went back: what is later is not older
    assert checkpoints.steps == [5, 6, 20]


def _small(axes: dict[str, int] | None = None) -> dict[str, Any]:
    run = make(axes, "fsdp")
    return {"model": run["model"], "optimizer": run["optimizer"]}


def _changed(run: dict[str, Any], how: str, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "step-000001"
    if how == "another model":
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    if how == "other entries":
        return {"model": run["model"], "sampler": Data()}
    if how == "another dtype":
        return {"model": run["model"].double(), "optimizer": run["optimizer"]}
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    if how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "a file is gone":
        (path / "values.pt").unlink()
    elif how == "nothing is said":
        (path / "run.json").unlink()
    elif how == "nothing at all":
        (path).rename(tmp_path / ".step-000001.partial")
    return run


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("another model", ["is one of something else", "model.0.weight is float32[16, 8] in it, and float32[12, 8]",
                           "model.3.weight of float32[8, 16] is in it, and nothing takes it",
                           "model.1.weight of float32[8, 12] is not in it"]),
        ("other entries", ["optimizer is in it, and nothing takes it", "sampler is not in it"]),
        ("another dtype", ["model.3.bias is float32[8] in it, and float64[8] here"]),
        ("truncated", ["is incomplete", "bytes of"]),
        ("a file is gone", ["is incomplete", "values.pt is missing"]),
        ("nothing is said", ["is no checkpoint", "run.json"]),
        ("nothing at all", ["there is no checkpoint in"]),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_of_this_changes_nothing(how: str, messages: list[str], tmp_path: Path) -> None:
    first = _small()
    first["model"](torch.ones(2, 8)).sum().backward()
    first["optimizer"].step()
    Checkpoints(tmp_path).save(1, first)
    second = _changed(_small(), how, tmp_path)
    before = [x.clone() for x in second["model"].parameters()]
    random = torch.get_rng_state()
    with pytest.raises(ShardingError) as error:
        Checkpoints(tmp_path).load(second)
    assert [m for m in messages if m not in str(error.value)] == []
    assert all(torch.equal(x, y) for x, y in zip(before, second["model"].parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_an_error_in_the_background_is_raised_later(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, {"x": torch.zeros(2)})
    (tmp_path / "run" / "newest").unlink()
    (tmp_path / "run" / "newest").mkdir()  # where a file is to be
    checkpoints.save(2, {"x": torch.zeros(2)}, background=True)
    with pytest.raises(OSError, match="newest"):
        checkpoints.wait()
    assert checkpoints.load({"x": torch.ones(2)}, step=1) == {"step": 1}


def test_values_come_back_as_they_are_or_are_refused(tmp_path: Path) -> None:
    class Own:
        pass

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"at": {"epoch": 2, "seen": torch.ones(2)}})
    found = checkpoints.load({"at": None})["at"]
    assert (found["epoch"], found["seen"].tolist()) == (2, [1, 1])
    with pytest.raises(ShardingError, match=r"own is a Own: "):
        checkpoints.save(2, {"own": Own()})
    with Mesh(data=2):
        cut = sl.shard(torch.ones(4), "a@data")
    with pytest.raises(ShardingError, match=r"cache holds f32\[4@data\]"):
        checkpoints.save(2, {"cache": {"k": cut}})
    with pytest.raises(ShardingError, match=r"entries without a name of their own:\n  \* 'a\.b'\n  \* 3"):
        checkpoints.save(2, {"a.b": torch.ones(1), 3: torch.ones(1)})
    twice = nn.Module()
    twice.state_dict = lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}
    with pytest.raises(ShardingError, match=r"two tensors of a checkpoint are called m\.a\.b:\n.*float32\[1\] and"):
        checkpoints.save(2, {"m": twice})
    assert checkpoints.steps == [1]


# What an optimizer loads, damage, names -------------------------------------------------------------------------------


def _pair(strategy: str = "fsdp") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return sl.parallelize(model, strategy=strategy, mesh=Mesh(data=2))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


OTHERS = {
    "groups": (
        lambda m: torch.optim.Adam([{"params": m[0].parameters()}, {"params": m[1].parameters()}]),
        "o has groups of 4 parameters in it, and of 2 and 2 here",
    ),
    "class": (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9), "o is Adam in it, and SGD here"),
    "order": (
        lambda m: torch.optim.Adam([*m.parameters()][::-1]),
        "o: parameter 3 is m.1.bias of [8] in it, and m.0.weight of [8, 8] here",
    ),
    "parameters": (
        lambda m: torch.optim.Adam([*m[1].parameters(), *m[0].parameters()]),
        "o: parameter 0 is m.0.weight of [8, 8] in it, and m.1.weight of [8, 8] here",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_state_of_another_optimizer_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = OTHERS[kind]
    model = _pair()
    optimizer = torch.optim.Adam(model.parameters())
    _stepped(model, optimizer)
    Checkpoints(tmp_path).save(1, {"m": model, "o": optimizer})
    other = _pair()
    before = other[0].weight.full_tensor().clone()
    with pytest.raises(ShardingError) as said:
        Checkpoints(tmp_path).load({"m": other, "o": make(other)})
    assert message in str(said.value)
    assert torch.equal(other[0].weight.full_tensor(), before)


@pytest.mark.long
@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.Adagrad], ids=lambda c: c.__name__)
def test_fresh_or_used_an_optimizer_takes_what_was_saved(make: Any, tmp_path: Path) -> None:
    model, runs = _pair(), []
    optimizer = make(model.parameters())
    Checkpoints(tmp_path).save(0, {"m": model, "o": optimizer})
    _stepped(model, optimizer)
    Checkpoints(tmp_path).save(1, {"m": model, "o": optimizer})
    other = _pair("zero1")
    fresh = make(other.parameters())
    Checkpoints(tmp_path).load({"m": other, "o": fresh})
    for net, opt in ((model, optimizer), (other, fresh)):
        _stepped(net, opt)
        runs.append(net[0].weight.full_tensor())
    torch.testing.assert_close(*runs)
    Checkpoints(tmp_path).load({"m": model, "o": optimizer}, step=0)  # before the first step: no state
    _stepped(model, optimizer)
    Checkpoints(tmp_path).load({"m": other, "o": fresh}, step=1)
    torch.testing.assert_close(model[0].weight.full_tensor(), other[0].weight.full_tensor())


@pytest.mark.parametrize(
    ("file", "message"),
    [("*.distcp", "cannot be read"), (".metadata", "has other bytes"), ("values.pt", "has other bytes"),
     ("run.json", "is no checkpoint")],
)  # fmt: skip
def test_damage_is_found_before_anything_changes(file: str, message: str, tmp_path: Path) -> None:
    model = _pair()
    path = Checkpoints(tmp_path).save(1, {"m": model})
    (damaged,) = path.glob(file)
    content = bytearray(damaged.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = b"x" * len(content[middle : middle + 200])
    damaged.write_bytes(content)
    other = _pair()
    with torch.no_grad():
        other[0].weight.zero_()
        other[1].weight.zero_()
    with pytest.raises(ShardingError, match=message):
        Checkpoints(tmp_path).load({"m": other})
    assert all(not bool(layer.weight.full_tensor().any()) for layer in other)


@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_of_a_value_is_found(bit: int, tmp_path: Path) -> None:
    """In whichever byte of a file of tensors: what was saved is loaded, or nothing, with an error."""
    w = torch.arange(1.0, 5.0)
    path = Checkpoints(tmp_path).save(1, {"w": w})
    (file,) = path.glob("*.distcp")
    content = file.read_bytes()
    values = range(first := content.index(w.numpy().tobytes()), first + 16)
    for i in (*range(0, len(content), 23), *values):
        file.write_bytes(content[:i] + bytes([content[i] ^ bit]) + content[i + 1 :])
        other, said = torch.zeros(4), ""
        try:
            Checkpoints(tmp_path).load({"w": other})
        except ShardingError as error:
            said = str(error)
        assert torch.equal(other, torch.zeros(4) if said else w)
        assert i not in values or f"other bytes than were written: w in {file.name}" in said


def test_without_sums_there_is_nothing_to_compare(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        Checkpoints(tmp_path).save(1, {"w": torch.ones(4)})
    finally:
        torch.serialization.set_crc32_options(before)
    other = torch.zeros(4)
    Checkpoints(tmp_path).load({"w": other})
    assert other.all()


@pytest.mark.parametrize("text", ["[]", '{"files": {}}', "{"])
def test_facts_that_are_none(text: str, tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, {"n": 1})
    (path / "run.json").write_text(text)
    with pytest.raises(ShardingError, match=r"is no checkpoint:\n  \* run\.json: "):
        Checkpoints(tmp_path).load({"n": 0})


class Prompted(nn.Module):
    """A layer with a parameter that has no elements."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.prompt = nn.Linear(4, 4), nn.Parameter(torch.zeros(shape))
        self.register_buffer("past", torch.zeros(6, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.prompt.sum()


def _through_both(path: str, shape: tuple[int, ...], saved: str, loaded: str, count: int) -> bool:
    runs = []
    for seed, strategy in enumerate([saved, loaded, loaded]):
        torch.manual_seed(seed)
        model = sl.parallelize(Prompted(shape), strategy=strategy, mesh=Mesh(data=count))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if not seed:
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()
        runs.append((model, optimizer))
    (model, optimizer), (second, its), (third, own) = runs
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=f"{path}/torch", no_dist=not dist.is_initialized())
    state, moments = get_state_dict(second, its)
    both = {"model": state, "optimizer": moments}
    dcp.load(both, checkpoint_id=f"{path}/torch", no_dist=not dist.is_initialized())
    set_state_dict(second, its, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    Checkpoints(f"{path}/ours").save(1, {"model": model, "optimizer": optimizer})
    Checkpoints(f"{path}/ours").load({"model": third, "optimizer": own})
    return all(
        torch.equal(x.layer.weight.full_tensor(), model.layer.weight.full_tensor())
        and opt.state[x.prompt]["exp_avg"].shape == shape
        for x, opt in ((second, its), (third, own))
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("shape", [(0, 4), (6, 0), (0,)], ids=str)
@pytest.mark.parametrize("strategies", [("fsdp", "ddp"), ("zero1", "fsdp"), ("ddp", "zero2")], ids="-".join)
def test_a_parameter_without_elements(shape: tuple[int, ...], strategies: tuple[str, str], tmp_path: Path) -> None:
    assert _through_both(str(tmp_path), shape, *strategies, 2)


@pytest.mark.long
@pytest.mark.ranks
def test_a_parameter_without_elements_on_ranks(tmp_path: Path) -> None:
    assert all(run_ranks(_through_both, 2, str(tmp_path), (6, 0), "fsdp", "ddp", 2))


class Color(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")
NUMPY: dict[str, Any] = {
    "float64": np.float64(0.5), "float16": np.float16(0.5), "int64": np.int64(3), "bool": np.bool_(True),
    "complex": np.complex64(1 + 2j), "text": np.str_("a"), "day": np.datetime64("2020-01-01"), "dtype": np.dtype("f4"),
    "0-d": np.array(3.0), "array": np.arange(6).reshape(2, 3), "words": np.array(["a", "bc"]),
    "empty": np.zeros((0, 3)), "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "bytes": b"",
    "generator": np.random.default_rng(0).bit_generator.state, "state": np.random.get_state(),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_of_numpy_come_back(name: str, tmp_path: Path) -> None:
    value = NUMPY[name]
    Checkpoints(tmp_path).save(1, {"best": value, "run": {"all": [0, (value,)]}})
    found = Checkpoints(tmp_path).load({"best": None, "run": None})
    for loaded in (found["best"], found["run"]["all"][1][0]):
        assert type(loaded) is type(value)
        np.testing.assert_equal(loaded, value)
        if isinstance(value, np.ndarray):
            assert loaded.dtype == value.dtype


UNSAVABLE: dict[str, tuple[Any, str]] = {
    "path": (Path("runs"), "is a PosixPath: PosixPath('runs')"),
    "date": (datetime.date(2020, 1, 2), "is a date: datetime.date(2020, 1, 2)"),
    "enum": (Color.RED, "is a Color: <Color.RED: 1>"),
    "namedtuple": (Pair(1, 2), "is a Pair: Pair(a=1, b=2)"),
    "function": (len, "is a builtin_function_or_method: <built-in function len>"),
    "lambda": (lambda: 0, "is a function: <function "),
    "lock": (threading.Lock(), "is a lock: <unlocked _th"),
    "masked": (np.ma.array([1]), "is a MaskedArray: "),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_other_values_are_refused_by_name_before_anything_is_written(name: str, tmp_path: Path) -> None:
    value, said = UNSAVABLE[name]
    data = Data()
    data.state_dict = lambda: {"at": {3: value}}  # type: ignore[method-assign]
    state = {"n": 1, "run": {"all": [0, value], "fine": np.float64(1)}, "data": data}
    with pytest.raises(ShardingError, match=r"(?s)cannot hold some of its values:.*Remedy: save float\(x\), ") as error:
        Checkpoints(tmp_path).save(1, state)
    run, at = error.value.offenders
    assert run.startswith(f"run.all.1 {said}")
    assert at.startswith(f"data.at.3 {said}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ShardingError, match=r"a key of run is a"):
        Checkpoints(tmp_path).save(1, {"run": {Color.RED: 1}})


def _one_rank_has_another_value(folder: str) -> str:
    rank = dist.get_rank()
    with pytest.raises(ShardingError) as error:
        Checkpoints(folder).save(1, {"n": Path("a") if rank else 1})
    return str(error.value)


@pytest.mark.ranks
def test_a_value_that_one_rank_cannot_save_is_told_to_all(tmp_path: Path) -> None:
    first, second = run_ranks(_one_rank_has_another_value, 2, str(tmp_path))
    assert "rank 1: a checkpoint cannot hold some of its values" in first
    assert "n is a PosixPath: PosixPath('a')" in first
    assert second.startswith("a checkpoint cannot hold")
    assert not list(tmp_path.iterdir())


def test_which_one_is_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        checkpoints.save(step, {"n": step})
    checkpoints.load({"n": 0}, step=1)  # the run goes back, and on from there
    checkpoints.save(2, {"n": 22})
    assert checkpoints.load({"n": 0}) == {"n": 22, "step": 2}
    (tmp_path / "step-2").mkdir()
    assert checkpoints.steps == [1, 2, 3]
    (tmp_path / "newest").unlink()
    assert checkpoints.newest == 3


def test_killed_between_two_names(tmp_path: Path) -> None:
    """The old one of a step was renamed, and the new one not yet."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"n": 1})
    checkpoints.path(1).rename(tmp_path / ".step-000001.old")
    assert checkpoints.load({"n": 0}) == {"n": 1, "step": 1}
    checkpoints.save(1, {"n": 11})
    assert checkpoints.load({"n": 0}) == {"n": 11, "step": 1}
    assert sorted(x.name for x in tmp_path.iterdir()) == ["newest", "step-000001"]


def _saves(pipe: Connection, folder: Path) -> None:
    """Until it is killed."""
    checkpoints = Checkpoints(folder)
    x = torch.zeros(1 << 20)
    for step in itertools.count(1):
        x += 1
        checkpoints.save(step, {"x": x, "n": step}, background=step % 2 == 0)
        pipe.send(step)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.ranks
@pytest.mark.parametrize("attempt", range(4))
def test_killed_at_any_moment_it_goes_on_from_the_one_before(tmp_path: Path, attempt: int) -> None:
    run, steps = apart(_saves, tmp_path)
    for _ in range(2 + attempt):
        heard(steps)
    time.sleep(0.004 * attempt)
    run.kill()
    run.join()
    x = torch.zeros(1 << 20)
    found = Checkpoints(tmp_path).load({"x": x, "n": 0})
    assert found["n"] == found["step"] >= 1 + attempt
    assert torch.equal(x, torch.full_like(x, found["n"])), "whole"
    Checkpoints(tmp_path).save(found["step"] + 1, {"x": x, "n": 0})


def _on_ranks(path: str) -> list[Any]:
    found: list[Any] = []
    for i, (axes, strategy) in enumerate([({"data": 4}, "fsdp"), ({"replica": 2, "shard": 2}, "hsdp")]):
        run = make(axes, strategy, seed=i)
        checkpoints = Checkpoints(path)
        if i:
            found.append(checkpoints.load(run)["n"])
        found.append(steps(run, 2))
        checkpoints.save(i, {**run, "n": 3 + i}, background=True)
        steps(run, 2)  # while it is written
        checkpoints.wait()
    return [*found, checkpoints.steps]


@pytest.mark.long
@pytest.mark.ranks
def test_on_ranks(tmp_path: Path) -> None:
    every = run_ranks(_on_ranks, 4, str(tmp_path))
    assert all(found == every[0] for found in every)
    losses, n, more, done = every[0]
    assert (n, done) == (3, [0, 1])
    assert losses + more == pytest.approx(steps(make({"data": 2}, "zero1"), 4), rel=1e-5)
    run = make({"data": 2}, "zero2", seed=9)
    assert Checkpoints(tmp_path).load(run)["n"] == 4, "on virtual devices"


def _in_folders_of_their_own(folder: str) -> list[str]:
    told = []
    with Mesh(data=dist.get_world_size()):
        model = sl.parallelize(nn.Linear(4, 4), strategy="fsdp")
        apart = sl.Checkpoints(Path(folder) / str(dist.get_rank()))
        for act in (lambda: apart.save(1, {"model": model}), lambda: apart.load({"model": model})):
            with pytest.raises(ShardingError) as error:
                act()
            told.append(str(error.value).replace(folder, "folder"))
    return told


@pytest.mark.ranks
def test_ranks_that_name_different_checkpoints_are_told(tmp_path: Path) -> None:
    for saved, loaded in run_ranks(_in_folders_of_their_own, 2, str(tmp_path)):
        assert saved.splitlines()[:3] == [
            "ranks name different checkpoints:", "  * rank 0: step 1 in folder/0", "  * rank 1: step 1 in folder/1"
        ]  # fmt: skip
        assert "  * rank 1: none in folder/1" in loaded
