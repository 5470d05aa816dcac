"""Turns: all ranks communicate in one common order, and a rank that is out of step is detected.

A *turn* is one call of a program that communicates, or one meeting of the ranks. All ranks take the same turns in
sequence. A turn consists of a number, the program and the user's line that calls it. Messages carry them (in shared
memory every round, on Gloo the start of every turn), and no rank accepts messages of another turn. A rank that waits
longer than usual posts its last turns and compares them with those of the others. So ranks that wait for each other in
different places learn about it long before a timeout.

The threads of a rank take turns one at a time; ranks whose threads take turns in different orders are out of step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.core.source_lines import format_path_line, line_at, user_frame
from shardlib.core.torch_internals.torch_private import default_store, gather_of
from shardlib.distributed import world
from shardlib.distributed.processes import Processes
from shardlib.distributed.store import Store, clone_connection
from shardlib.distributed.turn_errors import (
    KEEP,
    PATIENCE,
    Entry,
    Texts,
    backward_text,
    call_text,
    cannot_continue,
    hash_texts,
)

_SLICE = timedelta(seconds=PATIENCE)

CallTime = tuple[int, int]  # the number of turns before a call, and of calls since the last turn: equal on all ranks

# Turn, program, line, and the number of collectives in this turn so far. The shared-memory library reads the array.
CURRENT_TURN = array("Q", bytes(32))


class Order:
    """The order of turns in one world of torch.distributed, as seen by this process; made by `current`."""

    def __init__(self, world_group: object) -> None:
        self.world, self.rank, self.size = world_group, dist.get_rank(), dist.get_world_size()
        self.room = f"shardlib/{_count}"
        self.turn = 0
        self.calls: CallTime = (0, 0)
        self.meetings = 0  # number of comparisons through the store
        self.recent: list[Entry] = [(0, 0, 0)] * KEEP  # by turn
        self.thread = 0  # the thread of the last turn
        self.name = ""  # its name, common to all ranks; empty for the main thread
        self.named: dict[str, int] = {}  # the threads that took turns, by name
        self.fault = ""  # why this rank takes no more turns
        # Torch's own connection is blocked while one of its threads waits.
        self._client = clone_connection(default_store())
        self.texts = Texts(self.room, self.store)
        self.processes = Processes(self.room, self.rank, self.size, self.store)
        self.dead = self.processes.dead

    def store(self, cause: BaseException | None = None) -> Store:
        return Store(self.rank, self._client, cause, self.processes.dead)

    def moment(self) -> CallTime:
        """Returns a unique time for a call that may have a backward pass."""
        self.calls = self.turn, self.calls[1] + 1 if self.calls[0] == self.turn else 0
        return self.calls

    def watcher(self) -> Callable[[Sequence[int]], list[int]]:
        """Returns a function for waits that returns the dead among the missing, and checks turns if it takes long."""
        look = Patience()

        def dead(missing: Sequence[int]) -> list[int]:
            look()
            if gone := self.dead(missing, ask=True):
                self.look()  # it may have exited because it was out of step
            return gone

        return dead

    def meet(self, groups: Sequence[Any]) -> None:
        """Waits at the start of a turn until the members of these groups have started it.

        Gloo does not detect collectives of different turns: it mixes their bytes, or ends the process. On one machine
        ranks meet in shared memory, which detects them and is faster.
        """
        meetings = []
        for group in groups:
            if group.channel is not None:
                meetings.append(group.channel.meet())
                CURRENT_TURN[3] = (
                    0  # a meeting is no collective of the turn: some ranks meet in more groups than others
                )
        flying = []
        mine = torch.tensor(CURRENT_TURN[:3], dtype=torch.int64)
        for group in groups:
            if group.channel is None:
                all_ = torch.empty(group.size * 3, dtype=torch.int64)
                flying.append((group, all_, gather_of(group.pg)(all_, mine)))
        for meeting in meetings:
            meeting.finish()
        for group, all_, work in flying:
            self._land(work)
            for rank, theirs in zip(sorted(group.ranks), all_.view(-1, 3).tolist(), strict=True):
                if theirs != mine.tolist():
                    self.out_of_step(mine.tolist(), rank, theirs)

    def _land(self, work: Any) -> None:
        look, end = Patience(), time.monotonic() + world.timeout().total_seconds()
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed() or time.monotonic() > end:
                    raise CollectiveError(str(error)) from error
            look()

    def look(self, cause: BaseException | None = None) -> None:
        """Posts the turns of this rank; raises `ShardingError` if another rank is in another turn, or gave up."""
        self.texts.post_deferred()
        store, room = self.store(cause), f"{self.room}/turns"
        mine = {entry[0]: entry for entry in self._post_turns(store)}
        for rank in range(self.size):
            if rank == self.rank or not (text := store.find(f"{room}/{rank}")):
                continue
            fault, theirs = json.loads(text)
            for entry in theirs:
                if entry[0] in mine and mine[entry[0]] != tuple(entry):
                    self.out_of_step(mine[entry[0]], rank, entry)
            if fault:
                self.refuse(fault)

    def _post_turns(self, store: Store) -> list[Entry]:
        self.texts.post_deferred()
        turns = sorted(entry for entry in self.recent if entry[0])
        store.post(f"{self.room}/turns", json.dumps([self.fault, turns]))
        return turns

    def out_of_step(self, mine: Sequence[int], rank: int, theirs: Sequence[int]) -> NoReturn:
        """Raises the error for two ranks that meet in different turns, or in different collectives of one turn."""
        error = self.texts.out_of_step(self.rank, mine, rank, theirs, threads=len(self.named) > 1)
        self.give_up(str(error))
        raise error

    def change_thread(self) -> None:
        """Registers that another thread takes a turn. Its name is part of the turn, to tell threads at one line apart.

        Raises `ShardingError` if two threads have one name.
        """
        thread = threading.current_thread()
        self.thread = threading.get_ident()
        self.name = "" if thread is threading.main_thread() else thread.name
        before = self.named.setdefault(self.name, self.thread)
        if before != self.thread and any(other.ident == before for other in threading.enumerate()):
            self.thread = 0
            raise ShardingError(
                f"two threads of rank {self.rank} that use collectives are called {self.name!r}",
                rule="the ranks tell their threads apart by name",
                remedy="use collectives in one thread, or give each thread a name of its own, the same on all ranks",
            )
        self.named[self.name] = self.thread

    def forget(self) -> None:
        """Forgets the turns so far; all ranks do so together."""
        self.recent = [(0, 0, 0)] * KEEP
        self.texts.forget()

    def give_up(self, why: str) -> None:
        """Takes no more turns, and posts the reason."""
        self.fault = self.fault or why
        self._post_turns(self.store())

    def refuse(self, why: str) -> NoReturn:
        """Raises the error for ranks that take no more turns after an earlier error."""
        self.fault = self.fault or why
        raise cannot_continue(why)


class Turn:
    """The turn of a program, a context manager; `text` has its name and, in further lines, its collectives."""

    __slots__ = ("after", "lineage", "numbers", "order", "program", "text")

    def __init__(self, text: str, *key: str) -> None:
        self.program, self.text = hash_texts(text, *key), text
        self.order: Order | None = None
        self.numbers: Sequence[Any] | None = None  # of one call
        self.after: CallTime | None = None
        self.lineage = 0

    def for_call(self, numbers: Sequence[Any], after: CallTime | None = None, lineage: int = 0) -> Turn:
        """Returns the turn of a call with these numbers and tensors, or of the backward pass of the call at `after`."""
        if not numbers and after is None and not lineage:
            return self
        turn = Turn.__new__(Turn)
        turn.text, turn.order, turn.numbers, turn.after, turn.lineage = self.text, None, numbers, after, lineage
        turn.program = self.program ^ lineage << 1
        if numbers or after:
            turn.program ^= zlib.crc32(f"{', '.join(map(repr, numbers))} {after}".encode()) << 1
        return turn

    def describe(self) -> str:
        """Returns the text of the turn of one call."""
        text = self.text if self.after is None else backward_text(self.text, *self.after)
        return call_text(text, ", ".join(map(repr, self.numbers or ())), self.lineage)

    def __enter__(self) -> Order:
        if _forked:
            _refuse_fork()
        _lock.acquire()
        ready = False
        try:
            order = current()
            if order.fault:
                order.refuse(order.fault)
            if self.numbers is not None:
                order.texts.defer(order.turn + 1, self.program, self.describe)
            elif self.order is not order:
                order.texts.post(self.program, self.text)
                self.order = order
            if order.thread != threading.get_ident():
                order.change_thread()
            line = _line_number(order)
            order.turn = turn = order.turn + 1
            order.recent[turn % KEEP] = (turn, self.program, line)
            CURRENT_TURN[0], CURRENT_TURN[1], CURRENT_TURN[2], CURRENT_TURN[3] = turn, self.program, line, 0
            ready = True
        finally:
            if not ready:
                _lock.release()
        return order

    def __exit__(self, *_: object) -> None:
        CURRENT_TURN[0] = CURRENT_TURN[1] = CURRENT_TURN[2] = CURRENT_TURN[3] = 0
        _lock.release()


class Patience:
    """Checks the turns of other ranks once a wait that calls it repeatedly takes long. Raises like `Order.look`."""

    __slots__ = ("due", "pause")

    def __init__(self) -> None:
        self.pause = PATIENCE
        self.due = time.monotonic() + self.pause

    def __call__(self, *_: object) -> None:
        if time.monotonic() >= self.due and not _forked and _order is not None:
            _order.look()
            self.pause = min(2 * self.pause, 2.0)
            self.due = time.monotonic() + self.pause


def current() -> Order:
    """Returns the order of the present world."""
    global _order, _count
    if _forked:
        _refuse_fork()
    if _order is None or _order.world is not dist.group.WORLD:
        if not world.initialized():
            world.refuse_destroyed()
        _count += 1
        _order = Order(dist.group.WORLD)
        _order.processes.introduce()
    return _order


_lock = threading.RLock()  # held by the thread that has the turn
_order: Order | None = None
_count = 0  # worlds so far; a destroyed world leaves its texts in the store, so its room is not used again
_lines: dict[tuple[str, int, str, str], int] = {}
_forked = False


def _line_number(order: Order) -> int:
    frame = user_frame(sys._getframe(2))
    if frame is None:
        return 0
    code = frame.f_code
    key = code.co_filename, frame.f_lineno, code.co_qualname, order.name
    number = _lines.get(key)
    if number is None:
        # Ranks may run the program from different folders.
        number = _lines[key] = hash_texts(
            Path(code.co_filename).name, str(frame.f_lineno), code.co_qualname, order.name
        )
    if number not in order.texts:
        where = format_path_line(line_at(code, frame.f_lineno))
        order.texts.post(number, f"{where} in thread {order.name}" if order.name else where)
    return number


def is_fork() -> bool:
    """Returns whether this process was forked from a rank."""
    return _forked


def _refuse_fork() -> NoReturn:
    raise ShardingError(
        "a fork of a rank uses a ShardedTensor or a collective",
        [f"process {os.getpid()} was forked from process {os.getppid()}, which is a rank; it is none"],
        rule="only the processes that torch.distributed was initialized in are ranks",
        remedy="give the fork plain tensors (x.full_tensor(), x.to_local()), or start it by spawn",
    )


def _after_fork() -> None:
    global _forked
    _forked = _order is not None


os.register_at_fork(after_in_child=_after_fork)
