"""Groups of values that travel in one message, since messages of few bytes cost as much as larger ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.stages.staged import Staged
from shardlib.ops.transfers import RECEIVE, SEND

SMALL = 64 << 10  # bytes of the largest value that shares a message


def group_messages(staged: Staged, program: Program) -> Mapping[int, int]:
    """Returns, by number, the number of the last value of each message of the programs that run beside `program`.

    Values share a message if the receiver reads all of them in one place, and the sender receives nothing between the
    first and the last: then the message is sent with the last one, and no stage waits longer.
    """
    programs = _companions(staged, program)
    sent: dict[int, int] = {}  # by number, the receives of the sender before it
    order: dict[int, int] = {}
    for p in programs:
        received = 0
        for step in p.steps:
            if isinstance(step, Compute) and step.target is RECEIVE:
                received += 1
            elif isinstance(step, Compute) and step.target is SEND:
                number = step.args[2]
                sent[number], order[number] = received, len(order)
    last: dict[int, int] = {}
    for p in programs:
        for run in _runs(p):
            group: list[int] = []
            for number in [*run, None]:
                if group and (number is None or not _may_share(staged, group[-1], number, sent, order)):
                    last.update(dict.fromkeys(group, group[-1]))
                    group = []
                if number is not None:
                    group.append(number)
    return last


def _companions(staged: Staged, program: Program) -> Sequence[Program]:
    """Returns the programs of all stages that run together: whole ones, or halves of one direction."""
    halves = staged.halves or ()
    together = [staged.programs, [h.forward for h in halves], [h.backward for h in halves]]
    return next(programs for programs in together if any(p is program for p in programs))


def _runs(program: Program) -> Iterator[list[int]]:
    """Yields the numbers of adjacent receives from one stage."""
    run: list[int] = []
    sender: object = None
    for step in program.steps:
        source, number = step.args if isinstance(step, Compute) and step.target is RECEIVE else (None, None)
        if run and source != sender:
            yield run
            run = []
        sender = source
        if number is not None:
            run.append(number)
    if run:
        yield run


def _may_share(staged: Staged, a: int, b: int, sent: Mapping[int, int], order: Mapping[int, int]) -> bool:
    small = all(staged.by_number[number].bytes <= SMALL for number in (a, b))
    return small and sent[a] == sent[b] and order[a] < order[b]
