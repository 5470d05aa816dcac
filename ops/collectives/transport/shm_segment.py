"""Memory that processes on one machine share, and a check that its owner is alive.

A segment is an anonymous file (memfd). It has no name in /dev/shm or elsewhere, so killed processes leave nothing to
clean up, and the size of /dev/shm does not limit it. Peers open it as /proc/<pid>/fd/<n>. Its pages are reserved when
it is made: missing memory is an error then, and not a SIGBUS later.

`Segment.reserve` adds memory behind what was there at first. The file and all mappings of it cover that memory from the
start, without pages.

The owner holds a lock on the file, which the kernel drops when the process ends. A peer that gets the lock knows that
the owner is gone. This does not depend on process ids, which the system may reuse.
"""

from __future__ import annotations

import contextlib
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
SPARE = 32 << 20  # bytes that `reserve` may add to a segment
_MADV_POPULATE_WRITE = 23  # which Python's mmap does not name
_TOKEN = slice(0, 32)
_CULPRIT = slice(64, 72)


@dataclass(frozen=True, slots=True)
class Address:
    """The address under which other processes open a segment."""

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
    """An error in sharing memory; its text is written for the user."""


class Segment:
    """A mapped segment: this process's own (`make`) or a peer's (`Segment.open`)."""

    def __init__(self, fd: int, address: Address) -> None:
        self.fd, self.address, self.reserved = fd, address, address.size
        self.memory = mmap.mmap(fd, address.size + SPARE, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # an old kernel maps pages when they are first touched
            self.memory.madvise(_MADV_POPULATE_WRITE, 0, address.size)
        # from_buffer is ctypes' way to get an address. The object is dropped at once: `memory` could not close with it.
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @staticmethod
    def make(size: int) -> Segment:
        """Makes a segment of `size` zero bytes and locks it. Raises `SegmentError`."""
        fd = -1
        try:
            fd = os.memfd_create("shardlib", os.MFD_CLOEXEC)
            os.ftruncate(fd, size + SPARE)
            os.posix_fallocate(fd, 0, size)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            token = secrets.token_hex(16)
            segment = Segment(fd, Address(machine(), os.getpid(), fd, size, token))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise _no_memory(size, error) from error
        segment.memory[_TOKEN] = token.encode()
        return segment

    def reserve(self, size: int) -> int:
        """Adds `size` bytes to one's own segment and returns where they begin. Raises `SegmentError`."""
        start = self.reserved
        if start + size > len(self.memory):
            raise SegmentError(f"a process has {SPARE / 2**20:.0f} MiB of shared memory for messages, which are in use")
        try:
            os.posix_fallocate(self.fd, start, size)
        except OSError as error:
            raise _no_memory(size, error) from error
        self.reserved += size
        return start

    @staticmethod
    def open(address: Address) -> Segment:
        """Opens a peer's segment. Raises `SegmentError` if it cannot be reached or has another token."""
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
        """True if the process that owns this segment, a peer's, has ended. Of no use on one's own segment."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    @property
    def culprit(self) -> int | None:
        """The rank for which the owner gave up waiting, or None."""
        rank = int.from_bytes(self.memory[_CULPRIT], "little")
        return rank - 1 if rank else None

    def give_up(self, culprit: int) -> None:
        """Tells all peers that the owner waits no more, because of rank `culprit`."""
        self.memory[_CULPRIT] = (culprit + 1).to_bytes(8, "little")

    def close(self) -> None:
        """Unmaps the memory and closes the file, unless tensors still use the memory."""
        try:
            self.memory.close()
        except BufferError:
            return
        os.close(self.fd)


def _no_memory(size: int, error: OSError) -> SegmentError:
    return SegmentError(f"cannot reserve {size / 2**20:.0f} MiB of shared memory: {error.strerror or error}")


def machine() -> str:
    """Returns a text that is equal in processes that can open each other's memory: boot id and PID namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError as error:
        raise SegmentError(f"cannot tell this machine from others: {error.strerror}: {error.filename}") from error
