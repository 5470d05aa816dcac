"""Which calls, of those with one key, a program is for: its trace may have asked something of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.core.call_scalar import Scalar, is_same_number
from shardlib.frontend.guards.host_scalars import Hosted


@dataclass(frozen=True)
class Served:
    """`looked` are the values of numbers, by leaf, at which Python looked; `hosted` works out more numbers, in order;
    `compared` is what Python asked of numbers instead of looking, with the answers as hints."""

    looked: Mapping[int, Any] = field(default_factory=dict)
    hosted: Sequence[Hosted] = ()
    compared: Sequence[Scalar] = ()

    def leaves(self, leaves: list[Any]) -> list[Any] | None:
        """The leaves of a call, and the numbers that are worked out; None where it is none of these calls."""
        for i, value in self.looked.items():
            if not is_same_number(leaves[i], value):
                return None
        given = self.completed(leaves) if self.hosted else leaves
        if given is None or any(_answer(x, given) != x.hint for x in self.compared):
            return None
        return given

    def completed(self, leaves: list[Any]) -> list[Any] | None:
        """The same of a call that is known to be one of them: what it was traced with."""
        for hosted in self.hosted:
            made = hosted(leaves)
            if made is None:
                return None
            leaves = leaves + made
        return leaves

    @property
    def asked(self) -> set[int]:
        """The leaves of numbers whose values matter."""
        return {*self.looked, *sources((leaf for x in self.compared for leaf in x.leaves()), self.hosted)}


def sources(leaves: Iterable[int], hosted: Sequence[Hosted]) -> set[int]:
    """The leaves of a call from which some come that it has, or that are worked out."""
    found = set(leaves)
    for made in reversed(hosted):
        own = set(range(made.first, made.first + len(made.free)))
        if found & own:
            found = (found - own) | made.sources
    return found


def _answer(x: Scalar, leaves: Sequence[Any]) -> Any:
    try:
        return x.value(leaves)
    except (ArithmeticError, TypeError, ValueError):  # there is none for these numbers
        return None
