"""The result of a cut as a value that prints why each boundary lies where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardlib.core.text_tables import format_si


class StageCost(NamedTuple):
    """The seconds of a stage, of those its work and its messages, and its memory in bytes."""

    seconds: float
    work: float
    messages: float
    memory: int


class Crossing(NamedTuple):
    """A value that a stage sends to a later one: the node that computes it, and its bytes in one direction."""

    node: str
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Partition:
    """A cut into stages: the stage of each node, and its reasons.

    `traffic` are the bytes that all stages receive in a step, gradients included. `bound` is a number of seconds that
    the slowest stage of no assignment beats; if the cut is `exact`, it reaches it. `tied` says for each tied parameter
    whether one stage owns it or several have a copy, and `alternatives` what each boundary would cost elsewhere.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    costs: tuple[StageCost, ...]
    crossings: tuple[Crossing, ...]
    traffic: int
    bound: float
    exact: bool
    tied: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]

    @property
    def seconds(self) -> float:
        """The seconds of the slowest stage for one microbatch."""
        return max(cost.seconds for cost in self.costs)

    def __str__(self) -> str:
        slowest = max(range(len(self.costs)), key=lambda stage: self.costs[stage].seconds)
        proof = "no assignment is faster" if self.exact else "the search was limited"
        time, bound = format_ms(self.seconds), format_ms(self.bound)
        lines = [f"{len(self.costs)} stages, {time} per microbatch (stage {slowest}); bound {bound}: {proof}"]
        for stage, cost in enumerate(self.costs):
            names = [name for name, own in zip(self.names, self.stages, strict=True) if own == stage]
            members = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} nodes)"
            seconds = f"{format_ms(cost.work)} work, {format_ms(cost.messages)} messages"
            lines.append(
                f"stage {stage}: {members}, {format_ms(cost.seconds)} ({seconds}), {format_si(cost.memory, 'B')}"
            )
            if stage < len(self.costs) - 1:
                reasons = "; ".join([self._describe_messages(stage), *self.alternatives[stage]])
                lines.append(f"  cut {stage}|{stage + 1}: {reasons}")
        return "\n".join([*lines, *(f"tied: {text}" for text in self.tied)])

    def _describe_messages(self, stage: int) -> str:
        sent = sorted((x for x in self.crossings if x.source <= stage < x.target), key=lambda x: -x.nbytes)
        text = ", ".join(f"{x.node} to stage {x.target} ({format_si(x.nbytes, 'B')})" for x in sent[:3])
        return f"sends {text or 'nothing'}" + (f" and {len(sent) - 3} more" if len(sent) > 3 else "")


def format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
