"""What each member of a group sends in a collective and where what it receives belongs, as `cuda/shm.cpp` reads it.

A tensor's part of a message is a block: a strided box of its memory. Blocks stand one after the other in a stream of
bytes, each at a multiple of 64; a member sends and receives intervals of streams. Nothing is packed or concatenated for
a message: its bytes are copied from where a tensor has them, and to where the result wants them.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LINE = 64
DIMS = 8  # of a block, as many as the library takes
ROUND = 1 << 20  # bytes that a member puts into its staging at a time
PAST_CACHES = 8 << 20  # bytes of result from which its memory is written to past the caches
_SHORT, _LARGE = 32, 1 << 16  # torch rearranges a large tensor of short rows faster than copies of rows do

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


def irreducible(dtype: torch.dtype, kind: str) -> str:
    """Why the library does not reduce this dtype; empty when it does.

    Example:
        >>> irreducible(torch.complex64, "sum"), irreducible(torch.complex64, "max")
        ('', 'there is no max of complex64')
    """
    if dtype in DTYPES and (kind == "sum" or not dtype.is_complex):
        return ""
    return f"there is no {kind} of {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Like:
    """What there is to know of a tensor without its values; strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Like:
        return Like(tuple(x.shape), x.stride(), x.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self) -> tuple[int, list[tuple[int, int]]]:
        """Bytes of memory that lie together, and (size, stride in bytes) of the dims over them, outermost first."""
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


def dense(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Like:
    """A contiguous tensor.

    Example:
        >>> dense((2, 3)).stride
        (3, 1)
    """
    products = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1)
    return Like(tuple(shape), tuple(products)[::-1] if shape else (), dtype)


def likes(xs: Sequence[Tensor]) -> tuple[object, ...]:
    """What a recipe depends on."""
    return tuple([(x.shape, x.stride(), x.dtype) for x in xs])


def prefix(sizes: Sequence[int], i: int) -> int:
    """Where member i's rows begin."""
    return sum(sizes[:i])


def sources(xs: Sequence[Like]) -> tuple[list[Like], frozenset[int]]:
    """The tensors as they are sent, and the positions of those that are made contiguous for it."""
    packed = frozenset(i for i, x in enumerate(xs) if packed_first(x))
    return [dense(x.shape, x.dtype) if i in packed else x for i, x in enumerate(xs)], packed


def packed_first(x: Like) -> bool:
    """Whether a tensor is made contiguous before it is sent: its memory is too scattered to copy row by row."""
    run, dims = x.rows()
    return len(dims) > DIMS or (run < _SHORT and x.nbytes > _LARGE and bool(dims))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, start + size)` of one dim of tensor number `tensor` (`dim` None: all of it)."""

    tensor: int
    like: Like
    dim: int | None = None
    start: int = 0
    size: int = 0

    @property
    def nbytes(self) -> int:
        return self.part.nbytes

    @property
    def part(self) -> Like:
        if self.dim is None:
            return self.like
        shape = (*self.like.shape[: self.dim], self.size, *self.like.shape[self.dim + 1 :])
        return Like(shape, self.like.stride, self.like.dtype)

    @property
    def offset(self) -> int:
        return 0 if self.dim is None else self.start * self.like.stride[self.dim] * self.like.dtype.itemsize


@dataclass(slots=True)
class Message:
    """All that one member does in a collective; `words` is the form in which the library takes it.

    Sources and results count as one list of tensors. `sends` has one segment for each member, or a single one that all
    read; a segment is (stream, begin, length).
    """

    n: int
    me: int
    how: int
    kind: str = "sum"
    streams: list[array[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sends: list[tuple[int, int, int]] = field(default_factory=list)
    receives: list[tuple[int, int, int]] = field(default_factory=list)
    strided: set[int] = field(default_factory=set)  # streams with a block that is not one run of memory

    def stream(self, blocks: Iterable[Block]) -> int:
        """Add a stream; its number."""
        words, at, count = array("q"), 0, 0
        for block in blocks:
            if not block.nbytes:
                continue
            run, dims = block.part.rows()
            dtype = DTYPES.get(block.like.dtype, 0)
            words.extend((block.tensor, dtype, at, block.nbytes, block.offset, run if dims else block.nbytes))
            words.extend((len(dims), *(size for size, _ in dims), *(stride for _, stride in dims)))
            if dims:
                self.strided.add(len(self.streams))
            at = up(at + block.nbytes)
            count += 1
        self.streams.append(array("q", [count]) + words)
        self.lengths.append(at)
        return len(self.streams) - 1

    def send(self, stream: int, begin: int = 0, length: int | None = None) -> None:
        self.sends.append((stream, begin, self.lengths[stream] if length is None else length))

    def receive(self, stream: int, begin: int = 0, length: int | None = None) -> None:
        self.receives.append((stream, begin, self.lengths[stream] if length is None else length))

    def words(self, result: int, longest: int = 0, places: Sequence[int] = ()) -> array[int] | None:
        """The message, of `result` bytes of results on this member; None when no member sends anything.

        `longest` are the bytes of the longest segment of any member, where there may be longer ones than this one's.
        With `places` all members share one block of results, which lie in it there; `result` is its size.
        """
        longest = max(longest, *(segment[2] for segment in (*self.sends, *self.receives)))
        if not longest:
            return None
        slot = min(up(longest), max(LINE, ROUND // len(self.sends) // LINE * LINE))
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


def up(nbytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-nbytes // LINE) * LINE
