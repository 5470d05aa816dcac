"""One command for a machine with a GPU.

    python -m tests.validation.gpu.session [--quick] [--only PART ...] [--out DIR]

It builds cuda/, checks every kernel, runs compute-sanitizer, times against torch and cuDNN, tries tiles, CTAs and
thresholds, and prints one table. A call takes up to 10 minutes. With --out, DIR gets REPORT.md, records.jsonl and
session.log, and the next call with the same DIR goes on where this one ended, until all is measured; --merge takes in
records from elsewhere, --fresh begins anew. Records of another card, torch or cuda/ do not count. --write puts what was
measured where shardlib reads it: see writeback.py.

Each part is a process of its own: one that crashes or hangs loses the case it was at, and goes on behind it. Exit
status: 0 all targets met, 1 not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from tests.validation.gpu import (
    check_attention,
    check_collectives,
    records,
    report,
    speed_attention,
    speed_memory,
    speed_steps,
    speed_waits,
    sweeps,
    tools,
    writeback,
)
from tests.validation.gpu.figures import of_part
from tests.validation.gpu.records import AGAIN, NO_TIME, Recorder

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 570.0  # of a call
RESTARTS = 8  # of a part, behind the case that ended it


@dataclass(frozen=True)
class Part:
    """A process: what it runs, its seconds at most, those below which it is not begun, and the part it builds on."""

    name: str
    run: Callable[[Recorder], None]
    most: float
    least: float
    needs: str = ""


# In the order of what one wants to know first when time is short.
PARTS: tuple[Part, ...] = (
    Part("environment", tools.environment, 40, 5),
    Part("build", tools.build, 240, 20),
    Part("gpu tests", tools.gpu_tests, 170, 25),
    Part("steps", speed_steps.steps, 150, 60, needs="build"),
    Part("waits", speed_waits.waits, 120, 40),
    Part("errors sm_90a", functools.partial(check_attention.errors, card="sm_90a"), 110, 20, needs="build"),
    Part("errors sm_80", functools.partial(check_attention.errors, card="sm_80"), 110, 20, needs="build"),
    Part("ceilings", speed_memory.ceilings, 40, 10),
    Part("forward speed", functools.partial(speed_attention.speeds, direction="forward"), 120, 15, needs="build"),
    Part("backward speed", functools.partial(speed_attention.speeds, direction="backward"), 150, 15, needs="build"),
    Part("collectives", check_collectives.collectives, 70, 15, needs="build"),
    Part("collective speed", speed_memory.collectives, 60, 15, needs="build"),
    Part("same bits", check_attention.same_bits, 40, 10, needs="build"),
    Part("rings", speed_attention.rings, 30, 10, needs="build"),
    Part("collective sweeps", sweeps.collectives, 60, 15, needs="build"),
    Part("sanitizer", tools.sanitizer, 180, 30, needs="build"),
    Part("cpu tests", tools.cpu_tests, 120, 25),
    Part("tile sweeps", sweeps.tiles, 560, 60, needs="build"),
)


@dataclass(frozen=True)
class Session:
    """One run: where its records and its log go, until when, and on what device."""

    path: Path
    log: IO[str]
    end: float
    quick: bool
    device: str
    module: str = "tests.validation.gpu.session"

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, part: Part) -> str:
        """Run one part; why it has no figures (or not all of them), empty when it came to its end, now or before."""
        if part.name in records.ended(self.path):
            return ""
        if self.left() < part.least:
            return f"{max(0.0, self.left()):.0f} s were left, it needs {part.least:.0f}"
        end = min(time.monotonic() + part.most, self.end)
        for _ in range(RESTARTS):
            before = self._written()
            code = self._process(part, end)
            if code == 0:
                if part.name != "environment" and not self._hurried(part):
                    records.end(self.path, part.name)
                return ""
            late = code == -signal.SIGKILL
            records.close(self.path, NO_TIME if late else f"the process ended: {_how(code)}", None if late else False)
            if end - time.monotonic() < 5 or self._written() == before:  # the next one would get no further
                return NO_TIME if late else f"its process ended: {_how(code)}"
        return f"its process ended {RESTARTS} times"

    def _hurried(self, part: Part) -> bool:
        """Whether cases of the part found no time."""
        mine = of_part(part.name)
        return any(r.text == NO_TIME for r in records.read(self.path)[0] if r.figure in mine)

    def _written(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _process(self, part: Part, end: float) -> int:
        """Exit status of the part's process; -SIGKILL when it ran into the end of its time."""
        command = [sys.executable, "-m", self.module, "--part", part.name, "--records", str(self.path)]
        command += ["--seconds", f"{end - time.monotonic() - 3:.1f}", "--device", self.device]
        command += ["--quick"] if self.quick else []
        self.log.flush()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        try:
            return process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the part and what it started (its process group); a GPU that hangs may keep it from ending."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end: is the GPU hung?")


def _how(code: int) -> str:
    if code == AGAIN:
        return "the device or a case was lost"
    return signal.Signals(-code).name if code < 0 else f"exit status {code}, see session.log"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.part:
        return _part(options)
    device = "cpu" if options.rehearse else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        reason = "there is no CUDA GPU"
        print(f"not measured: {reason} (torch {torch.__version__})")
        if options.out:
            table = report.rows([], {}, {part.name: reason for part in PARTS})
            report.write(options.out / "REPORT.md", report.page(table, {}, _today()))
        return 2
    with tempfile.TemporaryDirectory(prefix="shardlib-session-") as scratch:
        folder: Path = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "records.jsonl"
        if options.fresh:
            path.unlink(missing_ok=True)
        if left := records.join(path, tools.identity(device), options.merge):
            print(left)
        with (folder / "session.log").open("a") as log:
            session = Session(path, log, time.monotonic() + options.seconds, options.quick, device)
            skipped = _all_parts(session, options.only)
        found, facts, absent = records.read(path)
    table = report.rows(found, absent, skipped)
    print(report.text(table, facts))
    if options.out:
        page = folder / "REPORT.md"
        table = report.kept(table, facts, _today(), page.read_text() if page.exists() else "")
        report.write(page, report.page(table, facts, _today()))
    if options.write:
        writeback.write(found, facts["GPU"])
    return 1 if any(row.verdict in ("missed", report.NOT_MEASURED) for row in table) else 0


def _all_parts(session: Session, only: Sequence[str]) -> dict[str, str]:
    """Run the parts in turn; why some of them, or the rest of them, did not run."""
    skipped: dict[str, str] = {}
    for part in PARTS:
        if only and part.name not in only and part.name not in ("environment", "build"):
            skipped[part.name] = "not asked for"
        elif part.needs and session.device == "cuda" and part.needs in skipped:
            skipped[part.name] = f"{part.needs}: {skipped[part.needs]}"
        else:
            start = time.monotonic()
            if why := session.run(part):
                skipped[part.name] = why
            elif part.name == "build" and _failed("build", session.path):
                skipped["build"] = "it failed"
            print(f"{part.name}: {time.monotonic() - start:.0f} s{why and f', {why}'}", flush=True)
    return skipped


def _failed(part: str, path: Path) -> bool:
    """Whether nothing that builds on the part can run: a library with spills can."""
    wanted = of_part(part)
    return any(r.figure in wanted and r.ok is False and r.text.startswith("not built") for r in records.read(path)[0])


def _part(options: argparse.Namespace) -> int:
    """The other side: one part, in this process."""
    part = next(part for part in PARTS if part.name == options.part)
    torch.manual_seed(0)
    print(f"--- {part.name}", flush=True)
    end = time.monotonic() + options.seconds
    part.run(Recorder(options.records, options.device, options.quick, end))
    return 0


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.validation.gpu.session", description="Build, check and time cuda/ on a GPU."
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, one length")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, help="folder for REPORT.md, records.jsonl, session.log")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="records of other calls")
    parser.add_argument("--fresh", action="store_true", help="forget the records in DIR")
    parser.add_argument("--write", action="store_true", help="put what was measured where shardlib reads it")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of this call ({SECONDS:.0f})")
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU, kernels emulated, a few cases")
    for name in ("--part", "--device"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
