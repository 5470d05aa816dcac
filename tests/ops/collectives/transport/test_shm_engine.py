"""The engine in shared memory: two of them in one process, and ranks whose threads wait at the same time."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import warnings
import weakref
from array import array
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from shardlib.build.build_recipe import Missing
from shardlib.core.errors import CollectiveError
from shardlib.ops import native_libs
from shardlib.ops.collectives import all_gather
from shardlib.ops.collectives.transport import shm_channel, shm_world
from shardlib.ops.collectives.transport.groups import group_for
from shardlib.ops.collectives.transport.shm_engine import Engine, declare_functions
from shardlib.ops.collectives.transport.shm_segment import PAGE, Segment
from shardlib.ops.collectives.transport.shm_streams import COPY, Block, Message, TensorMeta
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.ranks import Pool, only

LATE, DONE, ENDED = 0, 1, 4
PATIENCE = 60 * 10**9  # nanoseconds for which a thread sleeps that nobody wakes
SECONDS = 30.0  # for which a test waits for such a thread: less than that


class Member:
    """One member of two channels between two engines, whose staging holds one round."""

    def __init__(self, engine: Engine, sign: array[int]) -> None:
        self.engine, self.library, self.sign, self.keep = engine, engine.library, sign, list[Any]()

    def begin(self, channel: int, nbytes: int = 1024) -> int:
        """Begin an all_gather; the ticket."""
        rank = self.engine.rank
        x, out = torch.full((nbytes,), rank, dtype=torch.uint8), torch.zeros(2, nbytes, dtype=torch.uint8)
        message, like = Message(2, rank, COPY), TensorMeta.from_tensor(x)
        message.send(message.stream([Block(0, like)]))
        for i in range(2):
            message.receive(message.stream([Block(1 + i, like)]))
        words = message.encode(2 * nbytes)
        assert words is not None
        recipe = self.library.shm_recipe(words.buffer_info()[0], 0)
        tensors: list[Tensor] = [x, out[0], out[1]]
        pointers = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in tensors))
        self.keep += [tensors, words]
        self.sign[3] = channel
        ticket: int = self.library.shm_begin(self.engine.pointer, channel, recipe, pointers, 3)
        return ticket

    def finish(self, ticket: int, patience: int = 0) -> int:
        block, base, fault = ctypes.c_void_p(), ctypes.c_void_p(), (ctypes.c_int * 2)()
        places = (ctypes.byref(block), ctypes.byref(base), ctypes.byref(fault))
        answer: int = self.library.shm_finish(self.engine.pointer, ticket, patience, *places)
        return answer

    def sleeper(self, ticket: int) -> tuple[threading.Thread, list[int]]:
        """A thread that sleeps until the op is done, and has its answer then."""
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(self.finish(ticket, PATIENCE)), daemon=True)
        self.wants(0)
        thread.start()
        while not self.wanted() or not _sleeps(thread):
            time.sleep(0.001)
        return thread, answers

    def wanted(self) -> int:
        return self._header()[1]

    def wants(self, events: int) -> None:
        """What peers ring for. 0: they have rung, and the bell is not heard yet."""
        self._header()[1] = events

    def _header(self) -> Any:
        return (ctypes.c_uint32 * 2).from_address(self.engine.segments[self.engine.rank].base + PAGE)


def _sleeps(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] == "S"


@pytest.fixture
def pair() -> Iterator[tuple[Member, Member]]:
    library = native_libs.host()
    if isinstance(library, Missing):
        pytest.skip(str(library))
    declare_functions(library)
    size = PAGE + library.shm_start() + 4096
    own = [Segment.make(size) for _ in range(2)]
    both = [{0: own[0], 1: Segment.open(own[1].address)}, {0: Segment.open(own[0].address), 1: own[1]}]
    members, signs = [], [array("Q", bytes(32)) for _ in range(2)]
    for rank, segments in enumerate(both):
        engine = Engine(library, segments, rank, signs[rank].buffer_info()[0])
        bases = (ctypes.c_void_p * 2)(*(segments[r].base + PAGE for r in range(2)))
        for channel in range(2):
            library.shm_join(engine.pointer, channel, 2, rank, bases, 0)
        members.append(Member(engine, signs[rank]))
    yield members[0], members[1]
    for member in members:
        member.engine.end()


def test_who_completes_the_op_of_another_thread_wakes_it(pair: tuple[Member, Member]) -> None:
    a, b = pair
    first, second = a.begin(0), a.begin(1)
    thread, answers = a.sleeper(first)
    a.wants(0)
    b.begin(0), b.begin(1)
    assert a.finish(second) == DONE
    thread.join(SECONDS)
    assert answers == [DONE]


def test_who_leaves_moves_on_the_op_of_a_thread_that_sleeps(pair: tuple[Member, Member]) -> None:
    """What it takes itself makes room for that op."""
    a, b = pair
    fills, waits = a.begin(0, 4096), a.begin(1, 4096)
    thread, answers = a.sleeper(waits)
    a.wants(0)
    assert b.finish(b.begin(0, 4096)) == DONE
    assert a.finish(fills) == DONE
    assert b.finish(b.begin(1, 4096)) == DONE
    assert a.finish(waits) == DONE  # and wakes the thread
    thread.join(SECONDS)
    assert answers == [DONE]


def test_a_closed_engine_lives_until_the_last_waiter_has_left(pair: tuple[Member, Member]) -> None:
    a, _ = pair
    thread, answers = a.sleeper(a.begin(0))
    a.engine.end()
    thread.join(SECONDS)
    assert answers == [ENDED]
    assert a.begin(0) == 0


def test_a_channel_that_was_left_is_joined_anew(pair: tuple[Member, Member]) -> None:
    """Beyond all rounds of before; what was under way ends, and other channels go on."""
    a, b = pair
    assert [a.finish(t) for t in (a.begin(0), a.begin(0))] == [LATE, LATE]
    thread, answers = a.sleeper(a.begin(0))
    other = a.begin(1)
    first = a.library.shm_posted(a.engine.pointer) + a.library.shm_rounds()
    for rank, member in enumerate(pair):
        member.library.shm_leave(member.engine.pointer, 0)
        bases = (ctypes.c_void_p * 2)(*(member.engine.segments[r].base + PAGE for r in range(2)))
        member.library.shm_join(member.engine.pointer, 0, 2, rank, bases, first)
    thread.join(SECONDS)
    assert answers == [ENDED]
    theirs = b.begin(1)
    assert (a.finish(other), b.finish(theirs)) == (DONE, DONE)
    for _ in range(100):  # more than a channel has notes for
        ours, theirs = a.begin(0), b.begin(0)
        assert (a.finish(ours), b.finish(theirs)) == (DONE, DONE)


# Ranks.


def group_of(name: str = "x") -> Any:
    mesh = Mesh({name: dist.get_world_size()})
    return group_for(mesh, (mesh.axis(name),))


def gathered(group: Any, value: float) -> list[float]:
    values: list[float] = all_gather.start(torch.tensor([value]), 0, [1] * group.size, group).finish().tolist()
    return values


def close_under_a_waiter() -> list[Any]:
    """The error of a thread that waits while its session is closed, and whether the engine is freed afterwards."""
    shm_channel.POLL_SECONDS = 60.0
    group = group_of()
    session, errors = group.shm.session, list[str]()
    assert gathered(group, 1.0) == [1.0, 1.0]
    if dist.get_rank():
        dist.barrier()
        return []
    engine = weakref.ref(session.engine)
    handle = all_gather.start(torch.ones(1), 0, [1, 1], group)

    def wait() -> None:
        try:
            handle.finish()
        except CollectiveError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not _sleeps(thread):
        time.sleep(0.001)
    session.close()
    thread.join(SECONDS)
    dist.barrier()
    gc.collect()
    return [errors, engine() is None, session.segments]


@pytest.mark.ranks
def test_a_session_is_closed_while_a_thread_waits() -> None:
    with closing(Pool(2)) as pool:
        errors, freed, segments = pool.run(close_under_a_waiter)[0]
    assert errors == ["the process group of this collective was destroyed"]
    assert freed
    assert segments == {}


def many_meshes(count: int) -> list[Any]:
    """Meshes over the same ranks: how many channels, and whether all of them are right."""
    groups = [group_of(f"axis{i}") for i in range(count)]
    values = [gathered(group, float(i)) for i, group in enumerate(groups)]
    return [{group.transport for group in groups}, len({id(group.shm) for group in groups}), values]


@pytest.mark.ranks
def test_groups_of_the_same_ranks_share_a_channel() -> None:
    with closing(Pool(2)) as pool:
        transports, channels, values = only(pool.run(many_meshes, 70))
    assert (transports, channels) == ({"shm"}, 1)
    assert values == [[float(i)] * 2 for i in range(70)]


def more_groups_than_channels() -> list[Any]:
    """Of four groups two get channels; then one is destroyed, and another group takes its channel."""
    shm_world.CHANNELS = 2
    rank, mesh, seen = float(dist.get_rank()), Mesh(a=2, b=2), []
    a, b = mesh.axis("a"), mesh.axis("b")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = [group_for(mesh, axes) for axes in ((a,), (b,), (a, b), (b, a))]
        seen += [(group.transport, gathered(group, rank)) for group in groups]
        with mesh:
            step = sl.jit(lambda x: x.sum(), in_specs="i@(a b)")
            step(torch.ones(8))
            reason = step.plan(torch.ones(8)).full
        swapped = Mesh(c=2, d=2)
        axes = swapped.axis("d"), swapped.axis("c")
        dist.barrier()
        dist.destroy_process_group(groups[0].pg)
        last = group_for(swapped, axes)
        seen.append((last.transport, gathered(last, rank)))
        seen.append((groups[1].transport, gathered(groups[1], rank)))
    with pytest.raises(CollectiveError, match="was destroyed"):
        gathered(groups[0], 0.0)
    return [seen, [str(w.message) for w in caught if w.category is UserWarning], reason]


@pytest.mark.long
@pytest.mark.ranks
def test_a_group_without_a_channel_says_so_and_channels_are_used_again() -> None:
    text = "ranks 0, 1, 2 and 3 share no memory, since 2 other groups of ranks do"
    with closing(Pool(4)) as pool:
        for rank, (seen, warned, reason) in enumerate(pool.run(more_groups_than_channels)):
            assert warned == [f"{text}: they use torch.distributed, which is slower"] * (rank == 0)
            assert text in reason
            pair_a, pair_b = (
                [float(r) for r in (rank % 2, rank % 2 + 2)],
                [float(r) for r in (rank & 2, (rank & 2) + 1)],
            )
            assert seen == [
                ("shm", pair_a),
                ("shm", pair_b),
                ("gloo", [0.0, 1.0, 2.0, 3.0]),
                ("gloo", [0.0, 2.0, 1.0, 3.0]),
                ("shm", [0.0, 2.0, 1.0, 3.0]),
                ("shm", pair_b),
            ]


def test_the_limit_is_the_librarys() -> None:
    library = native_libs.host()
    if not isinstance(library, Missing):
        declare_functions(library)
        assert library.shm_channels() == shm_world.CHANNELS
