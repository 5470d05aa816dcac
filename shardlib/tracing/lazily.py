"""Graphs whose Python source nobody reads, so that torch does not write it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import _lazy_graph_module as lazy

_lock = threading.Lock()
_inside = 0  # threads that make graphs now
_before = False


@contextmanager
def lazily() -> Iterator[None]:
    """Graph modules made inside have no source until somebody asks. Torch's own switch is for one thread at a time."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = lazy._use_lazy_graph_module_flag
            lazy._use_lazy_graph_module_flag = True
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                lazy._use_lazy_graph_module_flag = _before
