"""The compiled libraries, each loaded once in a process, or the reason why there is none."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from shardlib.build.build_recipe import Missing

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
    loaded: ctypes.CDLL | Missing = _loaded("host", ctypes.CDLL)
    return loaded


@functools.cache
def _cuda() -> ModuleType | Missing:
    if hasattr(torch.ops.shardlib_cuda, "version"):  # to define a namespace twice ends the process
        return Missing("another copy of shardlib has loaded its CUDA kernels into this process")
    loaded = _loaded("cuda", torch.ops.load_library)
    return loaded if isinstance(loaded, Missing) else torch.ops.shardlib_cuda


def _loaded(name: str, load: Callable[[str], Any]) -> Any:
    """What `load` makes of a library; one that does not load is built once more, and then given up."""
    from shardlib.build import library  # late, since that module is also run as a command

    built = library.get_library(name)
    for last in (False, True):
        if isinstance(built, Missing):
            break
        try:
            return load(str(built.path))
        except OSError as error:
            built = Missing(f"the {name} kernels do not load: {error}") if last else library.rebuild(name, built)
    return built
