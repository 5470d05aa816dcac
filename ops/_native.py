"""The compiled libraries, each loaded once in a process, or the reason why there is none."""

from __future__ import annotations

import ctypes
import functools
import threading
from types import ModuleType

import torch

from shardlib.recipe import Missing

_host_lock, _cuda_lock = threading.Lock(), threading.Lock()


def host() -> ctypes.CDLL | Missing:
    """The host library (plain C functions over shared memory): built on first use, loaded once, or why not."""
    with _host_lock:  # a cache alone would let two threads load at a time
        return _host()


def cuda(*, without_device: bool = False) -> ModuleType | Missing:
    """`torch.ops.shardlib_cuda`, its library built on first use and loaded once, or why not.

    Without a CUDA device nothing is built, unless `without_device`: then the ops are there, for shapes and tests only.
    """
    if not without_device and not torch.cuda.is_available():
        return Missing("there is no CUDA device")
    with _cuda_lock:
        return _cuda()


@functools.cache
def _host() -> ctypes.CDLL | Missing:
    from shardlib.build import library  # late, since that module is also run as a command

    built = library("host")
    if isinstance(built, Missing):
        return built
    try:
        return ctypes.CDLL(str(built.path))
    except OSError as error:
        return Missing(f"the host kernels do not load: {error}")


@functools.cache
def _cuda() -> ModuleType | Missing:
    from shardlib.build import library

    if hasattr(torch.ops.shardlib_cuda, "version"):  # to define a namespace twice ends the process
        return Missing("another copy of shardlib has loaded its CUDA kernels into this process")
    built = library("cuda")
    if isinstance(built, Missing):
        return built
    try:
        torch.ops.load_library(str(built.path))  # type: ignore[no-untyped-call]
    except OSError as error:
        return Missing(f"the CUDA kernels do not load: {error}")
    return torch.ops.shardlib_cuda
