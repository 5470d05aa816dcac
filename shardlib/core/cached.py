"""What is worked out when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
F = TypeVar("F")
P = ParamSpec("P")


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


def remembered(function: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """A function of a frozen value, which is remembered for as long as that lives; other arguments have a `repr`.

    Example:
        >>> @remembered
        ... def doubled(x):
        ...     print("doubles")
        ...     return {*x, *x}
        >>> x = frozenset({1})
        >>> doubled(x), doubled(x)
        doubles
        ({1}, {1})
    """
    known: WeakKeyDictionary[F, dict[str, T]] = WeakKeyDictionary()

    @wraps(function)
    def call(of: F, /, *args: P.args, **kwargs: P.kwargs) -> T:
        made, key = known.get(of, {}), repr((args, kwargs))
        if key in made:
            return made[key]
        found = function(of, *args, **kwargs)
        if found is not of:  # which would keep itself
            known.setdefault(of, {})[key] = found
        return found

    return call
