"""Shared memory between ranks on one machine.

All ranks make a `Session` together, once for a world of torch.distributed; a group of ranks that all share memory has a
`Channel` in it. All ranks decide from the same exchanged facts, so all decide alike which groups have channels.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
import weakref
from collections.abc import Sequence

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import ShardingError
from shardlib.distributed import turns, world
from shardlib.distributed.store import format_ranks
from shardlib.ops import native_libs
from shardlib.ops.backend_choice import requested_backend
from shardlib.ops.collectives.transport.shm_channel import OPS, Channel, Transfer
from shardlib.ops.collectives.transport.shm_engine import Engine, declare_functions
from shardlib.ops.collectives.transport.shm_numbers import ChannelNumbers, Group
from shardlib.ops.collectives.transport.shm_route import RING, Pair, Route
from shardlib.ops.collectives.transport.shm_segment import PAGE, Address, Segment, SegmentError

CHANNELS = 64  # of a process: kChannels in cuda/shm_layout.h
STAGING = 16 << 20  # bytes of a process' staging memory: what it has sent and others have not read yet
MEETING = 64 << 10  # the same for ranks that only meet
_living: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """The memory that this process shares with other ranks of its world, and its channels in it.

    * `faults`: why a rank shares no memory, for each such rank. If this rank is among them, the session has no memory.
    * `unused`: why ranks that share memory only meet in it and exchange no tensors; empty if they do exchange.

    Raises `ShardingError` if ranks do not join, or if their SHARDLIB_OPS differ.
    """

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        self.order = turns.current()
        self.rank, self.room = rank, f"{self.order.room}/shm/{self.order.meetings}"
        self.order.meetings += 1
        self.segments: dict[int, Segment] = {}
        self.numbers = ChannelNumbers(CHANNELS)
        self.channels: dict[Group, Channel] = {}  # of this rank
        self.routes: dict[Pair, Route] = {}  # to and from this rank
        self.route_faults: dict[Pair, str] = {}  # why a pair of ranks has no route; empty if it has one
        self.first = 0  # the first round of new channels
        self.reclaims = 0  # calls of `_reclaim_channels`
        self.openings = 0  # exchanges of `open_routes`
        self.transfers: dict[int, tuple[object, weakref.ref[Transfer]]] = {}  # running, with their tensors, by ticket
        self.library: ctypes.CDLL | None = None
        self.engine: Engine | None = None
        self.unused = ""
        self.warned = False  # about more groups than channels
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
        check_same_settings({rank: theirs["ops"] for rank, theirs in hellos.items()})
        requested_backend(OPS[0])  # raises on all ranks if SHARDLIB_OPS is malformed
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
        if all(requested_backend(op) == "torch" for op in OPS):
            self.unused = "SHARDLIB_OPS asks for torch"
        library = native_libs.host()
        if isinstance(library, Missing):
            raise SegmentError(str(library))
        declare_functions(library)
        size = PAGE + library.shm_start() + (MEETING if self.unused else STAGING)
        mine = self.segments[self.rank] = Segment.make(size)
        self.library = library
        self.engine = Engine(library, self.segments, self.rank, turns.CURRENT_TURN.buffer_info()[0])
        return mine.address

    def _open(self, addresses: dict[int, Address]) -> str:
        """Maps the segments of the ranks on this machine. Returns the first fault, or an empty string."""
        for rank, address in addresses.items():
            if rank != self.rank and address.machine == addresses[self.rank].machine:
                try:
                    peer = self.segments[rank] = Segment.open(address)
                    if peer.owner_is_gone():
                        return f"sees no lock of process {address.pid}, which is rank {rank}"
                except OSError as error:
                    return f"{error} (rank {rank})"
        return ""

    def find_sharing_fault(self, ranks: Sequence[int]) -> str:
        """Returns why these ranks cannot share memory; empty if they can. Equal on all of them."""
        if faulty := [rank for rank in ranks if rank in self.faults]:
            return f"rank {faulty[0]}: {self.faults[faulty[0]]}"
        if other := [rank for rank in ranks if self.machines[rank] != self.machines[ranks[0]]]:
            return f"ranks {ranks[0]} and {other[0]} are on different machines, or in different containers"
        return ""

    def channel(self, groups: Sequence[Group]) -> Channel | str:
        """Returns the one channel of this rank's group, or why there is none.

        `groups` hold every rank of the world once, each in group order. All ranks call it with the same groups.
        """
        sharing = [group for group in groups if not self.find_sharing_fault(group)]
        if self._without_number(sharing):
            self._reclaim_channels()
        full = self._without_number(sharing)
        mine = next(group for group in groups if self.rank in group)
        if full and not self.warned and self.rank == full[0][0]:
            warnings.warn(f"{_too_many(full[0])}: they use torch.distributed, which is slower", stacklevel=2)
        self.warned = self.warned or bool(full)
        if mine not in sharing or mine in full:
            return self.find_sharing_fault(mine) or _too_many(mine)
        if mine not in self.channels:
            self.channels[mine] = Channel(self, self.numbers.groups[mine], mine, self.first)
        return self.channels[mine]

    def open_routes(self, pairs: Sequence[Pair]) -> None:
        """Opens a route for each pair of ranks that has none yet, or notes in `route_faults` why it has none.

        All ranks call it together with the same pairs.
        """
        new = [pair for pair in pairs if pair not in self.route_faults]
        self.route_faults |= {pair: self.find_sharing_fault(pair) for pair in new}
        sharing = [pair for pair in new if not self.route_faults[pair]]
        rings: dict[Pair, int] = {}
        faults: dict[int, str] = {}  # of this rank's rings, by position in `sharing`
        for i, pair in enumerate(sharing):
            if pair[0] == self.rank:
                try:
                    rings[pair] = self.segments[self.rank].reserve(RING) - PAGE
                except SegmentError as error:
                    faults[i] = f"rank {self.rank}: {error}"
        if not sharing:
            return
        room, self.openings = f"{self.room}/routes/{self.openings}", self.openings + 1
        everyone, seconds = range(self.order.size), world.timeout().total_seconds()
        posted = self.order.store().exchange(
            room, json.dumps(faults), everyone, seconds, "share memory", self.order.watcher()
        )
        for i, pair in enumerate(sharing):
            fault = json.loads(posted[pair[0]]).get(str(i), "")
            number = None if fault else self._reserve_number(pair)
            self.route_faults[pair] = fault or (_too_many(pair) if number is None else "")
            if number is not None and self.rank in pair:
                self.routes[pair] = Route(self, number, pair, self.first, rings.get(pair, 0))

    def _reserve_number(self, pair: Pair) -> int | None:
        number = self.numbers.reserve(pair)
        if number is None:
            self._reclaim_channels()
            number = self.numbers.reserve(pair)
        return number

    def _without_number(self, groups: Sequence[Group]) -> list[Group]:
        return [group for group in groups if self.numbers.take(group) is None]

    def _reclaim_channels(self) -> None:
        """Frees the channels of groups that all their members have destroyed. All ranks call it together."""
        closed = [group for group, channel in self.channels.items() if channel.is_destroyed()]
        engine = self.engine
        posted = 0 if engine is None else engine.library.shm_posted(engine.pointer) + engine.library.shm_rounds()
        room, self.reclaims = f"{self.room}/closed/{self.reclaims}", self.reclaims + 1
        texts = self.order.store().exchange(
            room,
            json.dumps([closed, posted]),
            range(self.order.size),
            world.timeout().total_seconds(),
            "make groups of ranks",
            self.order.watcher(),
        )
        reports = {rank: json.loads(text) for rank, text in texts.items()}
        # New channels begin beyond all rounds of any member, so that no round of an earlier group is taken for theirs.
        self.first = max(self.first, *(rounds for _, rounds in reports.values()))
        for group in list(self.numbers.groups):
            if all(list(group) in reports[rank][0] for rank in group):
                self.numbers.drop(group)
                if (channel := self.channels.pop(group, None)) is not None:
                    channel.leave()

    def advance(self) -> bool:
        """Moves running collectives on without waiting; returns whether some still run."""
        engine = self.engine
        return engine is not None and bool(engine.library.shm_advance(engine.pointer))

    def free_block(self, block: int) -> None:
        """Gives back a block of a shared result that this process reads no more."""
        if (engine := self.engine) is not None:
            engine.library.shm_give(block)

    def close(self) -> None:
        """Ends running collectives, and frees the memory when the last waiter has left."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.end()
        else:
            for segment in self.segments.values():
                segment.close()
        self.transfers.clear()
        self.segments = {}  # the engine's, which closes them


def _too_many(group: Group) -> str:
    return f"{format_ranks(group)} share no memory, since {CHANNELS} other groups of ranks do"


def _after_fork() -> None:
    """Detaches a forked process, which is no rank, from its parent's memory."""
    for session in _living:
        if session.engine is not None:
            session.engine.abandon()
        session.engine = None


os.register_at_fork(after_in_child=_after_fork)


def check_same_settings(settings: dict[int, str]) -> None:
    """Raises `ShardingError` if the ranks' SHARDLIB_OPS differ."""
    if len(set(settings.values())) > 1:
        ranks_of: dict[str, list[int]] = {}
        for rank, text in settings.items():
            ranks_of.setdefault(text, []).append(rank)
        raise ShardingError(
            "the ranks would run their collectives in different ways",
            [f"{format_ranks(ranks)}: SHARDLIB_OPS={text!r}" for text, ranks in ranks_of.items()],
            rule="SHARDLIB_OPS is the same on every rank",
            remedy="set it where all ranks are started, or on none",
        )
