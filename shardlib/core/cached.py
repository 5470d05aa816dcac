"""Caches of properties, and of functions of frozen values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
F = TypeVar("F")
P = ParamSpec("P")


class lazy_property(cached_property[T]):
    """A `cached_property` without its lock, which is slow before Python 3.12."""

    if not TYPE_CHECKING:  # typed like `cached_property`

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


def cache_weakly(function: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Caches a function while its first argument, a frozen value, lives; the `repr` of others is in the key."""
    cache: WeakKeyDictionary[F, dict[str, T]] = WeakKeyDictionary()

    @wraps(function)
    def call(value: F, /, *args: P.args, **kwargs: P.kwargs) -> T:
        results, key = cache.get(value, {}), repr((args, kwargs))
        if key in results:
            return results[key]
        result = function(value, *args, **kwargs)
        if result is not value:  # else the cache would keep its own key alive
            cache.setdefault(value, {})[key] = result
        return result

    return call
