"""Graphs whose Python source nobody reads, so that torch does not write it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardlib.core.torch_private import LAZY_GRAPHS

_lock = threading.Lock()
_inside = 0  # threads that make graphs now
_before = False


@contextmanager
def lazily() -> Iterator[None]:
    """Graph modules made inside have no source until somebody asks. Torch's own switch is for one thread at a time."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = LAZY_GRAPHS.value
            LAZY_GRAPHS.value = True
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                LAZY_GRAPHS.value = _before
