"""Collectives over shared memory: a channel between the ranks of a group, and its running transfers."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.distributed import turns, world
from shardlib.distributed.store import format_ranks
from shardlib.ops.collectives.transport.result_buffers import allocate, view_shared
from shardlib.ops.collectives.transport.shm_engine import Engine
from shardlib.ops.collectives.transport.shm_segment import PAGE
from shardlib.ops.collectives.transport.shm_streams import COPY, Block, Message, TensorMeta

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.shm_world import Session

POLL_SECONDS = 0.1  # between two checks of a waiting rank that its peers are alive
MAX_RECIPES = 1024  # that a channel keeps
MAX_TRANSFERS = 256  # running; more are searched for finished ones for which no caller waits
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute")
KINDS = (*OPS, "send")
_DONE, _OUT_OF_STEP, _NO_MEMORY, _ENDED = 1, 2, 3, 4  # status codes of the library; 0: still running


def _refuse_ended() -> NoReturn:
    if turns.is_fork():
        raise CollectiveError("this process is a fork of a rank, and no rank itself: it takes part in no collective")
    raise CollectiveError("the process group of this collective was destroyed")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A collective's encoded message (None if it moves nothing), and the results that each run of it needs.

    `packed` holds the sources that are made contiguous first. With `places` all members share one block of memory, and
    the results are at these offsets in it.
    """

    words: array[int] | None
    outs: tuple[TensorMeta, ...]
    packed: frozenset[int] = frozenset()
    places: tuple[int, ...] = ()


class TransferStatus(NamedTuple):
    """The library's report about a collective.

    `block` and `base` are a shared result's block and its address. `error` is the errno of a failed reservation of
    memory, and `culprit` the position of the member where it failed.
    """

    code: int
    block: int | None
    base: int | None
    error: int
    culprit: int


class _LoadedRecipe:
    """A recipe, with the pointer to the library's copy of it."""

    def __init__(self, library: ctypes.CDLL, recipe: Recipe, op: int) -> None:
        self.recipe, self.library = recipe, library
        self.outs = [(out.shape, out.dtype) for out in recipe.outs]
        self.pointer = None if recipe.words is None else library.shm_recipe(recipe.words.buffer_info()[0], op)

    def __del__(self) -> None:
        if self.pointer is not None:
            self.library.shm_drop_recipe(self.pointer)


class Channel:
    """This rank's place in a group whose members share memory."""

    def __init__(self, session: Session, number: int, ranks: tuple[int, ...], first: int) -> None:
        assert session.engine is not None
        self.session, self.number, self.ranks, self.library = session, number, ranks, session.engine.library
        self.size, self.position = len(ranks), ranks.index(session.rank)
        self.process_groups: list[dist.ProcessGroup] = []  # of these ranks in this order
        self.is_left = False
        self.recipes: dict[object, _LoadedRecipe | None] = {}
        self.byte = torch.zeros(1, dtype=torch.uint8)  # the message of `meet`
        bases = (ctypes.c_void_p * self.size)(*(session.segments[rank].base + PAGE for rank in ranks))
        self.library.shm_join(session.engine.pointer, number, self.size, self.position, bases, first)

    def is_destroyed(self) -> bool:
        """True if all process groups of these ranks are destroyed."""
        return all(map(_is_destroyed, self.process_groups))

    def leave(self) -> None:
        """Gives the number back: running collectives end, and later ones are refused."""
        self.is_left = True
        self.library.shm_leave(self.engine().pointer, self.number)

    def engine(self) -> Engine:
        """Returns the engine, which lives as long as the caller holds it. Raises `CollectiveError` if it is closed."""
        engine = self.session.engine
        return _refuse_ended() if engine is None else engine

    def start(
        self, key: tuple[Any, ...], make: Callable[[], Recipe | None], sources: Sequence[Tensor]
    ) -> Transfer | None:
        """Begins the collective `key`. Returns None if it runs on torch, which `make` decides at the first call."""
        session, engine = self.session, self.engine()
        if self.is_left:
            _refuse_ended()
        if key not in self.recipes:
            if len(self.recipes) >= MAX_RECIPES:  # most are for shapes that never return
                self.recipes.clear()
            recipe = make()
            kind = KINDS.index(key[0])
            self.recipes[key] = None if recipe is None else _LoadedRecipe(self.library, recipe, kind)
        if (loaded := self.recipes[key]) is None:
            turns.CURRENT_TURN[3] += 1  # every rank counts it, since in other groups it may use shared memory
            return None
        recipe = loaded.recipe
        if recipe.packed:
            sources = [x.contiguous() if i in recipe.packed else x for i, x in enumerate(sources)]
        shared = recipe if recipe.places else None
        outs = [] if shared else [allocate(shape, dtype) for shape, dtype in loaded.outs]
        if loaded.pointer is None:
            turns.CURRENT_TURN[3] += 1
            return Transfer(self, 0, outs)
        tensors = [*sources, *outs]
        pointers = (ctypes.c_void_p * (len(sources) + len(loaded.outs)))(*[x.data_ptr() for x in tensors])
        ticket = self.library.shm_begin(engine.pointer, self.number, loaded.pointer, pointers, len(pointers))
        if not ticket:  # another thread has closed the session
            _refuse_ended()
        transfer = Transfer(self, ticket, outs, shared)
        session.transfers[ticket] = tensors, weakref.ref(transfer)
        if len(session.transfers) > MAX_TRANSFERS:
            self._sweep(engine)
        return transfer

    def meet(self) -> Transfer:
        """Begins to gather a byte, and with it the members' turns: its end shows that all members are in this turn."""
        meeting = self.start(("all_gather", "meet"), self._byte_recipe, [self.byte])
        assert meeting is not None
        return meeting

    def _byte_recipe(self) -> Recipe:
        meta = TensorMeta.from_tensor(self.byte)
        message = Message(self.size, self.position, COPY)
        byte = message.stream([Block(0, meta)])
        message.send(byte)
        for _ in range(self.size):
            message.receive(byte)
        return Recipe(message.encode(meta.nbytes), ())

    def _sweep(self, engine: Engine) -> None:
        """Drops the tensors of finished collectives for which no caller waits."""
        for ticket, (_, transfer) in list(self.session.transfers.items()):
            if (alive := transfer()) is not None and alive.shared is not None:
                continue  # its `finish` reads the addresses of the results
            if self.library.shm_done(engine.pointer, ticket):
                status = self.poll(engine, ticket, 0)
                if status.block is not None:
                    self.session.free_block(status.block)
                self.session.transfers.pop(ticket, None)  # another thread may have popped it

    def poll(self, engine: Engine, ticket: int, patience: int) -> TransferStatus:
        """Waits at most `patience` nanoseconds for the result."""
        block, base, fault = ctypes.c_void_p(), ctypes.c_void_p(), (ctypes.c_int * 2)()
        code = self.library.shm_finish(
            engine.pointer, ticket, patience, ctypes.byref(block), ctypes.byref(base), ctypes.byref(fault)
        )
        return TransferStatus(code, block.value, base.value, fault[0], fault[1])

    def check_peers(self, engine: Engine, ticket: int, begin: float, look: Callable[[], object]) -> None:
        """Raises `CollectiveError` if a peer is gone, has given up, is late or, by `look`, is in another turn."""
        peers = {rank: engine.segments[rank] for rank in self.ranks if rank != engine.rank}
        if any(segment.culprit is not None for segment in peers.values()):
            self.session.order.look()  # the cause may be a rank that is out of step
        look()
        for rank, segment in peers.items():
            if (culprit := segment.culprit) is not None:
                self._fail(engine, f"rank {rank} gave up waiting for rank {culprit}", culprit)
            if segment.owner_is_gone():
                self._fail(engine, f"rank {rank} is dead: its process is gone", rank)
        seconds = world.timeout().total_seconds()
        if time.monotonic() - begin > seconds:
            late = self.library.shm_lacks(engine.pointer, ticket)
            rank = self.ranks[late] if late >= 0 else engine.rank
            self._fail(engine, f"{self.absence(rank)} within {seconds:g} s", rank)

    def absence(self, rank: int) -> str:
        """Returns the text that this rank is not where its peers wait for it."""
        return f"rank {rank} did not come to a collective of {format_ranks(self.ranks)}"

    def memory_error(self, results: Sequence[TensorMeta], status: TransferStatus) -> CollectiveError:
        """Makes the error of a member that has no memory for shared results. All members get it, and may go on."""
        error = CollectiveError(
            f"rank {self.ranks[status.culprit]} cannot reserve {sum(x.nbytes for x in results) / 2**20:.1f} MiB of "
            f"memory for what {format_ranks(self.ranks)} gather: {os.strerror(status.error)}; raise that limit, or "
            "start with SHARDLIB_OPS=all_gather=torch"
        )
        error.culprit, error.is_late = self.ranks[status.culprit], False
        return error

    def raise_out_of_step(self, engine: Engine, ticket: int) -> NoReturn:
        """Raises the error about a member that is in another collective."""
        words = (ctypes.c_uint64 * 10)()
        rank = self.ranks[self.library.shm_stranger(engine.pointer, ticket, words)]
        engine.segments[engine.rank].give_up(rank)
        mine, theirs = list(words[:4]), list(words[5:9])
        if mine[0] and theirs[0]:
            self.session.order.out_of_step(mine, rank, theirs)
        error = CollectiveError(f"rank {rank} is in another collective of {format_ranks(self.ranks)}")
        error.culprit = rank
        raise error

    def _fail(self, engine: Engine, text: str, culprit: int) -> NoReturn:
        engine.segments[engine.rank].give_up(culprit)
        error = CollectiveError(text)
        error.culprit = culprit
        raise error


class Transfer:
    """A running collective, which `finish` waits for.

    `shared` is the recipe of results in a shared block of memory, whose address is known when the collective is done.
    """

    __slots__ = ("__weakref__", "channel", "error", "outs", "shared", "ticket")

    def __init__(self, channel: Channel, ticket: int, outs: list[Tensor], shared: Recipe | None = None) -> None:
        self.channel, self.ticket, self.outs, self.shared = channel, ticket, outs, shared
        self.error: CollectiveError | None = None

    def finish(self) -> list[Tensor]:
        """Waits for the results and returns them.

        Raises `CollectiveError` that names a rank that is dead, gave up, is late or lacks memory, or if the process
        group is destroyed during the wait.
        """
        channel = self.channel
        session = channel.session
        patience = int(POLL_SECONDS * 1e9)
        begin, look = 0.0, None
        while True:
            engine = channel.engine()
            if self.error is not None:
                raise self.error
            status = channel.poll(engine, self.ticket, patience)
            if status.code == _DONE:
                session.transfers.pop(self.ticket, None)
                if self.shared is not None and status.block is not None and status.base is not None:  # the first time
                    free_block = partial(session.free_block, status.block)
                    self.outs = view_shared(status.base, self.shared.outs, self.shared.places, free_block)
                return self.outs
            if status.code == _ENDED:
                session.transfers.pop(self.ticket, None)
                _refuse_ended()
            if status.code == _OUT_OF_STEP:
                channel.raise_out_of_step(engine, self.ticket)
            if status.code == _NO_MEMORY:
                session.transfers.pop(self.ticket, None)
                self.error = channel.memory_error(() if self.shared is None else self.shared.outs, status)
                raise self.error
            begin, look = begin or time.monotonic(), look or turns.Patience()
            channel.check_peers(engine, self.ticket, begin, look)


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False
