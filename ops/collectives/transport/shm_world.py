"""Shared memory between ranks on one machine: what a process shares with others of its world, and of whom it knows.

All ranks make a `Session` together, once for a world of torch.distributed; a group of ranks that all share memory has a
`Channel` in it. Whether there is one is decided by what all ranks said of themselves, so all decide alike.
"""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Sequence

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import ShardingError
from shardlib.distributed import turns, world
from shardlib.distributed.store import names
from shardlib.ops import native_libs
from shardlib.ops.backend_choice import wanted
from shardlib.ops.collectives.transport.shm_channel import OPS, Channel, Transfer
from shardlib.ops.collectives.transport.shm_segment import PAGE, Address, Segment, SegmentError

STAGING = 16 << 20  # bytes in which a process keeps what it has sent and others have not read yet
MEETING = 64 << 10  # the same where nothing is sent but the signs of turns
_living: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """What this process shares with others of its world, and what it knows of them.

    `faults` says, for every rank that takes no part, why; a session with this rank among them has no memory. `unused`
    says why ranks that share memory only meet in it, and exchange no tensors. Raises `ShardingError` when ranks do not
    come, or when their SHARDLIB_OPS differ.
    """

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        self.order = turns.current()
        self.rank, self.room = rank, f"{self.order.room}/shm/{self.order.meetings}"
        self.order.meetings += 1
        self.segments: dict[int, Segment] = {}
        self.channels = 0
        self.flying: dict[
            int, tuple[object, weakref.ref[Transfer]]
        ] = {}  # what is under way, and its tensors, by ticket
        self.library: ctypes.CDLL | None = None
        self.engine: int | None = None
        self.unused = ""
        try:
            self.faults, self.machines = self._meet(size, device)
        except ShardingError:
            self.close()
            raise
        _living.add(self)

    def _meet(self, size: int, device: str) -> tuple[dict[int, str], dict[int, str]]:
        everyone, seconds = range(size), world.timeout().total_seconds()
        store, dead = self.order.store(), self.order.watcher()
        hello = {"ops": os.environ.get("SHARDLIB_OPS", ""), "fault": "", "address": ""}
        try:
            hello["address"] = self._make(device).dumps()
        except (SegmentError, ShardingError) as error:
            hello["fault"] = str(error)
        posted = store.exchange(
            f"{self.room}/hello", json.dumps(hello), everyone, seconds, "make groups of ranks", dead
        )
        hellos = {rank: json.loads(text) for rank, text in posted.items()}
        check_same({rank: theirs["ops"] for rank, theirs in hellos.items()})
        wanted(OPS[0])  # raises what every rank has found to be wrong with it
        faults = {rank: theirs["fault"] for rank, theirs in hellos.items() if theirs["fault"]}
        addresses = {r: Address.loads(theirs["address"]) for r, theirs in hellos.items() if r not in faults}
        verdict = "" if self.rank in faults else self._open(addresses)
        posted = store.exchange(f"{self.room}/reached", verdict, everyone, seconds, "share memory", dead)
        faults |= {rank: text for rank, text in posted.items() if text}
        if self.rank in faults:
            self.close()
        return faults, {r: address.machine for r, address in addresses.items()}

    def _make(self, device: str) -> Address:
        if device != "cpu":
            raise SegmentError(f"its tensors are on {device}")
        if all(wanted(op) == "torch" for op in OPS):
            self.unused = "SHARDLIB_OPS asks for torch"
        library = native_libs.host()
        if isinstance(library, Missing):
            raise SegmentError(str(library))
        declare(library)
        size = PAGE + library.shm_start() + (MEETING if self.unused else STAGING)
        mine = self.segments[self.rank] = Segment.make(size)
        self.library = library
        self.engine = library.shm_open_engine(mine.base + PAGE, size - PAGE, turns.ASKING.buffer_info()[0])
        return mine.address

    def _open(self, addresses: dict[int, Address]) -> str:
        """Map what the ranks on this machine share; says what went wrong."""
        for rank, address in addresses.items():
            if rank != self.rank and address.machine == addresses[self.rank].machine:
                try:
                    peer = self.segments[rank] = Segment.open(address)
                    if peer.owner_is_gone():
                        return f"sees no lock of process {address.pid}, which is rank {rank}"
                except OSError as error:
                    return f"{error} (rank {rank})"
        return ""

    def why_not(self, ranks: Sequence[int]) -> str:
        """Why these ranks cannot share memory; empty when they can. The same on all of them."""
        if faulty := [rank for rank in ranks if rank in self.faults]:
            return f"rank {faulty[0]}: {self.faults[faulty[0]]}"
        if other := [rank for rank in ranks if self.machines[rank] != self.machines[ranks[0]]]:
            return f"ranks {ranks[0]} and {other[0]} are on different machines, or in different containers"
        return ""

    def channel(self, ranks: tuple[int, ...]) -> Channel | str:
        """A new channel between these ranks, in this order, or why there is none.

        All ranks of the world call this in the same order, each for a group that it is in.
        """
        number, self.channels = self.channels, self.channels + 1
        if why := self.why_not(ranks):
            return why
        assert self.library is not None
        if number >= self.library.shm_channels():
            return f"there are {number} groups of ranks already"
        return Channel(self, number, ranks)

    def give(self, block: int) -> None:
        """Give back a block of a shared result: nobody here reads it any more."""
        if self.engine is not None:
            assert self.library is not None
            self.library.shm_give(block)

    def close(self) -> None:
        """Give the memory back. What is under way is lost."""
        engine, self.engine = self.engine, None
        if engine is not None:
            assert self.library is not None
            self.library.shm_close_engine(engine)
        self.flying.clear()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()


def _after_fork() -> None:
    """A forked process is no rank: it must not touch what its parent shares."""
    for session in _living:
        session.engine = None


os.register_at_fork(after_in_child=_after_fork)


def check_same(settings: dict[int, str]) -> None:
    """Refuse ranks whose SHARDLIB_OPS differ: they would speak past each other."""
    if len(set(settings.values())) > 1:
        holders: dict[str, list[int]] = {}
        for rank, text in settings.items():
            holders.setdefault(text, []).append(rank)
        raise ShardingError(
            "the ranks would run their collectives in different ways",
            [f"{names(ranks)}: SHARDLIB_OPS={text!r}" for text, ranks in holders.items()],
            rule="SHARDLIB_OPS is the same on every rank",
            remedy="set it where all ranks are started, or on none",
        )


def declare(library: ctypes.CDLL) -> None:
    """Say which arguments the library's functions take."""
    pointer, u64, i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    for name, returns, arguments in (
        ("shm_start", ctypes.c_size_t, ()),
        ("shm_channels", i32, ()),
        ("shm_open_engine", pointer, (pointer, ctypes.c_size_t, pointer)),
        ("shm_close_engine", None, (pointer,)),
        ("shm_join", None, (pointer, i32, i32, i32, pointer)),
        ("shm_recipe", pointer, (pointer, i32)),
        ("shm_drop_recipe", None, (pointer,)),
        ("shm_begin", u64, (pointer, i32, pointer, pointer, i32)),
        ("shm_finish", i32, (pointer, u64, ctypes.c_int64, pointer, pointer)),
        ("shm_give", None, (pointer,)),
        ("shm_fault", i32, (pointer,)),
        ("shm_stranger", i32, (pointer, u64, pointer)),
        ("shm_done", i32, (pointer, u64)),
        ("shm_lacks", i32, (pointer, u64)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returns, arguments
