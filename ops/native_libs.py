"""The compiled libraries, each loaded once per process, or the reason why there is none."""

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
    """Returns the host library (plain C functions), built on first use and loaded once, or why there is none."""
    with _host_lock:  # a cache alone would let two threads load at once
        return _host()


def cuda(*, without_device: bool = False) -> ModuleType | Missing:
    """Returns `torch.ops.shardlib_cuda`, its library built on first use and loaded once, or why there is none.

    Builds nothing without a CUDA device, unless `without_device` asks for the ops, for shapes and tests.
    """
    if not without_device and not torch.cuda.is_available():
        return Missing("there is no CUDA device")
    with _cuda_lock:
        return _cuda()


@functools.cache
def _host() -> ctypes.CDLL | Missing:
    loaded: ctypes.CDLL | Missing = _load("host", ctypes.CDLL)
    return loaded


@functools.cache
def _cuda() -> ModuleType | Missing:
    if hasattr(torch.ops.shardlib_cuda, "version"):  # a second definition of the namespace would end the process
        return Missing("another copy of shardlib has loaded its CUDA kernels into this process")
    loaded = _load("cuda", torch.ops.load_library)
    return loaded if isinstance(loaded, Missing) else torch.ops.shardlib_cuda


def _load(name: str, load: Callable[[str], Any]) -> Any:
    """Builds a library and loads it by `load`; builds one that does not load once more before giving up."""
    from shardlib.build import library  # late: that module also runs as a command

    built = library.get_library(name)
    for last in (False, True):
        if isinstance(built, Missing):
            break
        try:
            return load(str(built.path))
        except OSError as error:
            built = Missing(f"the {name} kernels do not load: {error}") if last else library.rebuild(name, built)
    return built
