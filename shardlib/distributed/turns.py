"""The order in which ranks meet, which is one order for all of them; and how a rank that is out of step is found out.

A *turn* is one call of a program that communicates, or one meeting of the ranks. All ranks take the same turns, one
after the other. A turn has a number, the program and the line of the user that calls it. What a rank sends carries
these (in shared memory every round does, on Gloo every turn begins with them), and nobody takes what belongs to another
turn. A rank that waits longer than usual tells the others which turns it took last, and compares theirs with its own:
so ranks that wait for each other in different places learn that too, long before a timeout.

The threads of a rank take turns one at a time. Ranks whose threads come in different orders are out of step like any.
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
from shardlib.core.source_lines import line_at, place, user_frame
from shardlib.core.torch_private import default_store, gather_of
from shardlib.distributed import world
from shardlib.distributed.processes import Processes
from shardlib.distributed.store import Store, own_connection
from shardlib.distributed.turn_errors import (
    KEEP,
    PATIENCE,
    Entry,
    Texts,
    backward_of,
    called_with,
    cannot_go_on,
    number,
)

_SLICE = timedelta(seconds=PATIENCE)

Moment = tuple[int, int]  # how many turns were taken by then, and how many calls made since: the same on all ranks

# What is begun now: turn, program, line, and collectives of this turn so far. The library in shared memory reads it.
ASKING = array("Q", bytes(32))


class Order:
    """What this process knows of the order of one world of torch.distributed; made by `current`."""

    def __init__(self, of: object) -> None:
        self.world, self.rank, self.size = of, dist.get_rank(), dist.get_world_size()
        self.room = f"shardlib/{_count}"
        self.turn = 0
        self.calls: Moment = (0, 0)
        self.meetings = 0  # how often the ranks have compared something through the store
        self.recent: list[Entry] = [(0, 0, 0)] * KEEP  # by turn
        self.thread = 0  # who took the last turn
        self.name = ""  # what all ranks call it; empty for the main thread
        self.named: dict[str, int] = {}  # the threads that took turns, by name
        self.fault = ""  # why this rank takes no more turns
        # A connection of our own: torch's is taken for as long as one of its threads waits for something.
        self._client = own_connection(default_store())
        self.texts = Texts(self.room, self.store)
        self.processes = Processes(self.room, self.rank, self.size, self.store)
        self.dead = self.processes.dead

    def store(self, cause: BaseException | None = None) -> Store:
        return Store(self.rank, self._client, cause, self.processes.dead)

    def moment(self) -> Moment:
        """When a call is made that something may go back through, in turns: no two calls have the same."""
        self.calls = self.turn, self.calls[1] + 1 if self.calls[0] == self.turn else 0
        return self.calls

    def watcher(self) -> Callable[[Sequence[int]], list[int]]:
        """For a wait: the dead among the missing; looks, too, where the others are when it takes long."""
        look = Patience()

        def dead(missing: Sequence[int]) -> list[int]:
            look()
            if gone := self.dead(missing, ask=True):
                self.look()  # it may have ended because it was out of step
            return gone

        return dead

    def meet(self, groups: Sequence[Any]) -> None:
        """At the beginning of a turn: wait until the members of these groups, which may use Gloo, are in it too.

        Gloo does not notice collectives that do not belong together: their bytes are mixed, or the process ends. On one
        machine they meet in shared memory, which does notice, and is faster.
        """
        meetings = []
        for group in groups:
            if group.channel is not None:
                meetings.append(group.channel.meet())
                ASKING[3] = 0  # it is no collective of the turn: some ranks meet in more groups than others
        flying = []
        mine = torch.tensor(ASKING[:3], dtype=torch.int64)
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
        """Tell the others where this rank is; raise `ShardingError` if one of them is in another turn, or gave up."""
        self.texts.explain()
        store, at = self.store(cause), f"{self.room}/turns"
        turns = sorted(entry for entry in self.recent if entry[0])
        store.post(at, json.dumps([self.fault, turns]))
        mine = {entry[0]: entry for entry in turns}
        for rank in range(self.size):
            if rank == self.rank or not (text := store.find(f"{at}/{rank}")):
                continue
            fault, theirs = json.loads(text)
            for entry in theirs:
                if entry[0] in mine and mine[entry[0]] != tuple(entry):
                    self.out_of_step(mine[entry[0]], rank, entry)
            if fault:
                self.refuse(fault)

    def out_of_step(self, mine: Sequence[int], rank: int, theirs: Sequence[int]) -> NoReturn:
        """Raise the error for two ranks that meet in different turns, or in different collectives of one."""
        error = self.texts.out_of_step(self.rank, mine, rank, theirs, threads=len(self.named) > 1)
        self.give_up(str(error))
        raise error

    def change_thread(self) -> None:
        """Another thread takes a turn. Its name is part of the turn, since threads at one line are not one another.

        Raises `ShardingError` where two threads have one name.
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
        """Forget the turns so far; all ranks do so together."""
        self.recent = [(0, 0, 0)] * KEEP
        self.texts.forget()

    def give_up(self, why: str) -> None:
        """Take no more turns, and tell all ranks that look."""
        self.fault = self.fault or why
        self.texts.explain()
        turns = sorted(entry for entry in self.recent if entry[0])
        self.store().post(f"{self.room}/turns", json.dumps([self.fault, turns]))

    def refuse(self, why: str) -> NoReturn:
        """Raise the error for ranks that cannot go on since something went wrong before."""
        self.fault = self.fault or why
        raise cannot_go_on(why)


class Turn:
    """The turn of a program, to be used with `with`; `text` are its name and, a line each, its collectives."""

    __slots__ = ("after", "lineage", "numbers", "order", "program", "text")

    def __init__(self, text: str, *key: str) -> None:
        self.program, self.text = number(text, *key), text
        self.order: Order | None = None
        self.numbers: Sequence[Any] | None = None  # of one call
        self.after: Moment | None = None
        self.lineage = 0

    def of(self, numbers: Sequence[Any], after: Moment | None = None, lineage: int = 0) -> Turn:
        """The turn of a call with these numbers and tensors, or of what goes back through a call.

        It is another one than that of other calls.
        """
        if not numbers and after is None and not lineage:
            return self
        turn = Turn.__new__(Turn)
        turn.text, turn.order, turn.numbers, turn.after, turn.lineage = self.text, None, numbers, after, lineage
        turn.program = self.program ^ lineage << 1
        if numbers or after:
            turn.program ^= zlib.crc32(f"{', '.join(map(repr, numbers))} {after}".encode()) << 1
        return turn

    def said(self) -> str:
        """What the turn of one call is called."""
        text = self.text if self.after is None else backward_of(self.text, *self.after)
        return called_with(text, ", ".join(map(repr, self.numbers or ())), self.lineage)

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
                order.texts.say_later(order.turn + 1, self.program, self.said)
            elif self.order is not order:
                order.texts.say(self.program, self.text)
                self.order = order
            if order.thread != threading.get_ident():
                order.change_thread()
            line = _line_number(order)
            order.turn = turn = order.turn + 1
            order.recent[turn % KEEP] = (turn, self.program, line)
            ASKING[0], ASKING[1], ASKING[2], ASKING[3] = turn, self.program, line, 0
            ready = True
        finally:
            if not ready:
                _lock.release()
        return order

    def __exit__(self, *_: object) -> None:
        ASKING[0] = ASKING[1] = ASKING[2] = ASKING[3] = 0
        _lock.release()


class Patience:
    """For a wait: called now and then, it looks where the others are once that takes long. Raises what `look` does."""

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
    """The order of the world that there is now."""
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


_lock = threading.RLock()  # of whoever has the turn
_order: Order | None = None
_count = 0  # worlds so far; a world that was destroyed leaves its texts in the store, so names are not used again
_lines: dict[tuple[str, int, str, str], int] = {}
_forked = False


def _line_number(order: Order) -> int:
    frame = user_frame(sys._getframe(2))
    if frame is None:
        return 0
    code = frame.f_code
    key = code.co_filename, frame.f_lineno, code.co_qualname, order.name
    found = _lines.get(key)
    if found is None:
        # Ranks may run the program from different folders.
        found = _lines[key] = number(Path(code.co_filename).name, str(frame.f_lineno), code.co_qualname, order.name)
    if found not in order.texts:
        where = place(line_at(code, frame.f_lineno))
        order.texts.say(found, f"{where} in thread {order.name}" if order.name else where)
    return found


def is_fork() -> bool:
    """Whether this process was forked from a rank."""
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
