"""What the schedule hides between 4 processes of this machine's CPUs: a GPU's machine has a core for each of them.

On fewer cores a rank that waits for a message also waits for its turn on a core, which no schedule hides.
"""

from __future__ import annotations

import functools
import os

from tests.validation.benchmarks.schedule import turns
from tests.validation.benchmarks.timing import ms, ratio
from tests.validation.gpu.figures import LONGEST_STEP, LONGEST_WAIT, WAITS, wait_of
from tests.validation.gpu.records import Outcome, Recorder


def waits(run: Recorder) -> None:
    """Waits of a step with its schedule beside those without."""
    small = run.device == "cpu"
    for name in WAITS:
        run.attempt(wait_of(name), "", functools.partial(_waits, name, small), seconds=110)


def _waits(name: str, small: bool) -> Outcome:
    before, after = turns(name, 1 if small else 8, 2 if small else 12)
    less, longer = ratio(after.waits, before.waits), ratio(after.steps, before.steps)
    text = f"{less}; {ms(after.waits)} of {ms(after.steps)}, without {ms(before.waits)} of {ms(before.steps)}; "
    text += f"in the queue for a core {ms(after.queues)} and {ms(before.queues)}; {os.cpu_count()} cores"
    met = less.median <= LONGEST_WAIT and longer.median <= LONGEST_STEP
    return Outcome(None if small else met, text, less.median)
