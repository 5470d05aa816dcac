"""A cache that does not grow for ever."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict of at most `limit` items: where another one comes, the eighth that came first goes.

    Reading costs what reading a dict costs, so nothing is known of when an item was read last.

    Example:
        >>> cache = Bounded(2)
        >>> cache["a"], cache["b"], cache["c"] = 1, 2, 3
        >>> list(cache)
        ['b', 'c']
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit and key not in self:
            for old in list(self)[: max(self.limit // 8, 1)]:
                self.pop(old, None)  # another thread may have been here
        super().__setitem__(key, value)
