"""Ranks that are lost and started again: whom the survivors name, and that no bit differs afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardlib as sl
from shardlib.distributed.rendezvous import agree_on_prefix
from shardlib.distributed.store import Store
from shardlib.distributed.watched import Watch
from tests.helpers import restarts
from tests.helpers.restarts import Loss, Moment

STEPS = "--steps=12"


@pytest.fixture
def connect() -> Callable[[], dist.Store]:
    """Makes connections to one store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def _start(connect: Callable[[], dist.Store], size: int, first: list[int]) -> list[str]:
    """Starts ranks, some of them before the others; returns their prefixes."""
    with ThreadPoolExecutor(size) as pool:
        begun = {r: pool.submit(agree_on_prefix, connect(), r, size, 30.0) for r in first}
        if 0 not in first:
            store = connect()
            newest = store.get("shardlib/start").decode() if store.check(["shardlib/start"]) else ""
            if newest:  # the first ranks have answered to the ranks before them
                store.wait([f"{newest}/members/{r}" for r in first])
        begun |= {r: pool.submit(agree_on_prefix, connect(), r, size, 30.0) for r in range(size) if r not in begun}
        results = [begun[r].result() for r in range(size)]
    assert all(len(processes) == size for _, processes in results)
    return [prefix for prefix, _ in results]


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 2), (2, 4), (1, 2, 1)])
@pytest.mark.parametrize("late", [0, -1])
def test_every_start_has_a_prefix_of_its_own(connect: Any, sizes: tuple[int, ...], late: int) -> None:
    seen: set[str] = set()
    for size in sizes:
        prefixes = set(_start(connect, size, [r for r in range(size) if r != late % size]))
        assert len(prefixes) == 1
        assert not prefixes & seen
        seen |= prefixes


def test_a_start_that_was_not_completed_is_left_behind(connect: Any) -> None:
    with pytest.raises(sl.ShardingError, match="rank 1 did not come to start:\n"):
        agree_on_prefix(connect(), 0, 2, 0.2)
    assert len(set(_start(connect, 2, [1]))) == 1
    with pytest.raises(sl.ShardingError, match="rank 0 did not come to start:\n"):
        agree_on_prefix(connect(), 1, 2, 0.2)


def _watch(connect: Any, rank: int, size: int) -> Watch:
    return Watch(Store(rank, connect()), "room", size, list)


def test_a_dead_rank_is_named_while_a_task_waits_for_it(connect: Any) -> None:
    never, reasons = threading.Event(), list[str]()
    watch = Watch(Store(0, connect()), "room", 2, lambda: [1], reasons.append)
    with pytest.raises(sl.ShardingError) as error:
        watch.run(lambda: never.wait(60.0), "save a checkpoint")
    never.set()
    assert reasons == [str(error.value)]
    assert str(error.value) == (
        "rank 0 cannot save a checkpoint:\n"
        "  * rank 1 is dead: its process is gone\n"
        "Rule: every rank of the mesh takes part in every step\n"
        "Remedy: look for the first error in the output of the ranks named"
    )


def test_a_task_that_fails_on_all_ranks_keeps_its_error(connect: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no space left")

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_watch(connect, rank, 2).run, fail, "save a checkpoint") for rank in range(2)]
        for run in runs:
            with pytest.raises(RuntimeError, match="no space left"):
                run.result()


@pytest.mark.long
def test_a_silent_rank_is_named_on_all_others_and_not_those_that_still_wait(connect: Any) -> None:
    never = threading.Event()

    def lose() -> None:
        raise RuntimeError("Connection closed by peer")

    tasks = {0: lose, 1: lambda: never.wait(60.0)}  # rank 1 waits for rank 0, and rank 2 is on a machine that is gone
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_watch(connect, rank, 3).run, task, "save") for rank, task in tasks.items()]
        for rank, run in enumerate(runs):
            with pytest.raises(sl.ShardingError) as error:
                run.result()
            assert error.value.what == f"rank {rank} cannot save"
            assert error.value.offenders == ("rank 2 gave no sign of life within 10 s",)
        never.set()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Loss]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert restarts.finish([restarts.start_here(folder, 2, STEPS)], 300.0) == ""
    losses = restarts.read_losses(folder)
    assert [(x.step, x.ranks, x.first) for x in losses] == [(step, 2, 0) for step in range(1, 13)]
    return losses


@pytest.mark.ranks
@pytest.mark.slow  # on a loaded machine a run may end before the moment of its kill
@pytest.mark.together
@pytest.mark.parametrize(
    ("victim", "moment", "options"),
    [
        (0, Moment("start", 0, 0.3), []),
        (1, Moment("step", 7, 0.02), ["--background"]),
        (0, Moment("save", 10, 0.01), []),
        (1, Moment("save", 5, 0.05), []),
    ],
    ids=str,
)
def test_a_killed_rank_is_named_and_the_run_continues_with_the_same_bits(
    undisturbed: list[Loss], victim: int, moment: Moment, options: list[str], tmp_path: Path
) -> None:
    folder, shared = tmp_path / "run", set(Path("/dev/shm").iterdir())
    restarts.prepare(folder, victim, moment)
    assert restarts.finish([restarts.start_here(folder, 2, STEPS, *options)], 300.0) == ""
    named, stopped, wrong = restarts.list_endings(folder, [victim])
    assert wrong == []
    assert [*named, *stopped] == [1 - victim] or (moment.after == "start" and not named and not stopped)
    assert restarts.find_differences(restarts.read_losses(folder), undisturbed) == []
    assert set(Path("/dev/shm").iterdir()) == shared
