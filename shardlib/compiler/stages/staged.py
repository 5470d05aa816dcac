"""The result of a cut: the programs of all stages, and the messages between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardlib.compiler.passes.split_backward import Halves
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.stages.assign import Task
from shardlib.compiler.stages.explain_cut import Partition
from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.timetable import Orders
from shardlib.core.fragment_tag import Microbatches

ONCE = Microbatches(1, "gpipe")  # of a program without microbatches


@dataclass(frozen=True)
class Message:
    """One value on its way from a stage to another; `number` is unique in the program.

    `source` makes it, `target` reads it first: fragments, or None for what belongs to no microbatch.
    """

    number: int
    var: Var
    sender: int
    receiver: int
    source: Fragment | None
    target: Fragment | None

    @property
    def bytes(self) -> int:
        """Returns the bytes that each device sends."""
        return self.var.nbytes

    def __str__(self) -> str:
        return f"{self.var.name}: {self.place(self.source, self.sender)} -> {self.place(self.target, self.receiver)}"

    @staticmethod
    def place(fragment: Fragment | None, stage: int) -> str:
        return f"start or end of stage {stage}" if fragment is None else repr(fragment)


@dataclass(frozen=True)
class Staged:
    """The programs of all stages. Each has all inputs of the whole, and its own outputs; others are None.

    `output_stages` has the stage of each output; None: every stage has it.
    """

    shape: PipelineShape
    orders: Orders
    programs: tuple[Program, ...]
    halves: tuple[Halves, ...] | None  # of each program, where its results have gradients
    output_stages: tuple[int | None, ...]
    messages: tuple[Message, ...]
    partition: Partition | None = None  # why the cuts are where they are, if they are automatic
    is_named: bool = False  # the code names the stages; if they are not automatic either, they follow the parameters
    schedule: Any = ONCE.schedule

    @cached_property
    def by_number(self) -> Mapping[int, Message]:
        return {m.number: m for m in self.messages}


def order_receives(messages: Sequence[Message], order: Sequence[Task]) -> dict[Task | None, list[Message]]:
    """Returns the messages that a stage receives in front of each task; those of one sender keep their order."""
    first: dict[Var, int] = {}
    for i, task in enumerate(order):
        for v in task.reads:
            first.setdefault(v, i)
    received: dict[Task | None, list[Message]] = defaultdict(list)
    soonest: dict[int, int] = {}  # by sender
    for m in sorted(messages, key=lambda m: -m.number):
        index = min(first.get(m.var, len(order)), soonest.get(m.sender, len(order)))
        soonest[m.sender] = index
        received[order[index] if index < len(order) else None].insert(0, m)
    return received
