"""Turns off the Python source of graphs: nothing reads the source, and generating it takes time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardlib.core.torch_internals.torch_private import LAZY_GRAPHS

_lock = threading.Lock()
_inside = 0  # threads that make graphs now
_before = False


@contextmanager
def skip_graph_source() -> Iterator[None]:
    """Delays the source of graph modules that are made inside, in any number of threads, until it is read."""
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
