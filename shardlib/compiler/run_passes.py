"""Runs all passes on a program; rematerialization and offload are chosen as the user's options say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardlib.compiler.dump_stages import StageDump
from shardlib.compiler.memory_options import MemoryOptions
from shardlib.compiler.output_placement import outputs_of_state
from shardlib.compiler.passes import Hosted, run_passes
from shardlib.compiler.passes.memory.budget_programs import Finish
from shardlib.compiler.passes.memory.offload_saved import crossing
from shardlib.compiler.passes.memory.recompute import Recomputed, add_up, recompute, warn_of_a_higher_peak
from shardlib.compiler.passes.split_backward import Halves, split
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.schedule_options import Schedule
from shardlib.core.errors import ShardingError
from shardlib.frontend.traced_graph import TracedFunction


@dataclass(frozen=True)
class PassRunner:
    """The inputs `away` live in the host's memory between calls."""

    traced: TracedFunction
    away: Collection[int]
    options: MemoryOptions
    dump: StageDump

    def run_stages(self, programs: Sequence[Program]) -> tuple[list[Program], list[Halves], Recomputed | None]:
        """Returns the programs of all stages that run, their halves, and the sums of what they rematerialize.

        Raises `ShardingError` with the stages whose programs cannot be as the options request.
        """
        results, faults = [], dict[int, ShardingError]()
        for stage, program in enumerate(programs):
            try:
                results.append(self.run(program, f"stage {stage} of {self.traced.name}"))
            except ShardingError as error:
                faults[stage] = error
        if faults:
            first, *_ = faults.values()
            raise ShardingError(
                f"{self.traced.name} cannot run on these stages as the options request",
                [f"stage {stage}: {line}" for stage, e in faults.items() for line in (e.what, *e.offenders)],
                rule=first.rule,
                remedy="; ".join(f"for stage {stage}, {e.remedy}" for stage, e in faults.items() if e.remedy),
            )
        passed, halves, counts = zip(*results, strict=True)
        return [*passed], [h for h in halves if h is not None], add_up(counts)

    def run(self, program: Program, name: str) -> tuple[Program, Halves | None, Recomputed | None]:
        """Returns the program that runs, its halves if its results have gradients, and what it rematerializes.

        Warnings call the program by its `name`.
        """
        schedule, is_whole = self.options.schedule, not self.traced.after.gradients
        together = schedule if schedule.parts else replace(schedule, parts=1)  # finding parts takes the longest
        drafts = self._draft(schedule), self._draft(together)
        program, moved, recomputed = recompute(program, self.options, *drafts, moves=is_whole)
        self.dump.write_program("rematerialized", program)
        program, halves = self._run(schedule, program, self.options.memory, moved)
        if recomputed is not None:
            warn_of_a_higher_peak(name, recomputed, peak_bytes(program))
        return program, halves, recomputed

    def _draft(self, schedule: Schedule) -> Finish:
        """Returns the passes as a function that is not verified: a budget only looks at its figures."""
        return lambda *args: self._run(schedule, *args, draft=True)[0]

    def _run(
        self,
        schedule: Schedule,
        program: Program,
        memory: float | None,
        moved: Collection[Var],
        ahead: str | None = None,
        *,
        draft: bool = False,
    ) -> tuple[Program, Halves | None]:
        """Runs all passes; `moved` values wait in the host's memory, and messages run `ahead` so far.

        With gradients, the program is split, and `ahead` holds for the backward half.
        """
        passed = partial(run_passes, how=schedule, memory=memory, draft=draft)
        after, write = self.traced.after, self.dump.write_program
        if not after.gradients:
            hosted = Hosted(moved, self.away, outputs_of_state(self.traced, self.away))
            return passed(program, hosted=hosted, ahead=ahead, report=write), None
        halves = split(program, len(after.cotangents), len(after.gradients), whole=schedule.saved is not None)
        sent = crossing(halves.forward, halves.own, schedule)
        report = partial(_report_half, write, "forward")
        halves = replace(halves, forward=passed(halves.forward, hosted=Hosted(outputs=sent), report=report))
        backward = passed(  # saved values may be views of one value: only both halves together know the bytes
            halves.backward,
            hosted=Hosted(inputs=[at - halves.own for at in sent]),
            ahead=ahead,
            peak=lambda second: peak_bytes(replace(halves, backward=second).joint),
            report=partial(_report_half, write, "backward"),
        )
        halves = replace(halves, backward=backward)
        return halves.joint, halves


def _report_half(write: Callable[[str, Program], None], half: str, stage: str, program: Program) -> None:
    write(f"{half}_{stage}", program)
