"""Shared memory between ranks: who may use it and why not, what becomes of it, and ranks that die or come late."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.core.torch_internals.torch_private import default_store
from shardlib.ops import native_libs
from shardlib.ops.collectives import all_gather, all_reduce
from shardlib.ops.collectives.transport import groups as transport_groups
from shardlib.ops.collectives.transport import result_buffers, shm_channel, shm_segment
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for
from shardlib.ops.collectives.transport.shm_channel import MAX_TRANSFERS
from shardlib.ops.collectives.transport.shm_segment import Address, Segment, SegmentError
from shardlib.ops.collectives.transport.shm_streams import TensorMeta, dense_meta
from shardlib.ops.collectives.transport.shm_world import check_same_settings
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.ranks import Pool, RankError, only

RANKED = pytest.mark.ranks


@contextmanager
def fresh(n: int) -> Iterator[Callable[..., list[Any]]]:
    """Processes of their own, for tests that leave them unfit for others; nothing may stay in /dev/shm."""
    before = left()
    with closing(Pool(n)) as pool:
        yield pool.run
    assert left() == before


def left() -> list[str]:
    """What is in /dev/shm, but for the semaphores of other processes' multiprocessing."""
    return sorted(path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-"))


def group_of(n: int) -> GroupHandle:
    mesh = Mesh(x=n)
    return group_for(mesh, (mesh.axis("x"),))


def gathered(group: GroupHandle, value: float | None = None) -> list[float]:
    x = torch.tensor([float(dist.get_rank()) if value is None else value])
    found: list[float] = all_gather.start(x, 0, [1] * group.size, group).finish().tolist()
    return found


# Who uses it.


def transport(setting: str | None = None, prepare: str = "") -> tuple[str, str]:
    """How this rank's group speaks and why, after a collective that must be right either way."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if setting is not None:
        os.environ["SHARDLIB_OPS"] = setting
    if prepare and rank == 1:
        PREPARE[prepare]()
    group = group_of(n)
    assert gathered(group) == [float(r) for r in range(n)]
    return group.transport, group.why


def _no_compiler() -> None:
    native_libs.host = lambda: Missing("no C++ compiler")  # type: ignore[assignment]


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _no_memfd() -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    os.memfd_create = refuse


def _elsewhere() -> None:
    shm_segment.machine = lambda: "elsewhere"


def _out_of_reach() -> None:
    make = Segment.make

    def lie(size: int) -> Segment:
        made = make(size)
        made.address = Address(made.address.machine, made.address.pid, 987654, size, made.address.token)
        return made

    Segment.make = staticmethod(lie)  # type: ignore[method-assign]


PREPARE = {f.__name__: f for f in (_no_compiler, _small_files, _no_memfd, _elsewhere, _out_of_reach)}


@RANKED
@pytest.mark.parametrize(
    ("setting", "prepare", "want"),
    [
        ("", "", ("shm", "")),
        ("torch", "", ("gloo", "SHARDLIB_OPS asks for torch")),
        ("", "_no_compiler", ("gloo", "rank 1: no C++ compiler")),
        ("", "_small_files", ("gloo", "rank 1: cannot reserve 16 MiB of shared memory: File too large")),
        ("", "_no_memfd", ("gloo", "rank 1: cannot reserve 16 MiB of shared memory: Function not implemented")),
        ("", "_elsewhere", ("gloo", "ranks 0 and 1 are on different machines, or in different containers")),
    ],
)
def test_all_use_it_or_none(setting, prepare, want):
    with fresh(2) as run:
        assert only(run(transport, setting, prepare)) == want


@pytest.mark.ranks
@RANKED
def test_memory_that_a_peer_cannot_open():
    with fresh(2) as run:
        how, why = only(run(transport, "", "_out_of_reach"))
    assert how == "gloo"
    assert why.startswith("rank 0: cannot open memory of process ")
    assert why.endswith("No such file or directory (rank 1)")


@pytest.mark.ranks
@RANKED
def test_a_backend_that_is_asked_for_is_not_replaced():
    with fresh(2) as run, pytest.raises(RankError) as caught:
        run(transport, "all_gather=shm", "_no_compiler")
    for error in caught.value.errors.values():
        assert isinstance(error, ShardingError)
        assert str(error).startswith("SHARDLIB_OPS asks for all_gather=shm, which cannot run here:")
        assert error.offenders == ("rank 1: no C++ compiler",)


def one_op_on_torch() -> tuple[list[str], list[float]]:
    os.environ["SHARDLIB_OPS"] = "all_gather=torch"
    group = group_of(2)
    choices = [str(op.choose(group.request(8, True, torch.float32, "sum"))) for op in (all_gather, all_reduce)]
    return choices, gathered(group)


@pytest.mark.ranks
@RANKED
def test_one_op_on_torch():
    with fresh(2) as run:
        choices, values = only(run(one_op_on_torch))
    assert choices[0].startswith("torch/exchange: a small message")
    assert choices[1].startswith("shm/one_step: ")
    assert values == [0.0, 1.0]


def own_setting(settings: list[str]) -> str:
    os.environ["SHARDLIB_OPS"] = settings[dist.get_rank()]
    try:
        group_of(len(settings))
    except ShardingError as error:
        assert mappings() == (0, 0)
        return str(error)
    return ""


@pytest.mark.ranks
@RANKED
def test_ranks_with_different_settings_are_named():
    with fresh(3) as run:
        assert only(run(own_setting, ["torch", "all_gather=shm", "torch"])) == (
            "the ranks would run their collectives in different ways:\n"
            "  * ranks 0 and 2: SHARDLIB_OPS='torch'\n"
            "  * rank 1: SHARDLIB_OPS='all_gather=shm'\n"
            "Rule: SHARDLIB_OPS is the same on every rank\n"
            "Remedy: set it where all ranks are started, or on none"
        )


@pytest.mark.ranks
@RANKED
def test_a_setting_that_cannot_be_read_is_refused_on_every_rank():
    with fresh(2) as run:
        assert only(run(own_setting, ["all_gather=gloo"] * 2)).startswith("cannot read SHARDLIB_OPS='all_gather=gloo'")


def join_late() -> str:
    os.environ["SHARDLIB_TIMEOUT"] = "0.4"
    mesh = Mesh(x=2)
    mesh.device_mesh  # noqa: B018 - meets the others through Gloo
    if dist.get_rank() == 1:
        time.sleep(1.2)
    try:
        group_for(mesh, (mesh.axis("x"),))
    except ShardingError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.ranks
@RANKED
def test_ranks_that_do_not_come_to_make_groups_are_named():
    with fresh(2) as run:
        text = run(join_late)[0]
    assert text.startswith(
        "rank 1 did not come to make groups of ranks:\n"
        "  * rank 1 did not arrive within 0.4 s: it is dead or runs other code\n"
    )


def test_the_same_settings_pass():
    check_same_settings({0: "torch", 1: "torch"})


def told() -> list[tuple[str, str]]:
    """What a plan is told of a group: before the ranks have made groups, and when they have."""
    mesh = Mesh(a=1, b=2)
    one, both = (mesh.axis("a"),), (mesh.axis("b"),)
    before = [transport_groups.predict_transport(mesh, axes) for axes in (one, both)]
    group_for(mesh, both)
    return [*before, transport_groups.predict_transport(mesh, both)]


@pytest.mark.ranks
@RANKED
def test_what_a_plan_is_told():
    with fresh(2) as run:
        assert only(run(told)) == [("none", ""), ("open", ""), ("shm", "")]


def some_machines() -> list[tuple[tuple[int, ...], str, list[float]]]:
    """Ranks 2 and 3 are elsewhere: groups within a machine share memory, those between machines do not."""
    if dist.get_rank() >= 2:
        shm_segment.machine = lambda: "elsewhere"
    mesh = Mesh(data=2, tensor=2)
    groups = [group_for(mesh, (mesh.axis(name),)) for name in ("data", "tensor")]
    return [(group.ranks, group.transport, gathered(group)) for group in groups]


@pytest.mark.ranks
@RANKED
def test_each_group_decides_for_itself():
    with fresh(4) as run:
        for rank, (data, tensor) in enumerate(run(some_machines)):
            across, within = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
            assert data == (across, "gloo", [float(r) for r in across])
            assert tensor == (within, "shm", [float(r) for r in within])


# Ranks that die or come late.


def die(victim: int, mib: int) -> None:
    group = group_of(dist.get_world_size())
    assert group.transport == "shm"
    x = torch.ones(mib << 18)
    all_reduce.start(x, group).finish()
    handle = all_reduce.start(x, group)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    handle.finish()
    all_reduce.start(x, group).finish()


@pytest.mark.sampled(2)
@pytest.mark.ranks
@RANKED
@pytest.mark.parametrize("mib", [1, 40])
def test_a_killed_peer_is_named_at_once(mib):
    victim = 1
    with fresh(3) as run, pytest.raises(RankError) as caught:
        run(die, victim, mib)
    errors = caught.value.errors
    assert errors.pop(victim) == f"died with exit code {-signal.SIGKILL}"
    assert sorted(errors) == [0, 2]
    for error in errors.values():
        assert isinstance(error, CollectiveError)
        assert str(error) in (  # and not that it was late
            "rank 1 is dead: its process is gone",
            *(f"rank {r} gave up waiting for rank 1" for r in (0, 2)),
        )


def die_elsewhere() -> None:
    """Rank 1 dies; ranks 2 and 3 have no collective with it, but wait for those that have."""
    mesh = Mesh(data=2, tensor=2)
    data, tensor = (group_for(mesh, (mesh.axis(name),)) for name in ("data", "tensor"))
    gathered(data)
    rank = dist.get_rank()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        gathered(tensor)
    if rank == 2:
        gathered(data)
    if rank == 3:
        gathered(tensor)


@pytest.mark.ranks
@RANKED
def test_those_who_wait_for_the_waiting_name_the_dead():
    with fresh(4) as run, pytest.raises(RankError) as caught:
        run(die_elsewhere)
    errors = {rank: str(error) for rank, error in caught.value.errors.items() if rank != 1}
    assert errors == {
        0: "rank 1 is dead: its process is gone",
        2: "rank 0 gave up waiting for rank 1",
        3: "rank 2 gave up waiting for rank 1",
    }


def come_late(seconds: float) -> tuple[str, float]:
    """What the ranks see when one is so many seconds late, or (0) until the other gives up; and after how long."""
    store, rank = default_store(), dist.get_rank()
    group = group_of(2)
    gathered(group)
    os.environ["SHARDLIB_TIMEOUT"] = "30" if seconds else "2"
    dist.barrier()
    begin = time.monotonic()
    if rank == 1:
        time.sleep(seconds) if seconds else store.wait(["told"])
    try:
        return str(gathered(group)), 0.0
    except CollectiveError as error:
        return str(error), time.monotonic() - begin
    finally:
        store.set("told", "")


@pytest.mark.long
@pytest.mark.ranks
@RANKED
def test_a_late_peer_is_named():
    with fresh(2) as run:
        waited, _ = run(come_late, 0.0)
    assert waited[0] == "rank 1 did not come to a collective of ranks 0 and 1 within 2 s"
    assert waited[1] >= 2


@pytest.mark.ranks
@RANKED
def test_a_peer_that_is_not_too_late_is_waited_for():
    with fresh(2) as run:
        assert [text for text, _ in run(come_late, 0.3)] == ["[0.0, 1.0]"] * 2


def in_a_fork() -> tuple[str, list[float]]:
    """A forked process cannot take part, and does not disturb the rank that it was forked from."""
    group = group_of(2)
    gathered(group)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gathered(group)
        except CollectiveError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 200).decode(), gathered(group)


@pytest.mark.ranks
@RANKED
def test_a_fork_of_a_rank_is_refused():
    with fresh(2) as run:
        text, values = only(run(in_a_fork))
    assert text == "this process is a fork of a rank, and no rank itself: it takes part in no collective"
    assert values == [0.0, 1.0]


# What becomes of the memory.


def again(port: int) -> list[Any]:
    """Collectives in two worlds, one after the other; what is left of the first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    old = group_of(n)
    assert gathered(old) == [0.0, 1.0]
    used = mappings()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    new = group_of(n)
    assert new is not old
    assert gathered(new, 5.0 + rank) == [5.0, 6.0]
    with pytest.raises(CollectiveError, match="was destroyed"):
        gathered(old)
    return [new.transport, mappings() == used, len(transport_groups._sessions)]


def mappings(of: str = "memfd:shardlib") -> tuple[int, int]:
    """Shared memory that this process maps, and the files that it holds open for it."""
    maps = Path("/proc/self/maps").read_text().count(of)
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return maps, sum(of in link for link in links)


@pytest.mark.ranks
@RANKED
def test_a_second_world_in_one_process():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with fresh(2) as run:
        assert only(run(again, store.port)) == ["shm", True, 1]


def test_a_segment_is_reserved_and_zero_and_its_own(monkeypatch):
    monkeypatch.setattr(
        shm_segment.mmap, "MAP_POPULATE", 0
    )  # which would reserve it too, but does not say if it cannot
    segment = Segment.make(1 << 16)
    try:
        stat = os.fstat(segment.fd)
        assert stat.st_blocks * 512 >= 1 << 16
        assert not any(segment.memory[shm_segment.PAGE :])
        with pytest.raises(SegmentError, match="is another one than was meant"):
            Segment.open(Address(segment.address.machine, os.getpid(), segment.fd, 1 << 16, "0" * 32))
    finally:
        segment.close()
    with pytest.raises(SegmentError, match="cannot open memory of process"):
        Segment.open(segment.address)


# Results.


def shared_results() -> list[Any]:
    """What becomes of the blocks of shared gathers."""
    group, count = group_of(2), all_gather.SHARED_BYTES // 8
    x = torch.full((count,), float(dist.get_rank()))

    def start() -> Any:
        return all_gather.start(x, 0, [count, count], group, shared=True)

    first, second = start().finish(), start().finish()
    apart = first.data_ptr() != second.data_ptr()
    part = first[count - 1 : count + 1]
    dist.barrier()
    del first, second
    for i in range(40 + 3 * MAX_TRANSFERS):  # all but the last are results that nobody waits for
        handle = start()
        if i >= 3 * MAX_TRANSFERS:
            handle.finish()
    dist.barrier()
    del handle
    blocks = mappings("memfd:shardlib-block")
    assert group.shm is not None
    group.shm.session.close()
    return [apart, part.tolist(), blocks[0] <= MAX_TRANSFERS + 128, mappings("memfd:shardlib-block")]


@pytest.mark.ranks
@RANKED
def test_blocks_are_used_again_and_outlive_their_session():
    with fresh(2) as run:
        for apart, part, few, (left, files) in run(shared_results):
            assert apart
            assert part == [0.0, 1.0]
            assert few
            assert (left, files) == (1, 0)  # that of `part`


def no_room() -> tuple[list[str], list[float], list[float], int]:
    """A rank that may make no file of the size of a block: both are told, and what they do next is right."""
    group, rank, count = group_of(2), dist.get_rank(), 1 << 19
    gathered(group)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def start(count: int) -> Any:  # rank 1 comes first, and makes the block
        if rank == 0:
            dist.barrier()
        handle = all_gather.start(torch.full((count,), float(rank)), 0, [count] * 2, group, shared=True)
        if rank == 1:
            dist.barrier()
        return handle

    texts = []
    for size in (count, 2 * count):
        handle = start(size)
        for _ in range(2):  # whoever asks again is told again
            with pytest.raises(CollectiveError) as refused:
                handle.finish()
            texts.append(str(refused.value))
        dist.barrier()  # both have left the block
    after = gathered(group)
    time.sleep(3 * shm_channel.POLL_SECONDS * (rank == 0))  # the other one looks whether its peers gave up
    assert gathered(group) == after
    again = start(count).finish()  # in the block that rank 0 made for the first one
    files = [path for path in Path("/proc/self/fd").iterdir() if "memfd:shardlib-block" in os.path.realpath(path)]
    reserved = max(path.stat().st_blocks * 512 for path in files)
    return texts, after, again[count - 1 : count + 1].tolist(), reserved


@pytest.mark.ranks
@RANKED
def test_a_shared_result_without_memory():
    with fresh(2) as run:
        for texts, values, across, reserved in run(no_room):
            assert texts == [
                f"rank 1 cannot reserve {size} of memory for what ranks 0 and 1 gather: {os.strerror(errno.EFBIG)}; "
                "raise that limit, or start with SHARDLIB_OPS=all_gather=torch"
                for size in ("4.0 MiB", "4.0 MiB", "8.0 MiB", "8.0 MiB")
            ]
            assert (values, across) == ([0.0, 1.0], [0.0, 1.0])
            assert reserved <= 12 << 20  # rank 0's two blocks


def shared_or_not() -> str:
    group = group_of(2)
    gathered(group)
    x = torch.zeros(1 << 17)
    with pytest.raises(CollectiveError) as refused:
        all_gather.start(x, 0, [1 << 17] * 2, group, shared=dist.get_rank() == 0).finish()
    return str(refused.value)


def many_at_once() -> tuple[int, int]:
    """The files of many blocks, all of the first rank, and the bytes that stay when nobody has them any more."""
    group, count = group_of(2), 1 << 20
    x = torch.zeros(count)
    held = []
    for _ in range(18):
        if dist.get_rank() == 1:
            dist.barrier()
        handle = all_gather.start(x, 0, [count, count], group, shared=True)
        if dist.get_rank() == 0:
            dist.barrier()
        held.append(handle.finish())
    files = [path for path in Path("/proc/self/fd").iterdir() if "memfd:shardlib-block" in os.path.realpath(path)]
    held.clear()
    del handle
    dist.barrier()
    return len(files), sum(path.stat().st_blocks * 512 for path in files)


@pytest.mark.ranks
@RANKED
def test_blocks_take_few_files_and_few_of_them_stay():
    with fresh(2) as run:
        for files, stay in run(many_at_once):
            assert files <= 2
            assert 0 < stay <= 128 << 20


@pytest.mark.ranks
@RANKED
def test_ranks_of_which_one_shares_are_out_of_step():
    with fresh(2) as run:
        for text in run(shared_or_not):
            assert "is in another collective of ranks 0 and 1" in text or "gave up" in text


def other_sizes() -> tuple[str, list[float]]:
    """The last rank sends nothing by what the others say; by what it says itself it writes where they read."""
    group = group_of(3)
    gathered(group)
    mine, count = dist.get_rank(), all_gather.SHARED_BYTES
    sizes = [0, count - 32, count] if mine == 2 else [count, count, 0]
    time.sleep(0.2 * (mine == 2))
    try:
        out = all_gather.start(torch.full((sizes[mine],), float(mine)), 0, sizes, group, shared=True).finish()
    except CollectiveError as error:
        return str(error), []
    time.sleep(0.4)
    return "", out.unique().tolist()


@pytest.mark.ranks
@RANKED
def test_who_sends_nothing_to_a_shared_result_is_asked_too():
    with fresh(3) as run:
        for error, values in run(other_sizes):
            assert "another collective" in error or "gave up" in error, values


def test_memory_of_results_is_used_again_when_nobody_has_them():
    shape = (result_buffers.MIN_BYTES // 4 + 13,)
    first = result_buffers.allocate(shape, torch.float32)
    at, part = first.data_ptr(), first[5:]
    del first
    second = result_buffers.allocate(shape, torch.float32)
    assert second.data_ptr() != at  # `part` still shows it
    del part
    assert result_buffers.allocate(shape, torch.float32).data_ptr() == at
    second.fill_(1)


def test_kept_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(result_buffers, "MAX_KEPT_BYTES", 3 << 20)
    held = [result_buffers.allocate((1 << 20,), torch.uint8) for _ in range(8)]
    del held
    assert sum(map(len, result_buffers._free.values())) <= 3 << 20


# Layouts.


@pytest.mark.parametrize(
    ("x", "run", "dims"),
    [
        (torch.empty(2, 3, 4), 96, []),
        (torch.empty(()), 4, []),
        (torch.empty(2, 3, 4)[:, :2], 32, [(2, 48)]),
        (torch.empty(2, 3, 4)[..., :2], 8, [(6, 16)]),
        (torch.empty(2, 3, 4).transpose(0, 2), 4, [(4, 4), (3, 16), (2, 48)]),
        (torch.empty(1, 3).expand(5, 3), 12, [(5, 0)]),
        (torch.empty(5, 1, 8)[::2], 32, [(3, 64)]),
        (torch.empty(4)[::2], 4, [(2, 8)]),
    ],
)
def test_rows_of_memory(x, run, dims):
    assert TensorMeta.from_tensor(x).rows() == (run, dims)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 3, 4)])
def test_dense_strides(shape):
    assert dense_meta(shape).stride == torch.empty(shape).stride()
