"""Guards on the numbers of a call: they select the calls with one key that a program serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.core.call_scalar import Scalar, is_same_number
from shardlib.frontend.guards.host_scalars import HostStep


@dataclass(frozen=True)
class NumberGuards:
    """The conditions under which a program serves a call.

    `specialized` are the values, by leaf, of numbers that Python read. `host_steps` are the steps that compute more
    numbers, in order. `compared` are comparisons of numbers in Python, with their results as hints.
    """

    specialized: Mapping[int, Any] = field(default_factory=dict)
    host_steps: Sequence[HostStep] = ()
    compared: Sequence[Scalar] = ()

    def leaves(self, leaves: list[Any]) -> list[Any] | None:
        """Returns the leaves of a call with the computed numbers; None if a guard fails."""
        for i, value in self.specialized.items():
            if not is_same_number(leaves[i], value):
                return None
        complete = self.run_host_steps(leaves) if self.host_steps else leaves
        if complete is None or any(_evaluate(x, complete) != x.hint for x in self.compared):
            return None
        return complete

    def run_host_steps(self, leaves: list[Any]) -> list[Any] | None:
        """Returns the leaves and the computed numbers, without checking the other guards."""
        for step in self.host_steps:
            numbers = step(leaves)
            if numbers is None:
                return None
            leaves = leaves + numbers
        return leaves

    @property
    def guarded_leaves(self) -> set[int]:
        """Returns the leaves of the numbers whose values are guarded."""
        compared = (leaf for x in self.compared for leaf in x.leaves())
        return {*self.specialized, *source_leaves(compared, self.host_steps)}


def source_leaves(leaves: Iterable[int], host_steps: Sequence[HostStep]) -> set[int]:
    """Replaces the leaves that steps compute by the leaves that those steps read."""
    sources = set(leaves)
    for step in reversed(host_steps):
        computed = set(range(step.first, step.first + len(step.varying)))
        if sources & computed:
            sources = (sources - computed) | step.sources
    return sources


def _evaluate(x: Scalar, leaves: Sequence[Any]) -> Any:
    """Returns the value of a scalar for these leaves; None if it has none."""
    try:
        return x.value(leaves)
    except (ArithmeticError, TypeError, ValueError):
        return None
