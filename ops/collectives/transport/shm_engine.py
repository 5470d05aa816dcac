"""The library's engine of one process, and the memory that it works in."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from shardlib.ops.collectives.transport.shm_segment import PAGE, Segment


class Engine:
    """The engine of this process and the segments that it reads and writes, by rank.

    Every caller of the library holds a reference during the call: the memory stays mapped until the last call returns,
    even if another thread closes the session.
    """

    def __init__(self, library: ctypes.CDLL, segments: Mapping[int, Segment], rank: int, asking: int) -> None:
        self.library, self.segments, self.rank = library, segments, rank
        mine = segments[rank]
        size = mine.reserved - PAGE
        self.pointer: int | None = library.shm_open_engine(mine.base + PAGE, size, asking)

    def end(self) -> None:
        """Ends all running collectives: every waiter returns with an error."""
        self.library.shm_end(self.pointer)

    def abandon(self) -> None:
        """Forgets the engine without closing it: in a fork the memory is the parent's."""
        self.pointer = None

    def __del__(self) -> None:
        if self.pointer is not None:
            self.library.shm_close_engine(self.pointer)
            for segment in self.segments.values():
                segment.close()


def declare_functions(library: ctypes.CDLL) -> None:
    """Declares argument and result types of the library's functions."""
    pointer, u64, i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    for name, returns, arguments in (
        ("shm_start", ctypes.c_size_t, ()),
        ("shm_channels", i32, ()),
        ("shm_rounds", u64, ()),
        ("shm_open_engine", pointer, (pointer, ctypes.c_size_t, pointer)),
        ("shm_close_engine", None, (pointer,)),
        ("shm_end", None, (pointer,)),
        ("shm_join", None, (pointer, i32, i32, i32, pointer, u64)),
        ("shm_set_ring", None, (pointer, i32, u64, u64)),
        ("shm_has_room", i32, (pointer, i32, u64, u64, u64)),
        ("shm_leave", None, (pointer, i32)),
        ("shm_posted", u64, (pointer,)),
        ("shm_recipe", pointer, (pointer, i32)),
        ("shm_drop_recipe", None, (pointer,)),
        ("shm_begin", u64, (pointer, i32, pointer, pointer, i32)),
        ("shm_finish", i32, (pointer, u64, ctypes.c_int64, pointer, pointer, pointer)),
        ("shm_give", None, (pointer,)),
        ("shm_stranger", i32, (pointer, u64, pointer)),
        ("shm_advance", i32, (pointer,)),
        ("shm_done", i32, (pointer, u64)),
        ("shm_lacks", i32, (pointer, u64)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returns, arguments
