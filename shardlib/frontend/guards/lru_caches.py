"""How often a `functools.cache` has been emptied: what a program got from it, a call may not get again."""

from __future__ import annotations

import functools
import weakref
from typing import Any

_asked: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()  # how often; how often emptied


def emptied(cache: Any) -> int:
    """The number of times, as far as anybody has looked: then it counts from 0 again."""
    info = cache.cache_info()
    calls, (before, times) = info.hits + info.misses, _asked.get(cache, (0, 0))
    if calls != before:
        times += calls < before
        _asked[cache] = calls, times
    return times


def is_cache(x: Any) -> bool:
    """Whether `x` is what `functools.cache` makes of a function."""
    return isinstance(x, functools._lru_cache_wrapper)
