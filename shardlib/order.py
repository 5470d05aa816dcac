"""The order in which ranks meet, which is one order for all of them; and how a rank that is out of step is found out.

A *turn* is one call of a program that communicates, or one meeting of the ranks. All ranks take the same turns, one
after the other. A turn has a number, the program and the line of the user that calls it. What a rank sends carries
these (in shared memory every round does, on Gloo every turn begins with them), and nobody takes what belongs to another
turn. A rank that waits longer than usual tells the others which turns it took last, and compares theirs with its own:
so ranks that wait for each other in different places learn that too, long before a timeout.

The threads of a rank take turns one at a time. Ranks whose threads come in different orders are out of step like any.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import socket
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
from torch.distributed.distributed_c10d import _get_default_store

from shardlib.errors import ShardingError
from shardlib.meshes import world
from shardlib.ops._wire import CollectiveError
from shardlib.plans.places import place
from shardlib.store import Store, own_connection
from shardlib.tracing.lines import line_at, user_frame

KEEP = 64  # turns that a rank remembers
PATIENCE = 0.25  # seconds after which who waits looks where the others are
_SLICE = timedelta(seconds=PATIENCE)
_WITH = "\t"  # between the name of a program and the numbers of a call
_MASK = (1 << 63) - 1

# What is begun now: turn, program, line, and collectives of this turn so far. The library in shared memory reads it.
ASKING = array("Q", bytes(32))

Entry = tuple[int, int, int]  # turn, program, line


def number(*texts: str) -> int:
    """A number that stands for these texts, the same in every process.

    Example:
        >>> number("a", "b") == number("a", "b") != number("ab")
        True
    """
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "little") & _MASK | 1


class Order:
    """What this process knows of the order of one world of torch.distributed; made by `current`."""

    def __init__(self, of: object) -> None:
        self.world, self.rank, self.size = of, dist.get_rank(), dist.get_world_size()
        self.room = f"shardlib/{_count}"
        self.turn = 0
        self.meetings = 0  # how often the ranks have compared something through the store
        self.recent: list[Entry] = [(0, 0, 0)] * KEEP  # by turn
        self.thread = 0  # who took the last turn
        self.name = ""  # what all ranks call it; empty for the main thread
        self.named: dict[str, int] = {}  # the threads that took turns, by name
        self.fault = ""  # why this rank takes no more turns
        self.lives: dict[int, str] = {}  # where the processes of ranks are, as they said
        self._said: set[int] = set()
        self._numbered: dict[int, tuple[int, str]] = {}  # what recent turns with numbers are, by turn
        # A connection of our own: torch's is taken for as long as one of its threads waits for something.
        self._client = own_connection(_get_default_store())

    def store(self, cause: BaseException | None = None) -> Store:
        return Store(self.rank, self._client, cause, self.dead)

    # Texts ----------------------------------------------------------------------------------------------------------

    def say(self, what: int, text: str) -> None:
        """Leave the text that a number stands for where all ranks find it."""
        if what not in self._said:
            self._said.add(what)
            self.store().put(f"{self.room}/said/{what}", text)

    def explain(self) -> None:
        """Say what this rank's recent turns with numbers are, since somebody may ask now."""
        for what, text in self._numbered.values():
            self.say(what, text)

    def told(self, what: int) -> str:
        """The text; who is out of step, too, may be about to say it."""
        store, end = self.store(), time.monotonic() + 2 * PATIENCE
        while not (text := store.find(f"{self.room}/said/{what}")) and time.monotonic() < end:
            time.sleep(0.01)
        return text or "?"

    def describe(self, entry: Sequence[int]) -> str:
        """A turn in words; its fourth number, where it has one, says which of its collectives is meant."""
        name, *collectives = self.told(entry[1]).replace(_WITH, " with ").split("\n")
        which = entry[3] if len(entry) > 3 else 0
        what = f"{collectives[which]} of {name}" if which < len(collectives) else name
        return f"{what}, called at {self.told(entry[2])}"

    # Who is where ---------------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Say where this process is, once."""
        if self.rank not in self.lives:
            self.lives[self.rank] = _life()
            self.store().post(f"{self.room}/life", self.lives[self.rank])

    def dead(self, ranks: Sequence[int] | None = None, *, ask: bool = False) -> list[int]:
        """The ranks among these (None: all) whose processes ran on this machine and are gone."""
        among = range(self.size) if ranks is None else ranks
        if ask and (unknown := [r for r in among if r not in self.lives]):
            for r in unknown:
                if life := self.store().find(f"{self.room}/life/{r}"):
                    self.lives[r] = life
        return [r for r in among if r != self.rank and r in self.lives and _is_gone(self.lives[r])]

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
        """At the beginning of a turn: wait until the members of these groups on Gloo are in it too.

        Gloo does not notice collectives that do not belong together: their bytes are mixed, or the process ends.
        """
        flying = []
        mine = torch.tensor(ASKING[:3], dtype=torch.int64)
        for group in groups:
            all_ = torch.empty(group.size * 3, dtype=torch.int64)
            flying.append((group, all_, group.pg._allgather_base(all_, mine)))
        for group, all_, work in flying:
            self._land(group, work)
            for rank, theirs in zip(sorted(group.ranks), all_.view(-1, 3).tolist(), strict=True):
                if theirs != mine.tolist():
                    self.out_of_step(mine.tolist(), rank, theirs)

    def _land(self, group: Any, work: Any) -> None:
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
        self.explain()
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
        self.explain()
        program, other = (self.told(entry[1]).partition("\n")[0].partition(_WITH) for entry in (mine, theirs))
        numbers = mine[2] == theirs[2] and program[0] == other[0] and program[2] != other[2]
        offenders = [f"rank {self.rank} is in {self.describe(mine)}", f"rank {rank} is in {self.describe(theirs)}"]
        error = ShardingError(
            "the ranks call one program with different numbers" if numbers else "the ranks are out of step",
            offenders if self.rank < rank else offenders[::-1],
            rule="a number among the arguments is the same on all ranks"
            if numbers
            else "every rank runs the same programs in the same order, each called from the same line",
            remedy="compute the number alike everywhere, or pass what differs as a tensor: sl.from_local(x, spec)"
            if numbers
            else "let nothing that communicates (a jitted function, full_tensor, print, ops that move pieces) depend "
            "on the rank"
            + (
                "; this rank uses collectives in several threads, which have no common order with other ranks' threads "
                "unless the program gives them one: use them in one thread"
                if len(self.named) > 1
                else ""
            ),
        )
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
        self._numbered.clear()

    def give_up(self, why: str) -> None:
        """Take no more turns, and tell all ranks that look."""
        self.fault = self.fault or why
        self.explain()
        turns = sorted(entry for entry in self.recent if entry[0])
        self.store().post(f"{self.room}/turns", json.dumps([self.fault, turns]))

    def refuse(self, why: str) -> NoReturn:
        """Raise the error for ranks that cannot go on since something went wrong before."""
        first, *rest = why.split("\n")
        self.fault = self.fault or why
        raise ShardingError(
            f"the ranks cannot go on: {first.removesuffix(':')}",
            [line.removeprefix("  * ") for line in rest if line.startswith("  * ")],
            rule="after an error in a collective nobody knows what the others wait for",
            remedy="mend the first error, and start all ranks again",
        )


class Turn:
    """The turn of a program, to be used with `with`; `text` are its name and, a line each, its collectives."""

    __slots__ = ("numbered", "order", "program", "text")

    def __init__(self, text: str, *key: str) -> None:
        self.program, self.text = number(text, *key), text
        self.order: Order | None = None
        self.numbered = False

    def of(self, numbers: Sequence[Any]) -> Turn:
        """The turn of a call with these numbers: another one than that with others."""
        if not numbers:
            return self
        turn, said = copy.copy(self), ", ".join(map(repr, numbers))
        turn.program ^= zlib.crc32(said.encode()) << 1
        name, newline, collectives = self.text.partition("\n")
        turn.text, turn.numbered = f"{name}{_WITH}{said}{newline}{collectives}", True
        return turn

    def __enter__(self) -> Order:
        if _forked:
            _refuse_fork()
        _lock.acquire()
        ready = False
        try:
            order = current()
            if order.fault:
                order.refuse(order.fault)
            if self.numbered:
                order._numbered[(order.turn + 1) % KEEP] = self.program, self.text
            elif self.order is not order:
                order.say(self.program, self.text)
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
        _count += 1
        _order = Order(dist.group.WORLD)
        _order.introduce()
    return _order


def waited(task: Callable[[], Any], what: str) -> Any:
    """The result of `task`, which waits for other ranks out of our sight; an error as soon as one of them is dead."""
    order, done = current(), threading.Event()
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name="shardlib").start()
    while not done.wait(0.1):
        if dead := order.dead(ask=True):
            raise ShardingError(
                f"rank {order.rank} cannot {what}",
                [f"rank {r} is dead: its process is gone" for r in dead],
                rule="every rank of the mesh takes part in every step",
                remedy="look for the first error in the output of the ranks named",
            )
    if errors:
        raise errors[0]
    return results[0]


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
    if found not in order._said:
        where = place(line_at(code, frame.f_lineno))
        order.say(found, f"{where} in thread {order.name}" if order.name else where)
    return found


def is_fork() -> bool:
    """Whether this process was forked from a rank."""
    return _forked


def _refuse_fork() -> NoReturn:
    raise ShardingError(
        "a fork of a rank uses a ShardedTensor or a collective",
        [f"process {os.getpid()} was forked from process {os.getppid()}, which is a rank; it is none"],
        rule="only the processes that torch.distributed was initialised in are ranks",
        remedy="give the fork plain tensors (x.full_tensor(), x.to_local()), or start it by spawn",
    )


def _after_fork() -> None:
    global _forked
    _forked = _order is not None


os.register_at_fork(after_in_child=_after_fork)


def _life() -> str:
    """This process, in a form that others on the machine can look up: host and process namespace, then id."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.readlink() if namespace.exists() else ''} {os.getpid()}"


def _is_gone(life: str) -> bool:
    where, _, pid = life.rpartition(" ")
    if where != _life().rpartition(" ")[0]:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a process that its parent has not waited for yet still has an id
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return not stat.parent.exists() and Path("/proc/self/stat").exists()
