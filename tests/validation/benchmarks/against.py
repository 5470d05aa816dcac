"""What changes cost: this tree beside another one, in turns.

git worktree add /tmp/before COMMIT
python -m tests.validation.benchmarks.against /tmp/before [--only call step] [--rounds 40]

Each tree has a process of its own, which imports shardlib and the models of its tree, makes every case ready, and then
runs what it is asked for; the two take turns within each round. The cases use what both trees have. First calls of
eager ops and plans are new ones each time: other sizes, other functions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
Case = Callable[[], float]  # runs it once, or often; seconds of one call
RANKS = 4


# --- cases: they run in the process of either tree --------------------------------------------------------------------


def _often(call: Callable[[], object], times: int) -> Case:
    def timed() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    return timed


def _calls() -> Iterator[tuple[str, Case]]:
    """Warm calls of small jitted functions."""
    import shardlib as sl

    x = sl.shard(torch.ones(8, 8), "a@data b")
    params = {f"p{i}": sl.shard(torch.ones(8), "a@data") for i in range(40)}
    add, total, norm = sl.jit(lambda x: x + 1.0), sl.jit(lambda p: p["p0"] + p["p39"]), sl.jit(lambda x: x.sum())
    for name, call in {
        "call of one argument": lambda: add(x),
        "call with 40 parameters": lambda: total(params),
        "call that communicates": lambda: norm(x),
    }.items():
        yield name, _often(call, 200)


def _eager() -> Iterator[tuple[str, Case]]:
    """Eager ops, warm and for the first time."""
    import shardlib as sl
    from tests.validation.benchmarks import dispatch

    x, w, scale = dispatch._inputs()
    placed = sl.shard(x, "_@data _"), sl.shard(w, sl.P()), sl.shard(scale, sl.P())
    for name, op in dispatch.ops(*placed).items():
        yield f"eager {name}", _often(op, 200)
    sizes = iter(range(16, 1 << 20, 16))
    for name, first in dispatch.COLD.items():

        def cold(first: Callable[[Any, Any], object] = first) -> float:
            n = next(sizes)
            x, w = sl.shard(torch.zeros(n, 16), sl.P("data")), sl.shard(torch.zeros(32, 16), sl.P())
            begin = time.perf_counter()
            first(x, w)
            return time.perf_counter() - begin

        yield f"first eager {name}", cold


def _step(mode: Any, config: Any) -> Callable[[], object]:
    from tests.models import w1, w1_sharded

    step = w1_sharded.sharded_step(mode, config)
    state, *placed = w1_sharded.place(mode, w1.init(config), *w1.batch(config))

    def run() -> None:
        nonlocal state
        _, state = step(state, *placed)

    return run


def _steps(stack: ExitStack) -> Iterator[tuple[str, Case]]:
    """Steps of W1 on one device, on virtual devices, and its plans."""
    from tests.models import w1, w1_sharded

    one = w1.Mode("one", {"data": 1}, {"batch": "data"}, w1.specs(w1.TINY))
    small = w1.Config(layers=2)
    for name, mode, config, times in (
        ("tiny step on one device", one, w1.TINY, 20),
        *((f"step of {name} on 8 devices", w1.modes(small)[name], small, 1) for name in ("tp", "fsdp8")),
    ):
        mesh = w1_sharded.mesh_of(mode)
        with mesh:
            step = _step(mode, config)

        def run(mesh: Any = mesh, step: Callable[[], object] = step) -> None:
            with mesh:
                step()

        yield name, _often(run, times)

    def plan() -> None:
        mode = w1.modes(small)["tp"]
        with w1_sharded.mesh_of(mode, abstract=True):
            w1_sharded.sharded_step(mode, small).plan(*w1.abstract(small))

    yield "plan of tp", _often(plan, 1)
    from tests.helpers.ranks import Pool

    for ops, transport in (("", "shared memory"), ("torch", "Gloo")):
        pool = Pool(RANKS)
        stack.callback(pool.close)
        for name, what in (("call", "call"), ("tp", "tiny step of tp")):
            yield (
                f"{what} on {RANKS} ranks, {transport}",
                lambda name=name, ops=ops, pool=pool: pool.run(on_ranks, name, ops, timeout=300.0)[0],
            )


_made: dict[str, Callable[[], object]] = {}


def on_ranks(name: str, ops: str) -> float:
    """On one rank: a case that is made once; seconds of one call."""
    import torch.distributed as dist

    import shardlib as sl
    from tests.models import w1, w1_sharded

    os.environ["SHARDLIB_OPS"] = ops
    if name == "call":
        with sl.Mesh(data=RANKS):
            if name not in _made:
                x, total = sl.shard(torch.ones(8, 8), "a@data b"), sl.jit(lambda x: x.sum())
                _made[name] = lambda: total(x)
            dist.barrier()
            return _often(_made[name], 100)()
    mode = w1.modes(w1.TINY, RANKS)[name]
    with w1_sharded.mesh_of(mode):
        if name not in _made:
            _made[name] = _step(mode, w1.TINY)
        dist.barrier()
        return _often(_made[name], 5)()


def serve() -> None:
    """Say the names of all cases, then run what is asked for."""
    import shardlib as sl

    assert Path(sl.__file__).is_relative_to(Path.cwd()), sl.__file__
    torch.set_num_threads(1)
    with ExitStack() as stack:
        cases = dict(_steps(stack))
        with sl.Mesh(data=2):
            cases = {**dict(_calls()), **dict(_eager()), **cases}
            print("|".join(cases), flush=True)
            for line in sys.stdin:
                print(cases[line.strip()](), flush=True)


# --- the contest ------------------------------------------------------------------------------------------------------


class Tree:
    """The process of one tree."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, "--serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.cases = self._line().split("|")

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline().strip()):
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return line

    def run(self, case: str) -> float:
        """Seconds of one call."""
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self._line())


def main() -> None:
    from tests.validation.benchmarks.timing import markdown, ratio

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of cases' names")
    parser.add_argument("--rounds", type=int, default=40)
    a = parser.parse_args()
    now, before = Tree(ROOT), Tree(a.before.resolve())
    rows = []
    for case in now.cases:
        if any(part in case for part in a.only):
            mine, other = contest(now, before, case, a.rounds)
            seconds = (f"{statistics.median(s) * 1e6:.1f} us" for s in (mine, other))
            rows.append((case, *seconds, ratio(mine, other), f"{min(mine) / min(other):.2f}x"))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print(markdown("This tree against another", ("what", "now", "before", "ratio (quartiles)", "of the fastest"), rows))


def contest(now: Tree, before: Tree, case: str, rounds: int, warmup: int = 3) -> tuple[list[float], list[float]]:
    """Seconds of one call in each round, of both trees; each begins every other round."""
    found: dict[Tree, list[float]] = {now: [], before: []}
    for i in range(-warmup, rounds):
        for tree in (now, before) if i % 2 else (before, now):
            seconds = tree.run(case)
            if i >= 0:
                found[tree].append(seconds)
    return found[now], found[before]


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
