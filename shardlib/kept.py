"""An attribute that is worked out when it is first asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")


class kept(cached_property[T]):
    """A `cached_property` without its lock, which before Python 3.12 takes longer than most of what is kept.

    Example:
        >>> class Pair:
        ...     @kept
        ...     def total(self):
        ...         print("adds")
        ...         return 3
        >>> pair = Pair()
        >>> pair.total + pair.total
        adds
        6
    """

    if not TYPE_CHECKING:  # it is typed as that one is

        def __get__(self, of, owner=None):
            if of is None:
                return self
            made = of.__dict__[self.attrname] = self.func(of)
            return made
