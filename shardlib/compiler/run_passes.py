"""All passes on a program, and what is kept for its backward pass, as its user says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from shardlib.compiler.memory_options import Keeping
from shardlib.compiler.output_placement import sent_away
from shardlib.compiler.passes import Hosted, run_passes
from shardlib.compiler.passes.memory.offload_saved import crossing
from shardlib.compiler.passes.memory.recompute import Recomputed, recompute, warn_of_a_higher_peak
from shardlib.compiler.passes.split_backward import Halves, split
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.schedule_options import Schedule
from shardlib.frontend.traced_graph import Traced


@dataclass(frozen=True)
class Finish:
    """The inputs `away` live in the host's memory between calls; `absent` names may be of what the program lacks."""

    traced: Traced
    away: Collection[int]
    keeping: Keeping
    absent: Callable[[str], bool]

    def run(self, program: Program) -> tuple[Program, Halves | None, Recomputed | None]:
        """The program that runs, its halves where its results have gradients, and what it makes again."""
        said, is_whole = self.keeping.schedule, not self.traced.after.gradients
        together = said if said.parts else replace(said, parts=1)  # to find parts takes longer than all else
        drafts = partial(self._draft, said), partial(self._draft, together)
        program, moved, recomputed = recompute(program, self.keeping, *drafts, self.absent, moves=is_whole)
        program, halves = self._passed(said, program, self.keeping.memory, moved)
        if recomputed is not None:
            warn_of_a_higher_peak(self.traced.name, recomputed, peak_bytes(program))
        return program, halves, recomputed

    def _draft(
        self,
        how: Schedule,
        program: Program,
        memory: float | None,
        moved: Collection[Var],
        ahead: str | None = None,
    ) -> Program:
        return self._passed(how, program, memory, moved, ahead, draft=True)[0]

    def _passed(
        self,
        how: Schedule,
        program: Program,
        memory: float | None,
        moved: Collection[Var],
        ahead: str | None = None,
        *,
        draft: bool = False,
    ) -> tuple[Program, Halves | None]:
        """The program after all passes, `moved` values in the host's memory meanwhile, inputs `away`, and what comes to
        stand where they do, there between calls; and its halves, of which messages run `ahead` so far in the second."""
        passed = partial(run_passes, how=how, memory=memory, draft=draft)
        after = self.traced.after
        if not after.gradients:
            hosted = Hosted(moved, self.away, sent_away(self.traced, self.away))
            return passed(program, hosted=hosted, ahead=ahead), None
        halves = split(program, len(after.cotangents), len(after.gradients), whole=how.saved is not None)
        sent = crossing(halves.forward, halves.own, how)
        halves = replace(halves, forward=passed(halves.forward, hosted=Hosted(outputs=sent)))
        backward = passed(  # what is saved may be views of one value: of how much, the forward half knows
            halves.backward,
            hosted=Hosted(inputs=[at - halves.own for at in sent]),
            ahead=ahead,
            peak=lambda second: peak_bytes(replace(halves, backward=second).joint),
        )
        halves = replace(halves, backward=backward)
        return halves.joint, halves
