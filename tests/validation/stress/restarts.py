"""Ranks and hosts that are killed at random moments under torchrun: the run continues, with the same bits.

Two hosts of two ranks train `shardlib.examples.restarts`. One rank, or the second host, is killed. The table says
when and who, which survivors named it, which ones torchrun stopped before they could or were done, the checkpoint that
the run continued from, and whether all losses are those of a run that was resumed from it by hand.

python -m tests.validation.stress.restarts --kills 30
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import restarts
from tests.helpers.hosts import hosts, torchrun
from tests.helpers.restarts import Loss, Moment

STEPS = 20
SECONDS = 400.0  # more than any run takes on a busy machine


@dataclass(frozen=True)
class Hosts:
    """Two hosts of so many ranks each; `run` returns what is wrong, "" if nothing is."""

    ranks: int

    def run(self, folder: Path, count: int = 2, background: bool = False, loss: Moment | None = None) -> str:
        """Runs on so many hosts, of which the last one is lost at this moment.

        If none is lost, no host goes on without another that is late.
        """
        nodes = [f"--nnodes={count}"] if loss is None else [restarts.CONF, f"--nnodes=1:{count}"]
        options = (*restarts.OPTIONS, *nodes)
        script = restarts.script(folder, f"--steps={STEPS}", *(["--background"] if background else []))
        with hosts(count) as members:
            launchers = torchrun(members, self.ranks, script, options, **restarts.environment())
            if loss is not None:
                members[-1].run(["timeout", "200", "sh", "-c", loss.wait(folder)], timeout=300)
                (folder / "killed").write_text(str(time.time_ns()))
                members[-1].kill()
                launchers.pop().communicate()
            return restarts.finish(launchers, SECONDS)

    def draw(self, rng: random.Random, number: int, seconds: float) -> tuple[Moment, int | None]:
        """Returns a moment, of `seconds` until the first step, and the rank to kill; None for the second host."""
        after = ("start", "step", "save", "step", "save")[number % 5]
        step = rng.choice([5, 10, 15]) if after == "save" else rng.randrange(1, STEPS)
        delay = {"start": seconds, "step": 0.2, "save": 0.15}[after] * rng.random()
        return Moment(after, step, delay), None if number % 5 == 3 else rng.randrange(2 * self.ranks)

    def kill(
        self, folder: Path, moment: Moment, rank: int | None, undisturbed: list[Loss], background: bool
    ) -> tuple[list[str], list[str]]:
        """Returns a row of the table, and what is wrong."""
        begin, shared = time.monotonic(), set(Path("/dev/shm").iterdir())
        victims = [*range(self.ranks, 2 * self.ranks)] if rank is None else [rank]
        restarts.prepare(folder, rank, moment)
        fault = self.run(folder, background=background, loss=moment if rank is None else None)
        seconds = time.monotonic() - begin
        who = "host 1" if rank is None else f"rank {rank}"
        if fault or not (folder / "killed").exists():
            return [str(moment), who, "the run failed" if fault else "the run ended before", *"-----"], [
                fault
            ] if fault else []
        named, stopped, faults = restarts.list_endings(folder, victims)
        losses = restarts.read_losses(folder)
        wrong = [*faults, *restarts.find_differences(losses, undisturbed)]
        last = losses[-1]
        if rank is None:
            by_hand = restarts.resume_by_hand(folder, last.first, lambda copy: self.run(copy, count=1))
            wrong += restarts.find_differences(losses, by_hand)
        if left := set(Path("/dev/shm").iterdir()) - shared:
            wrong.append(f"shared memory is left: {left}")
        lists = (" ".join(map(str, ranks)) or "-" for ranks in (named, stopped))
        equal = "no" if wrong else "yes"
        return [str(moment), who, *lists, f"step {last.first}", str(last.ranks), equal, f"{seconds:.0f}"], wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2, help="on each of the two hosts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill that is run")
    options = parser.parse_args()
    rng, two, faults = random.Random(options.seed), Hosts(options.ranks), 0
    with tempfile.TemporaryDirectory() as name:
        root, begin = Path(name), time.monotonic()
        (root / "undisturbed").mkdir()
        if wrong := two.run(root / "undisturbed"):
            print(f"the undisturbed run failed: {wrong}")
            return 1
        undisturbed, seconds = restarts.read_losses(root / "undisturbed"), time.monotonic() - begin
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        print(
            "moment | killed | named by | stopped or done | continued from | ranks | losses equal | seconds", flush=True
        )
        for number in range(options.kills):
            moment, rank = two.draw(rng, number, 0.3 * seconds)
            if number < options.first:
                continue
            row, lines = two.kill(root / str(number), moment, rank, undisturbed, background=number % 2 == 1)
            print("\n  ".join([" | ".join(row), *lines]), flush=True)
            faults += bool(lines)
    print(f"{options.kills - options.first} kills: {faults} with faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
