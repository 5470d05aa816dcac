"""Reuse of the memory of large results.

The first touch of a page makes the system find and clear it, which costs several times as much as a collective. C's
allocator returns freed large blocks to the system. This module keeps up to `MAX_KEPT_BYTES` of them for later results
of the same size.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlib.ops.collectives.transport.shm_streams import TensorMeta

MIN_BYTES = 1 << 18  # smaller results use torch's allocator
MAX_KEPT_BYTES = 128 << 20

_free: OrderedDict[int, mmap.mmap] = OrderedDict()  # by address; the last freed is at the end


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialized contiguous tensor."""
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype)
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _take(size)
    # The tensor holds the array, and the array the memory. The array is freed with the last view of the tensor.
    array = (ctypes.c_char * nbytes).from_buffer(memory)
    weakref.finalize(array, _put_back, ctypes.addressof(array), memory).atexit = False
    return torch.frombuffer(array, dtype=dtype, count=count).view(shape)


def view_shared(
    base: int, metas: Sequence[TensorMeta], offsets: Sequence[int], release: Callable[[], None]
) -> list[Tensor]:
    """Returns contiguous tensors at `offsets` from the address `base`; calls `release` when all of them are freed."""
    nbytes = max(offset + meta.nbytes for offset, meta in zip(offsets, metas, strict=True))
    array = (ctypes.c_char * nbytes).from_address(base)
    weakref.finalize(array, release).atexit = False
    return [
        torch.frombuffer(array, dtype=x.dtype, count=math.prod(x.shape), offset=offset).view(x.shape)
        if x.nbytes
        else torch.empty(x.shape, dtype=x.dtype)
        for x, offset in zip(metas, offsets, strict=True)
    ]


def _take(size: int) -> mmap.mmap:
    for address, memory in reversed(list(_free.items())):  # a copy: any allocation may call `_put_back`
        if len(memory) == size and _free.pop(address, None) is not None:
            return memory
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _put_back(address: int, memory: mmap.mmap) -> None:
    _free[address] = memory
    kept = sum(map(len, _free.values()))
    while kept > MAX_KEPT_BYTES:
        kept -= len(_free.popitem(last=False)[1])
