"""Ranks that disagree or die are named within a timeout; the wording is what the user has to go by."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.core.torch_internals.torch_private import default_store
from shardlib.distributed import turns
from shardlib.distributed.consensus import compare_programs, raise_lost_ranks
from shardlib.ops.collectives import all_reduce
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.ranks import Pool, RankError, only, run_ranks

pytestmark = pytest.mark.ranks


def said(call: Any, *args: Any) -> str | None:
    """What the ShardingError says that the call raises; None when it raises none."""
    try:
        call(*args)
    except ShardingError as error:
        return str(error)
    return None


def meet(digests: list[str], texts: list[str]) -> str | None:
    rank = dist.get_rank()
    return said(compare_programs, Mesh(x=len(digests)), digests[rank], texts[rank], 30.0)


def test_same_programs_agree():
    for text in ("train_step\na = 1", "eval_step\nb = 2"):
        assert run_ranks(meet, 4, [text] * 4, [text] * 4) == [None] * 4


@pytest.mark.parametrize(
    ("digests", "texts", "offenders"),
    [
        (
            ["aaaaaaaaaa"] * 3 + ["bbbbbbbbbb"],
            ["train_step\nx = mm(a, b)\ny = relu(x)"] * 3 + ["train_step\nx = mm(a, b)\n  y = tanh(x)"],
            [
                "rank 3 runs train_step [bbbbbbbb], ranks 0, 1 and 2 run train_step [aaaaaaaa]; "
                "line 2 is 'y = tanh(x)' on the first and 'y = relu(x)' on the second"
            ],
        ),
        (
            ["a", "b", "a", "c"],
            ["f\n1", "f\n1\n2", "f\n1", "g"],
            [
                "rank 1 runs f [b], ranks 0 and 2 run f [a]; the first has 2 lines, the second 1",
                "rank 3 runs g [c], ranks 0 and 2 run f [a]; the first has 0 lines, the second 1",
            ],
        ),
        (
            ["a", "a", "b", "b"],
            ["f"] * 4,
            ["ranks 2 and 3 run f [b], ranks 0 and 1 run f [a]"],
        ),
    ],
)
def test_different_programs_are_named_on_every_rank(digests, texts, offenders):
    bullets = "".join(f"  * {offender}\n" for offender in offenders)
    assert only(run_ranks(meet, 4, digests, texts)) == (
        f"the ranks are about to run different programs:\n{bullets}"
        "Rule: every rank runs the same programs in the same order\n"
        "Remedy: start all ranks from the same code, configuration and input shapes; let nothing depend on the rank"
    )


def come_late(late: list[int]) -> str | None:
    """What a rank is told when some come only after the others have given up."""
    store, rank, mesh = default_store(), dist.get_rank(), Mesh(x=4)
    on_time = [f"told/{late}/{r}" for r in range(4) if r not in late]
    dist.barrier()
    if rank in late:
        store.wait(on_time)
    text = said(compare_programs, mesh, "a", "train_step\nx = 1", 2.0)
    store.set(f"told/{late}/{rank}", "")
    return text


@pytest.mark.long
@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize(
    ("late", "head"),
    [
        ([3], "rank 3 of 4 did not come to run train_step"),
        ([0, 2], "ranks 0 and 2 of 4 did not come to run train_step"),
    ],
)
def test_missing_ranks_are_named(late, head):
    results = run_ranks(come_late, 4, late)
    bullets = "".join(f"  * rank {r} did not arrive within 2 s: it is dead or runs other code\n" for r in late)
    for rank, text in enumerate(results):
        if rank not in late:
            assert text is not None
            assert text.startswith(f"{head}:\n{bullets}Rule: every rank runs the same programs in the same order\n")
            assert "SHARDLIB_TIMEOUT=<seconds> waits longer" in text


def reduce_or_blame(group: GroupHandle, mesh: Mesh, timeout: float) -> None:
    try:
        all_reduce.start(torch.ones(1 << 16), group).finish()
    except CollectiveError as error:
        raise_lost_ranks(mesh, error, timeout)


def die_in_a_step(victim: int) -> None:
    mesh = Mesh(x=4)
    group = group_for(mesh, (mesh.axis("x"),))
    compare_programs(mesh, "a", "train_step")
    reduce_or_blame(group, mesh, 10.0)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce_or_blame(group, mesh, 10.0)


def test_a_killed_peer_is_named():
    victim = 1
    with pytest.raises(RankError) as caught:
        run_ranks(die_in_a_step, 4, victim)
    errors = caught.value.errors
    assert errors.pop(victim) == f"died with exit code {-signal.SIGKILL}"
    assert sorted(errors) == [rank for rank in range(4) if rank != victim]
    for rank, error in errors.items():
        assert isinstance(error, ShardingError)
        head, _, rest = str(error).partition("\n")
        if head.startswith("the ranks cannot go on: a collective failed on rank"):  # another one has judged before
            assert rest.startswith(f"  * rank {victim} is dead: its process is gone\n")
            continue
        assert str(error) == (
            f"a collective failed on rank {rank} of 4:\n"
            f"  * rank {victim} is dead: its process is gone\n"
            "Rule: every rank of the mesh takes part in every step\n"
            "Remedy: look for the first error in the output of the ranks named (one that came to its end left the "
            "others alone); SHARDLIB_TIMEOUT=<seconds> waits longer"
        )
    assert "The above exception was the direct cause" in str(caught.value)


def sleep_through(answers: bool) -> str | None:
    """Rank 1 takes no part in a collective, and answers or does not when rank 0 asks who is alive."""
    mesh, rank = Mesh(x=2), dist.get_rank()
    compare_programs(mesh, "a", "train_step")
    pg = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    group = GroupHandle((0, 1), pg, rank, "gloo", name=pg.group_name)
    if rank == 1:
        time.sleep(0.5 if answers else 3.0)
        return said(raise_lost_ranks, mesh, RuntimeError("elsewhere"), 5.0) if answers else None
    return said(reduce_or_blame, group, mesh, 0.5)


def alone(fn: Any, n: int, *args: Any) -> list[Any]:
    """In processes of their own: after a failure of a collective the ranks use no more of them."""
    with closing(Pool(n)) as pool:
        return pool.run(fn, *args)


@pytest.mark.long
@pytest.mark.parametrize(
    ("answers", "offender"),
    [
        (False, "rank 1 gave no sign of life within 0.5 s"),
        (True, "all ranks are alive: they waited in different collectives, or one was slower than the timeout"),
    ],
)
def test_a_silent_peer_is_named(answers, offender):
    text = alone(sleep_through, 2, answers)[0]
    assert text is not None
    assert text.startswith(f"a collective failed on rank 0 of 2:\n  * {offender}\n")


def test_a_lost_store_names_rank_0(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    monkeypatch.setattr(turns, "default_store", lambda: client)
    monkeypatch.setattr(turns.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(turns.dist, "get_world_size", lambda: 2)
    here = turns.Order(None)
    monkeypatch.setitem(raise_lost_ranks.__globals__, "current", lambda: here)
    mesh: Any = SimpleNamespace(kind="distributed", size=2, rank=1)
    del server
    cause = RuntimeError("Connection closed by peer")
    with pytest.raises(ShardingError, match="rank 1 lost the store") as caught:
        raise_lost_ranks(mesh, cause, 0.1)
    assert caught.value.offenders == ("rank 0, or the launcher that holds the store, is gone",)
    assert caught.value.__cause__ is cause


def test_one_device_and_virtual_meshes_have_nobody_to_agree_with():
    compare_programs(Mesh(x=4), "a", "f")
    one: Any = SimpleNamespace(kind="distributed", size=1, rank=0)
    compare_programs(one, "a", "f")


def without_memory() -> str | None:
    error = CollectiveError("rank 1 cannot reserve 4.0 MiB of memory")
    error.culprit, error.is_late = 1, False
    return said(raise_lost_ranks, Mesh(x=2), error, 5.0)


def test_a_rank_without_memory_is_not_said_to_be_slow():
    for text in alone(without_memory, 2):
        assert "\n  * rank 1 cannot reserve 4.0 MiB of memory\nRule: " in text
