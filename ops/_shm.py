"""Collectives between ranks on one machine, over shared memory: what a process shares, and its channels to others.

All ranks make a `Session` together, once for a world of torch.distributed; a group of ranks that all share memory has a
`Channel` in it. Whether there is one is decided by what all ranks said of themselves, so all decide alike.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from shardlib.errors import CollectiveError, ShardingError
from shardlib.ops import _native
from shardlib.ops._choice import wanted
from shardlib.ops._results import result
from shardlib.ops._segment import PAGE, Address, Segment, SegmentError
from shardlib.ops._streams import COPY, Block, Like, Message
from shardlib.ranks import order, world
from shardlib.ranks.store import names
from shardlib.recipe import Missing

if TYPE_CHECKING:
    pass

STAGING = 16 << 20  # bytes in which a process keeps what it has sent and others have not read yet
MEETING = 64 << 10  # the same where nothing is sent but the signs of turns
LOOK_SECONDS = 0.1  # how often a rank that waits looks whether its peers are alive
NOWHERE = (1 << 64) - 1
RECIPES = 1024  # that a channel keeps
FLYING = 256  # collectives under way, from which on it is looked whether some were forgotten
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute")
_DONE, _OUT_OF_STEP = 1, 2  # answers of the library; 0: not yet
_living: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a collective runs: its message (None when it moves nothing), and the results that each run of it needs.

    `packed` are the sources that are made contiguous first; with `direct`, others may read the source itself.
    """

    words: array[int] | None
    outs: tuple[Like, ...]
    packed: frozenset[int] = frozenset()
    direct: bool = False


class _Loaded:
    """A recipe as the library keeps it."""

    def __init__(self, library: ctypes.CDLL, recipe: Recipe, op: int) -> None:
        self.recipe, self.library = recipe, library
        self.outs = [(out.shape, out.dtype) for out in recipe.outs]
        self.pointer = None if recipe.words is None else library.shm_recipe(recipe.words.buffer_info()[0], op)

    def __del__(self) -> None:
        if self.pointer is not None:
            self.library.shm_drop_recipe(self.pointer)


class Session:
    """What this process shares with others of its world, and what it knows of them.

    `faults` says, for every rank that takes no part, why; a session with this rank among them has no memory. `unused`
    says why ranks that share memory only meet in it, and exchange no tensors. Raises `ShardingError` when ranks do not
    come, or when their SHARDLIB_OPS differ.
    """

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        self.order = order.current()
        self.rank, self.room = rank, f"{self.order.room}/shm/{self.order.meetings}"
        self.order.meetings += 1
        self.segments: dict[int, Segment] = {}
        self.tensors: list[Segment] = []  # memory of symmetric tensors, ours and others'
        self.channels = 0
        self.flying: dict[int, object] = {}  # tensors of what is under way, by ticket
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
        wanted(_OPS[0])  # raises what every rank has found to be wrong with it
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
        if all(wanted(op) == "torch" for op in _OPS):
            self.unused = "SHARDLIB_OPS asks for torch"
        library = _native.host()
        if isinstance(library, Missing):
            raise SegmentError(str(library))
        declare(library)
        size = PAGE + library.shm_start() + (MEETING if self.unused else STAGING)
        mine = self.segments[self.rank] = Segment.make(size)
        self.library = library
        self.engine = library.shm_open_engine(mine.base + PAGE, size - PAGE, order.ASKING.buffer_info()[0])
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

    def close(self) -> None:
        """Give the memory back. What is under way is lost."""
        if self.engine is not None:
            assert self.library is not None
            self.library.shm_close_engine(self.engine)
        self.engine = None
        self.flying.clear()
        for segment in (*self.segments.values(), *self.tensors):
            segment.close()
        self.segments.clear()
        self.tensors.clear()


def _ended() -> str:
    if order.is_fork():
        return "this process is a fork of a rank, and no rank itself: it takes part in no collective"
    return "the process group of this collective was destroyed"


def _after_fork() -> None:
    """A forked process is no rank: it must not touch what its parent shares."""
    for session in _living:
        session.engine = None


os.register_at_fork(after_in_child=_after_fork)


class Channel:
    """This rank's place in a group whose members share memory."""

    def __init__(self, session: Session, number: int, ranks: tuple[int, ...]) -> None:
        assert session.library is not None
        self.session, self.number, self.ranks, self.library = session, number, ranks, session.library
        self.size, self.position = len(ranks), ranks.index(session.rank)
        self.recipes: dict[object, _Loaded | None] = {}
        self.byte = torch.zeros(1, dtype=torch.uint8)  # what is sent where nothing but the turn matters
        self.shared: list[tuple[int, int, int]] = []  # tensors that all members map: first byte, end, number
        bases = (ctypes.c_void_p * self.size)(*(session.segments[rank].base + PAGE for rank in ranks))
        self.library.shm_join(session.engine, number, self.size, self.position, bases)

    def start(
        self, key: tuple[Any, ...], make: Callable[[], Recipe | None], sources: Sequence[Tensor]
    ) -> Transfer | None:
        """Begin the collective `key`; None when it runs on torch. `make` decides that, at the first time."""
        session = self.session
        if session.engine is None:
            raise CollectiveError(_ended())
        if key not in self.recipes:
            if len(self.recipes) >= RECIPES:  # of shapes that never come back
                self.recipes.clear()
            recipe = make()
            kind = _OPS.index(key[0])
            self.recipes[key] = None if recipe is None else _Loaded(self.library, recipe, kind)
        if (loaded := self.recipes[key]) is None:
            order.ASKING[3] += 1  # in other groups it may move something here: all count it
            return None
        recipe = loaded.recipe
        if recipe.packed:
            sources = [x.contiguous() if i in recipe.packed else x for i, x in enumerate(sources)]
        outs = [result(shape, dtype) for shape, dtype in loaded.outs]
        if loaded.pointer is None:
            order.ASKING[3] += 1
            return Transfer(self, 0, outs)
        tensors = [*sources, *outs]
        pointers = (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
        direct = self._direct(sources[0]) if recipe.direct and self.shared else NOWHERE
        ticket = self.library.shm_begin(session.engine, self.number, loaded.pointer, pointers, len(tensors), direct)
        session.flying[ticket] = tensors
        if len(session.flying) > FLYING:
            self._sweep()
        return Transfer(self, ticket, outs)

    def meet(self) -> Transfer:
        """Begin to wait until all members are in this turn; a byte is sent, and with it the turn."""
        meeting = self.start(("all_gather", "meet"), self._byte, [self.byte])
        assert meeting is not None
        return meeting

    def _byte(self) -> Recipe:
        like = Like.of(self.byte)
        message = Message(self.size, self.position, COPY)
        byte = message.stream([Block(0, like)])
        message.send(byte)
        for _ in range(self.size):
            message.receive(byte)
        return Recipe(message.words(like.nbytes), ())

    def _direct(self, x: Tensor) -> int:
        at = x.data_ptr()
        for first, end, number in self.shared:
            if first <= at < end:
                return number << 48 | (at - first)
        return NOWHERE

    def _sweep(self) -> None:
        """Forget tensors of collectives that nobody waited for and that are done."""
        for ticket in [t for t in list(self.session.flying) if self.library.shm_done(self.session.engine, t)]:
            self.library.shm_finish(self.session.engine, ticket, 0)
            self.session.flying.pop(ticket, None)  # another thread may have waited for it meanwhile

    def watch(self, ticket: int, begin: float, look: Callable[[], object]) -> None:
        """Raise `CollectiveError` if a peer is gone, has given up, or is late; `look` finds who is elsewhere."""
        session = self.session
        if any(session.segments[rank].culprit is not None for rank in self.ranks if rank != session.rank):
            session.order.look()  # it gave up because somebody is out of step, perhaps
        look()
        for rank in self.ranks:
            if rank == session.rank:
                continue
            segment = session.segments[rank]
            if (culprit := segment.culprit) is not None:
                self._fail(f"rank {rank} gave up waiting for rank {culprit}", culprit)
            if segment.owner_is_gone():
                self._fail(f"rank {rank} is dead: its process is gone", rank)
        seconds = world.timeout().total_seconds()
        if time.monotonic() - begin > seconds:
            late = self.library.shm_lacks(session.engine, ticket)
            rank = self.ranks[late] if late >= 0 else session.rank
            self._fail(f"rank {rank} did not come to a collective of {names(self.ranks)} within {seconds:g} s", rank)

    def refuse_stranger(self, ticket: int) -> NoReturn:
        """Raise the error for a member that is in another collective."""
        words = (ctypes.c_uint64 * 10)()
        rank = self.ranks[self.library.shm_stranger(self.session.engine, ticket, words)]
        self.session.segments[self.session.rank].give_up(rank)
        mine, theirs = list(words[:4]), list(words[5:9])
        if mine[0] and theirs[0]:
            self.session.order.out_of_step(mine, rank, theirs)
        error = CollectiveError(f"rank {rank} is in another collective of {names(self.ranks)}")
        error.culprit = rank
        raise error

    def _fail(self, text: str, culprit: int) -> NoReturn:
        self.session.segments[self.session.rank].give_up(culprit)
        error = CollectiveError(text)
        error.culprit = culprit
        raise error


class Transfer:
    """A collective under way; its results are there when `finish` returns."""

    __slots__ = ("channel", "outs", "ticket")

    def __init__(self, channel: Channel, ticket: int, outs: list[Tensor]) -> None:
        self.channel, self.ticket, self.outs = channel, ticket, outs

    def finish(self) -> list[Tensor]:
        """Wait, and return the results. Raises `CollectiveError` naming a rank that is dead, gave up or is late."""
        channel = self.channel
        session = channel.session
        patience = int(LOOK_SECONDS * 1e9)
        begin, look = 0.0, None
        while True:
            if session.engine is None:
                raise CollectiveError(_ended())
            answer = channel.library.shm_finish(session.engine, self.ticket, patience)
            if answer == _DONE:
                session.flying.pop(self.ticket, None)
                return self.outs
            if answer == _OUT_OF_STEP:
                channel.refuse_stranger(self.ticket)
            begin, look = begin or time.monotonic(), look or order.Patience()
            channel.watch(self.ticket, begin, look)

    def first(self) -> Tensor:
        """`finish` of a collective of one tensor."""
        return self.finish()[0]


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
        ("shm_share", i32, (pointer, i32, pointer)),
        ("shm_recipe", pointer, (pointer, i32)),
        ("shm_drop_recipe", None, (pointer,)),
        ("shm_begin", u64, (pointer, i32, pointer, pointer, i32, u64)),
        ("shm_finish", i32, (pointer, u64, ctypes.c_int64)),
        ("shm_stranger", i32, (pointer, u64, pointer)),
        ("shm_done", i32, (pointer, u64)),
        ("shm_lacks", i32, (pointer, u64)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returns, arguments
