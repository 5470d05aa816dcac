"""Memory that processes on one machine share, and whether the processes are alive.

A segment is an anonymous file (memfd): it never has a name in /dev/shm or elsewhere, so there is nothing to clean up
whenever its processes are killed; it goes with the last that maps it, and the size of /dev/shm does not limit it. Peers
open it as /proc/<pid>/fd/<n>. Its pages are reserved when it is made: where memory is missing, that is an error then,
and not a SIGBUS later.

The owner holds a lock on the file, which the kernel drops when the process ends, however it ends. A peer that gets the
lock knows that the owner is gone; process ids, which may be used again, do not matter.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

PAGE = 4096  # ahead of what the library uses
_TOKEN = slice(0, 32)
_CULPRIT = slice(64, 72)


@dataclass(frozen=True, slots=True)
class Address:
    """Where others find a segment."""

    machine: str
    pid: int
    fd: int
    size: int
    token: str

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Address:
        return Address(**json.loads(text))


class SegmentError(OSError):
    """Memory that cannot be shared; says why in words for a person."""


class Segment:
    """A mapped segment: this process's own (`make`) or a peer's (`Segment.open`)."""

    def __init__(self, fd: int, address: Address) -> None:
        self.fd, self.address = fd, address
        self.memory = mmap.mmap(fd, address.size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        # from_buffer is how ctypes tells an address; the object is dropped at once, so that the memory can be closed.
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @staticmethod
    def make(size: int) -> Segment:
        """A new one of `size` bytes, all zero, on which this process holds the lock. Raises `SegmentError`."""
        fd = -1
        try:
            fd = os.memfd_create("shardlib", os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, size)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            token = secrets.token_hex(16)
            segment = Segment(fd, Address(machine(), os.getpid(), fd, size, token))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            reason = error.strerror or str(error)
            raise SegmentError(f"cannot reserve {size / 2**20:.0f} MiB of shared memory: {reason}") from error
        segment.memory[_TOKEN] = token.encode()
        return segment

    @staticmethod
    def open(address: Address) -> Segment:
        """A peer's. Raises `SegmentError` when it cannot be reached, or is another one than was meant."""
        try:
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(f"cannot open memory of process {address.pid}: {error.strerror}") from error
        try:
            segment = Segment(fd, address)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise SegmentError(f"cannot map memory of process {address.pid}: {error}") from error
        if segment.memory[_TOKEN] != address.token.encode():
            segment.close()
            raise SegmentError(f"process {address.pid} is another one than was meant")
        return segment

    def owner_is_gone(self) -> bool:
        """Whether the process of a peer's segment has ended. (Of its own segment a process learns nothing.)"""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    @property
    def culprit(self) -> int | None:
        """The rank for whose sake the owner gave up."""
        rank = int.from_bytes(self.memory[_CULPRIT], "little")
        return rank - 1 if rank else None

    def give_up(self, culprit: int) -> None:
        """Tell all peers that the owner waits no more."""
        self.memory[_CULPRIT] = (culprit + 1).to_bytes(8, "little")

    def close(self) -> None:
        """Unmap, unless tensors still use the memory; and let go of the file."""
        try:
            self.memory.close()
        except BufferError:
            return
        os.close(self.fd)


def machine() -> str:
    """What processes that can reach each other's memory have in common: a kernel since it started, and process ids."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError as error:
        raise SegmentError(f"cannot tell this machine from others: {error.strerror}: {error.filename}") from error
