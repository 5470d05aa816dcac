"""A cache of bounded size."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict of at most `limit` items; a full one drops the oldest eighth for a new item.

    It does not track reads, which therefore cost no more than in a dict.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit and key not in self:
            for old in list(self)[: max(self.limit // 8, 1)]:
                self.pop(old, None)  # another thread may have removed it
        super().__setitem__(key, value)
