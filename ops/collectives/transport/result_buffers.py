"""Memory of large results, used again when nobody has the result any more.

Where a page of memory is touched for the first time the system stops to find and clear one, which costs several times
what a collective does. C's allocator gives large blocks back whenever they are freed; here they are kept for the next
result of that size, up to `KEPT` bytes.
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

from shardlib.ops.collectives.transport.shm_streams import Like

LARGE = 1 << 18  # bytes from which on a result is taken from here
KEPT = 128 << 20  # bytes of free memory that are kept

_free: OrderedDict[int, mmap.mmap] = OrderedDict()  # by address, the one that was freed last at the end


def result(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized contiguous tensor.

    Example:
        >>> result((2, 3), torch.float32).shape
        torch.Size([2, 3])
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(shape, dtype=dtype)
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _take(size)
    # The tensor holds the array, and the array the memory; when the last view of the tensor goes, so does the array.
    array = (ctypes.c_char * nbytes).from_buffer(memory)
    weakref.finalize(array, _give, ctypes.addressof(array), memory).atexit = False
    return torch.frombuffer(array, dtype=dtype, count=count).view(shape)


def views(base: int, likes: Sequence[Like], places: Sequence[int], give: Callable[[], None]) -> list[Tensor]:
    """Contiguous tensors at `places` behind the address `base`; `give` is called when nobody has any of them."""
    nbytes = max(place + like.nbytes for place, like in zip(places, likes, strict=True))
    array = (ctypes.c_char * nbytes).from_address(base)
    weakref.finalize(array, give).atexit = False
    return [
        torch.frombuffer(array, dtype=x.dtype, count=math.prod(x.shape), offset=place).view(x.shape)
        if x.nbytes
        else torch.empty(x.shape, dtype=x.dtype)
        for x, place in zip(likes, places, strict=True)
    ]


def _take(size: int) -> mmap.mmap:
    for address, memory in reversed(list(_free.items())):  # a copy: any allocation may call `_give`
        if len(memory) == size and _free.pop(address, None) is not None:
            return memory
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give(address: int, memory: mmap.mmap) -> None:
    _free[address] = memory
    kept = sum(map(len, _free.values()))
    while kept > KEPT:
        kept -= len(_free.popitem(last=False)[1])
