"""Runs all passes on a program; rematerialization and offload are chosen as the user's options say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from shardlib.compiler.dump_stages import StageDump
from shardlib.compiler.memory_options import MemoryOptions
from shardlib.compiler.output_placement import outputs_of_state
from shardlib.compiler.passes import Hosted, run_passes
from shardlib.compiler.passes.memory.budget_programs import Finish
from shardlib.compiler.passes.memory.offload_saved import crossing
from shardlib.compiler.passes.memory.recompute import Recomputed, recompute, warn_of_a_higher_peak
from shardlib.compiler.passes.split_backward import Halves, split
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.schedule_options import Schedule
from shardlib.frontend.traced_graph import TracedFunction


@dataclass(frozen=True)
class PassRunner:
    """The inputs `away` live in the host's memory between calls; `absent` accepts names that the program may lack."""

    traced: TracedFunction
    away: Collection[int]
    options: MemoryOptions
    absent: Callable[[str], bool]
    dump: StageDump

    def run(self, program: Program) -> tuple[Program, Halves | None, Recomputed | None]:
        """Returns the program that runs, its halves if its results have gradients, and what it rematerializes."""
        schedule, is_whole = self.options.schedule, not self.traced.after.gradients
        together = schedule if schedule.parts else replace(schedule, parts=1)  # finding parts takes the longest
        drafts = self._draft(schedule), self._draft(together)
        program, moved, recomputed = recompute(program, self.options, *drafts, self.absent, moves=is_whole)
        self.dump.write_program("rematerialized", program)
        program, halves = self._run(schedule, program, self.options.memory, moved)
        if recomputed is not None:
            warn_of_a_higher_peak(self.traced.name, recomputed, peak_bytes(program))
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
