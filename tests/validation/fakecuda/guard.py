"""A device guard for CUDA that does nothing, for builds of torch without CUDA."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

_CUDA, _META = 1, 14  # of c10::DeviceType
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_ENTRIES = 64  # more than the guard's class has
_kept: list[Any] = []


def stand_in() -> None:
    """Give CUDA a device guard that does nothing, where this build of torch has none.

    torch does so itself, for fake tensors, where it is built with CUDA and there is no GPU. Without a guard its methods
    that are written by hand (`contiguous`, `to`, `x[i]`) refuse fake CUDA tensors. The guard is that of meta tensors,
    but for the current device, which is the first GPU.
    """
    if _kept or torch.backends.cuda.is_built():
        return
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    pointer = ctypes.POINTER(ctypes.c_void_p)
    entries = ctypes.cast(ctypes.cast(guards[_META], pointer)[0], pointer)
    current = ctypes.CFUNCTYPE(ctypes.c_int16, ctypes.c_void_p)(lambda _: _CUDA)  # the type's byte, and index 0
    table = (ctypes.c_void_p * _ENTRIES)(*entries[:_ENTRIES])
    table[2] = ctypes.cast(current, ctypes.c_void_p).value  # type, exchangeDevice, getDevice
    guard = ctypes.c_void_p(ctypes.addressof(table))
    _kept.extend((current, table, guard))
    guards[_CUDA] = ctypes.addressof(guard)
