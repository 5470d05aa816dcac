"""Locates the processes of ranks, and detects those that are gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlib.distributed.store import Store


class Processes:
    """The processes of the ranks of one world."""

    def __init__(self, room: str, rank: int, size: int, store: Callable[[], Store]) -> None:
        self._room, self.rank, self.size, self._store = f"{room}/life", rank, size, store
        self._lives: dict[int, str] = {}

    def introduce(self) -> None:
        """Posts the location of this process, once."""
        if self.rank not in self._lives:
            self._lives[self.rank] = describe_process()
            self._store().post(self._room, self._lives[self.rank])

    def dead(self, ranks: Sequence[int] | None = None, *, ask: bool = False) -> list[int]:
        """Returns the ranks among these (None: all) whose processes ran on this machine and are gone."""
        among = range(self.size) if ranks is None else ranks
        if ask:
            for r in among:
                if r not in self._lives and (life := self._store().find(f"{self._room}/{r}")):
                    self._lives[r] = life
        return [r for r in among if r != self.rank and r in self._lives and is_gone(self._lives[r])]


def describe_process() -> str:
    """Returns host, boot, process namespace and id of this process; hosts may share a name."""
    namespace, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
    where = [namespace.readlink() if namespace.exists() else "", boot.read_text().strip() if boot.exists() else ""]
    return f"{socket.gethostname()} {where[0]} {where[1]} {os.getpid()}"


def is_gone(life: str) -> bool:
    """True if this process ran on this machine and has ended."""
    where, _, pid = life.rpartition(" ")
    if where != describe_process().rpartition(" ")[0]:
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
