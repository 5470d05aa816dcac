"""What is bound to an object as a method is: every look-up makes another one, which equals the others."""

from __future__ import annotations

from typing import Any


class Bound:
    """A function and the object that it is bound to, named as Python's own methods name them."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__self__ is other.__self__ and self.__func__ == other.__func__

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))
