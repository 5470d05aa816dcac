"""Which calls, of those with one key, a program is for: its trace may have asked something of their numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.scalar import Scalar, same_number


@dataclass(frozen=True)
class Served:
    """`looked` are the values of numbers, by leaf, at which Python looked; `compared` is what it asked of numbers
    instead, with the answers as hints."""

    looked: Mapping[int, Any] = field(default_factory=dict)
    compared: Collection[Scalar] = ()

    def serves(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these leaves is one of them."""
        for i, value in self.looked.items():
            if not same_number(leaves[i], value):
                return False
        return not self.compared or all(_answer(x, leaves) == x.hint for x in self.compared)

    @property
    def asked(self) -> set[int]:
        """The leaves of numbers whose values matter."""
        return {*self.looked, *(leaf for x in self.compared for leaf in x.leaves())}


def _answer(x: Scalar, leaves: Sequence[Any]) -> Any:
    try:
        return x.value(leaves)
    except (ArithmeticError, TypeError, ValueError):  # there is none for these numbers
        return None
