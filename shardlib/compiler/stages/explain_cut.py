"""The result of a cut as a value that prints why each boundary lies where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardlib.core.text_tables import format_si


class StageCost(NamedTuple):
    """The work and the messages of a stage in seconds, and its memory in bytes."""

    work: float
    messages: float
    memory: int

    @property
    def seconds(self) -> float:
        return self.work + self.messages


class Crossing(NamedTuple):
    """A value that a stage sends to a later one: the node that computes it, and its bytes in one direction."""

    node: str
    source: int
    target: int
    nbytes: int


class Alternative(NamedTuple):
    """A cut with one boundary elsewhere: the node that changes its stage, and the seconds of the slowest stage."""

    node: str
    stage: int
    seconds: float
    memory: int  # the most of a stage


@dataclass(frozen=True)
class Partition:
    """A cut into stages: the stage of each node, and its reasons.

    `traffic` are the bytes that all stages receive in a step, gradients included.
    `bound` is a number of seconds that the slowest stage of no assignment beats; if the cut is `exact`, it reaches it.
    `tied` says for each tied parameter whether one stage owns it or several have a copy. `later` and `earlier` are,
    for each boundary, the cuts that end the stage before it one node later and one node earlier.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    costs: tuple[StageCost, ...]
    crossings: tuple[Crossing, ...]
    traffic: int
    bound: float
    exact: bool
    tied: tuple[str, ...] = ()
    later: tuple[Alternative | None, ...] = ()
    earlier: tuple[Alternative | None, ...] = ()
    memory_limit: int | None = None

    @property
    def seconds(self) -> float:
        """The seconds of the slowest stage for one microbatch."""
        return max(cost.seconds for cost in self.costs)

    def __str__(self) -> str:
        slowest = max(range(len(self.costs)), key=lambda stage: self.costs[stage].seconds)
        proof = "no assignment is faster" if self.exact else "the search was limited"
        lines = [
            f"{len(self.costs)} stages, {_ms(self.seconds)} per microbatch (stage {slowest}); "
            f"bound {_ms(self.bound)}: {proof}"
        ]
        for stage, cost in enumerate(self.costs):
            lines.append(
                f"stage {stage}: {self._members(stage)}, {_ms(cost.seconds)} ({_ms(cost.work)} work, "
                f"{_ms(cost.messages)} messages), {format_si(cost.memory, 'B')}"
            )
            if stage < len(self.costs) - 1:
                lines.append(f"  cut {stage}|{stage + 1}: {self._explain(stage)}")
        return "\n".join([*lines, *(f"tied: {text}" for text in self.tied)])

    def _members(self, stage: int) -> str:
        names = [name for name, own in zip(self.names, self.stages, strict=True) if own == stage]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} nodes)"

    def _explain(self, stage: int) -> str:
        sent = [x for x in self.crossings if x.source <= stage < x.target]
        largest = sorted(sent, key=lambda x: -x.nbytes)
        text = ", ".join(f"{x.node} to stage {x.target} ({format_si(x.nbytes, 'B')})" for x in largest[:3])
        more = f" and {len(sent) - 3} more" if len(sent) > 3 else ""
        parts = [f"sends {text}{more}" if sent else "sends nothing"]
        for other, side in ((self.later[stage], "behind"), (self.earlier[stage], "before")):
            if other is not None:
                parts.append(f"{side} {other.node} stage {other.stage} would need {self._need(other)}")
        return "; ".join(parts)

    def _need(self, other: Alternative) -> str:
        if self.memory_limit is not None and other.memory > self.memory_limit:
            return f"{format_si(other.memory, 'B')} of {format_si(self.memory_limit, 'B')}"
        return _ms(other.seconds)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def move_boundary(
    inputs: Sequence[Sequence[int]], has_work: Sequence[bool], stages: Sequence[int], stage: int, *, later: bool
) -> tuple[int, list[int]] | None:
    """Moves the boundary behind `stage` by one node with work, and nodes without work that it needs or that need it.

    Returns the node and the new stages, or None if a stage would be left without work.
    """
    source, target = (stage + 1, stage) if later else (stage, stage + 1)
    members = [i for i, own in enumerate(stages) if own == source]
    working = [i for i in members if has_work[i]]
    if len(working) < 2:
        return None
    node = working[0] if later else working[-1]
    along = {node}
    for i in reversed(members) if later else members:
        if later and i in along:
            along.update(x for x in inputs[i] if stages[x] == source)
        elif not later and not along.isdisjoint(inputs[i]):
            along.add(i)
    return node, [target if i in along else own for i, own in enumerate(stages)]
