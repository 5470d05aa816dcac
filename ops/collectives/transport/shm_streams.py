"""The messages of a collective in shared memory, in the form that `cuda/shm.cpp` reads.

A tensor's part of a message is a block: a strided box of its memory. A stream is a sequence of blocks, each at a
multiple of 64 bytes. A member sends and receives intervals of streams. Bytes are copied straight from tensors
to results: messages need no packing.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LINE = 64  # bytes of a cache line
MAX_DIMS = 8  # of a block, in the library
ROUND = 1 << 20  # bytes that a member puts into its staging memory at a time
PAST_CACHES = 8 << 20  # results of this size and more are written past the caches

# A tensor of shorter rows and more bytes is made contiguous by torch, which is faster than copies of rows.
_SHORT, _LARGE = 32, 1 << 16

COPY, REDUCE, REDUCE_GATHER = range(3)
KINDS = {"sum": 0, "max": 1, "min": 2}
DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 9,
    torch.complex64: 0,  # sums only
    torch.complex128: 1,
}


def find_reduce_fault(dtype: torch.dtype, kind: str) -> str:
    """Returns why the library does not reduce this dtype; empty if it does."""
    if dtype in DTYPES and (kind == "sum" or not dtype.is_complex):
        return ""
    return f"there is no {kind} of {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, strides (in elements) and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_tensor(x: Tensor) -> TensorMeta:
        return TensorMeta(tuple(x.shape), x.stride(), x.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self) -> tuple[int, list[tuple[int, int]]]:
        """Returns the bytes of a contiguous run, and (size, stride in bytes) of the dims over runs, outermost first."""
        item = self.dtype.itemsize
        dims: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.stride, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == stride * item * size:
                dims[-1] = (dims[-1][0] * size, stride * item)
            else:
                dims.append((size, stride * item))
        run = item * dims.pop()[0] if dims and dims[-1][1] == item else item
        return run, dims


def dense_meta(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> TensorMeta:
    products = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1)
    return TensorMeta(tuple(shape), tuple(products)[::-1] if shape else (), dtype)


def metas_key(xs: Sequence[Tensor]) -> tuple[object, ...]:
    """Returns the part of a recipe's key that depends on the tensors."""
    return tuple([(x.shape, x.stride(), x.dtype) for x in xs])


def choose_sources(xs: Sequence[TensorMeta]) -> tuple[list[TensorMeta], frozenset[int]]:
    """Returns the metas of the tensors to send, and the positions of those that are made contiguous first."""
    packed = frozenset(i for i, x in enumerate(xs) if is_scattered(x))
    return [dense_meta(x.shape, x.dtype) if i in packed else x for i, x in enumerate(xs)], packed


def is_scattered(x: TensorMeta) -> bool:
    """True if a tensor's memory is too scattered to be copied row by row."""
    run, dims = x.rows()
    return len(dims) > MAX_DIMS or (run < _SHORT and x.nbytes > _LARGE and bool(dims))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, start + size)` of one dim of tensor number `tensor` (`dim` None: all of it)."""

    tensor: int
    meta: TensorMeta
    dim: int | None = None
    start: int = 0
    size: int = 0

    @property
    def part(self) -> TensorMeta:
        if self.dim is None:
            return self.meta
        shape = (*self.meta.shape[: self.dim], self.size, *self.meta.shape[self.dim + 1 :])
        return TensorMeta(shape, self.meta.stride, self.meta.dtype)

    @property
    def offset(self) -> int:
        return 0 if self.dim is None else self.start * self.meta.stride[self.dim] * self.meta.dtype.itemsize


@dataclass(slots=True)
class Message:
    """All that one member does in a collective; `encode` returns the form that the library takes.

    Blocks number sources and results as one list of tensors. `sends` has one segment for each member, or a single one
    that all read; a segment is (stream, begin, length).
    """

    n: int
    me: int
    how: int
    kind: str = "sum"
    streams: list[array[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sends: list[tuple[int, int, int]] = field(default_factory=list)
    receives: list[tuple[int, int, int]] = field(default_factory=list)
    strided: set[int] = field(default_factory=set)  # streams with a block that is no single run of memory

    def stream(self, blocks: Iterable[Block]) -> int:
        """Adds a stream and returns its number."""
        words, at, count = array("q"), 0, 0
        for block in blocks:
            nbytes = block.part.nbytes
            if not nbytes:
                continue
            run, dims = block.part.rows()
            dtype = DTYPES.get(block.meta.dtype, 0)
            words.extend((block.tensor, dtype, at, nbytes, block.offset, run if dims else nbytes))
            words.extend((len(dims), *(size for size, _ in dims), *(stride for _, stride in dims)))
            if dims:
                self.strided.add(len(self.streams))
            at = align(at + nbytes)
            count += 1
        self.streams.append(array("q", [count]) + words)
        self.lengths.append(at)
        return len(self.streams) - 1

    def send(self, stream: int, begin: int = 0, length: int | None = None) -> None:
        self.sends.append((stream, begin, self.lengths[stream] if length is None else length))

    def receive(self, stream: int, begin: int = 0, length: int | None = None) -> None:
        self.receives.append((stream, begin, self.lengths[stream] if length is None else length))

    def encode(self, result: int, longest: int = 0, places: Sequence[int] = ()) -> array[int] | None:
        """Encodes the message, of `result` bytes of results on this member; None if no member sends anything.

        `longest` counts the bytes of any member's longest segment, if another member's may exceed this member's.
        With `places` all members share one block of `result` bytes, with results at these offsets.
        """
        longest = max(longest, *(segment[2] for segment in (*self.sends, *self.receives)))
        if not longest:
            return None
        slot = min(align(longest), max(LINE, ROUND // len(self.sends) // LINE * LINE))
        keeps_own = len(self.sends) == 1 or self.sends[self.me][0] in self.strided
        head = [self.n, self.me, self.how, KINDS[self.kind], slot, -(-longest // slot)]
        past_caches = result >= PAST_CACHES and not places
        words = array("q", [*head, keeps_own, past_caches, result if places else 0, len(places), *places])
        words.append(len(self.streams))
        for stream in self.streams:
            words += stream
        for segments in (self.sends, self.receives):
            words.append(len(segments))
            for segment in segments:
                words.extend(segment)
        return words


def align(nbytes: int) -> int:
    """Rounds up to a multiple of a cache line."""
    return -(-nbytes // LINE) * LINE
