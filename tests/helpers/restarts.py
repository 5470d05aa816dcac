"""Runs that lose a rank or a host, and that torchrun starts again: what became of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANK = "tests.helpers.restarted_rank"
OPTIONS = ("--max-restarts=3", "--monitor-interval=3")
CONF = "--rdzv-conf=last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"


@dataclass(frozen=True)
class Moment:
    """When to kill: `seconds` after a rank has imported torch, a step has written its loss, or a save has begun."""

    after: str  # "start", "step" or "save"
    step: int
    seconds: float

    def wait(self, folder: Path) -> str:
        """Returns a shell command that ends at this moment."""
        losses, partial = (shlex.quote(str(folder / name)) for name in ("losses.txt", self._partial))
        until = {
            "start": "true",
            "step": f"until grep -qs '^{self.step} ' {losses}; do sleep 0.01; done",
            "save": f"until [ -e {partial} ]; do sleep 0.002; done",
        }
        return f"{until[self.after]}; sleep {self.seconds:.3f}"

    @property
    def _partial(self) -> str:
        return f"checkpoints/.step-{self.step:06d}.partial"

    def __str__(self) -> str:
        point = "start" if self.after == "start" else f"{self.after} {self.step}"
        return f"{point} + {self.seconds:.3f} s"


@dataclass(frozen=True)
class Loss:
    """A line of `losses.txt`; `value` is in hexadecimal, so that equal texts are equal bits."""

    step: int
    value: str
    ranks: int
    first: int


def read_losses(folder: Path) -> list[Loss]:
    lines = (line.split() for line in (folder / "losses.txt").read_text().splitlines())
    return [Loss(int(step), value, int(ranks), int(first)) for step, value, ranks, first in lines]


def script(folder: Path, *options: str) -> list[str]:
    """Returns what torchrun starts on each rank."""
    return ["-m", RANK, "--out", str(folder), *options]


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "SHARDLIB_TIMEOUT": "60"}


def prepare(folder: Path, victim: int | None, moment: Moment) -> None:
    """Makes the folder of a run in which this rank is to be killed."""
    folder.mkdir(parents=True)
    if victim is not None:
        (folder / "kill.json").write_text(json.dumps([victim, moment.wait(folder)]))


def start_here(folder: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    """Starts a run by torchrun on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *OPTIONS]
    return subprocess.Popen(
        [*command, *script(folder, *options)],
        env=os.environ | environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(processes: Sequence[subprocess.Popen[str]], seconds: float) -> str:
    """Waits for launchers; returns what is wrong: "" if all succeed, and "hangs" after so many seconds."""
    end, wrong = time.monotonic() + seconds, []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks
            output, _ = process.communicate(timeout=60)
            return f"hangs: {output[-2000:]}"
        if process.returncode:
            wrong.append(f"exit code {process.returncode}: {output[-2000:]}")
    return "\n".join(wrong)


def resume_by_hand(folder: Path, step: int, run: Callable[[Path], str]) -> list[Loss]:
    """Returns the losses of a run that begins with a copy of the checkpoint of this step (0: none) and no other."""
    copy = folder / "by_hand"
    copy.mkdir()
    if step:
        name = f"checkpoints/step-{step:06d}"
        shutil.copytree(folder / name, copy / name)
    assert not (wrong := run(copy)), wrong
    return read_losses(copy)


def list_endings(folder: Path, victims: Iterable[int]) -> tuple[list[int], list[int], list[str]]:
    """Returns the survivors of the first start whose error names a victim, those without an error, and faults."""
    killed = int((folder / "killed").read_text())
    named, stopped, wrong = [], [], []
    for path in sorted((folder / "errors").iterdir()):
        start, rank = map(int, path.name.split("."))
        if start > killed or rank in victims:
            continue
        text = path.read_text()
        if "Traceback" not in text:
            stopped.append(rank)
        elif re.search(rf"rank ({'|'.join(map(str, victims))}) (is dead|gave no sign of life|did not)", text):
            named.append(rank)
        else:
            wrong.append(f"rank {rank} ended with {text[-3000:]}")
    return sorted(named), sorted(stopped), wrong


def find_differences(losses: Sequence[Loss], expected: Sequence[Loss]) -> list[str]:
    """Lists the steps of a run with as many ranks as the expected one whose loss differs, and steps without a loss."""
    values, ranks = {x.step: x.value for x in expected}, expected[0].ranks
    compared = [x for x in losses if x.ranks == ranks]
    wrong = [
        f"step {x.step} on {ranks} ranks: {x.value}, not {values[x.step]}"
        for x in compared
        if x.value != values[x.step]
    ]
    missing = values.keys() - {x.step for x in losses}
    return wrong + [f"step {step} is missing" for step in sorted(missing)]
