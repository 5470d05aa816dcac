"""What the schedule hides: steps with it beside the same steps without, simulated on H100s and on 4 processes here.

`python -m tests.validation.benchmarks.schedule` prints seconds of messages that nothing hides, by the simulator's
clock. `--table ranks` runs both programs in turns in the same 4 processes, one thread each, over shared memory, and
prints seconds of a step, in how many of them a rank waited for messages (the mean of all ranks, copies into results
included), and in how many of these it was ready and stood in the queue for a core, as the system counts it. `--machine`
names one on the mesh: where messages fly meanwhile (`h100`, not `cpu`), any weights are gathered that this hides, and
where its clock says so, or `--parts`, rows are worked on in parts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.compiler import passes
from shardlib.compiler.codegen import distributed
from shardlib.compiler.passes.comm import bucket_collectives, hide_messages
from shardlib.compiler.passes.comm import row_overlap as parts
from shardlib.compiler.plan.plan import Plan
from tests.helpers.ranks import run_ranks
from tests.models import w1

from .timing import interleave, markdown, ms, ratio

BIG = {"d": 4096, "heads": 32, "kv_heads": 8, "ff": 11008, "seq": 2048, "batch": 16}
CASES = ("fsdp8", "fsdp_tp", "tp_sp", "llama")


@contextmanager
def unscheduled() -> Iterator[None]:
    """Programs that are planned meanwhile wait for each message where it stands."""
    kept = passes.PASSES
    passes.PASSES = tuple(
        one for one in kept if one not in (parts.parts, bucket_collectives.bundle, hide_messages.schedule)
    )
    try:
        yield
    finally:
        passes.PASSES = kept


def w1_plan(name: str, devices: int, layers: int = 8, machine: str | None = None, **sizes: Any) -> Plan:
    from tests.models import w1_sharded

    config = w1.Config(layers=layers, **sizes)
    mode = w1.modes(config, devices)[name]
    with w1_sharded.mesh_of(mode, abstract=True, machine=machine):
        plan: Plan = w1_sharded.sharded_step(mode, config).plan(*w1.abstract(config))
    return plan


def llama(hidden: int, layers: int, *, device: str = "cpu") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers, vocab_size=4096,
                use_cache=False, **heads,
            )
        ).train()  # fmt: skip


def trained(m: Any, ids: torch.Tensor, parts: int | None = None) -> tuple[Any, tuple[Any, ...]]:
    """A step of a placed model, and its arguments."""

    def step(m: Any, opt: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = m(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    sl.parallelize(m, strategy="fsdp")
    return sl.jit(step, schedule=sl.Schedule(parts=parts)), (m, torch.optim.AdamW(m.parameters(), foreach=True), ids)


def llama_plan(axes: dict[str, int], hidden: int, batch: int, sequence: int) -> Plan:
    with sl.Mesh.abstract(axes, machine="h100"):
        ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
        step, given = trained(llama(hidden, 8, device="meta"), ids)
        plan: Plan = step.plan(*given)
    return plan


def simulated() -> str:
    rows: list[tuple[object, ...]] = []
    cases: dict[str, Callable[[], Plan]] = {}
    for name in ("fsdp8", "fsdp_tp", "tp", "tp_sp", "dp8"):
        cases[f"W1 {name}"] = lambda name=name: w1_plan(name, 8)  # type: ignore[misc]
    for name in ("fsdp8", "fsdp_tp"):
        cases[f"W1 {name}, as wide as Llama 8B"] = lambda name=name: w1_plan(name, 8, **BIG)  # type: ignore[misc]
    for name in ("fsdp_tp", "tp", "tp_sp"):
        told: dict[str, Any] = {"machine": "h100", "dtype": torch.bfloat16, **BIG}
        cases[f"the same, {name}, bf16, H100s named"] = partial(w1_plan, name, 8, **told)
    for axes in ({"data": 8}, {"data": 64}, {"data": 8, "tensor": 8}):
        what = " x ".join(f"{axis} {n}" for axis, n in axes.items())
        cases[f"Llama, {what}"] = lambda axes=axes: llama_plan(axes, 4096, 2 * axes["data"], 4096)  # type: ignore[misc]
    for what, make in cases.items():
        with unscheduled():
            before = make().simulate("h100")
        after = make().simulate("h100")
        share = after.exposed / before.exposed
        figures = (f"{x * 1e3:.3g} ms" for x in (before.exposed, after.exposed))
        peaks = (f"{x.peak_memory / 1e6:,.0f} MB" for x in (before, after))
        rows.append((what, *figures, f"{share:.2f}x", f"{after.seconds / before.seconds:.2f}x", *peaks))
    header = ("8 layers", "exposed, unscheduled", "scheduled", "ratio", "step", "peak, unscheduled", "scheduled")
    return markdown("Simulated on H100s", header, rows)


class Contestant:
    """A step on this rank, loaded with or without the schedule.

    `waited` are its seconds in waits, call by call, and `queued` those of them in which it was ready to run.
    """

    def __init__(self, make: Callable[[], Callable[[], Any]]) -> None:
        self.waited: list[float] = []
        self.queued: list[float] = []
        kept = distributed.source, distributed.ranged
        distributed.source = lambda *args, ranges=False: kept[0](*args, ranges=True)  # type: ignore[assignment]
        distributed.ranged = self._timed  # type: ignore[assignment]
        try:
            self.step = make()
            self()
        finally:
            distributed.source, distributed.ranged = kept  # type: ignore[assignment]

    def _timed(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        if not name.startswith("wait"):
            return fn

        def call(*args: Any) -> Any:
            start, before = time.perf_counter(), queued()
            out = fn(*args)
            self.waited[-1] += time.perf_counter() - start
            self.queued[-1] += queued() - before
            return out

        return call

    def __call__(self) -> Any:
        self.waited.append(0.0)
        self.queued.append(0.0)
        return self.step()


def queued() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where the system does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def measure(
    name: str, layers: int, rounds: int, machine: str | None = None, parts: int | None = None
) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Seconds of every step, those that this rank waited, and queued meanwhile, with the schedule and without."""
    makes = partial(_llama, machine, parts) if name == "llama" else partial(_w1, name, machine, parts)
    contestants = {}
    with unscheduled():
        contestants["unscheduled"] = Contestant(makes(layers))
    contestants["scheduled"] = Contestant(makes(layers))
    samples = interleave(contestants, rounds, before=dist.barrier)
    each = {who: (contestants[who].waited[-rounds:], contestants[who].queued[-rounds:]) for who in samples}
    return {who: (seconds, *each[who]) for who, seconds in samples.items()}


def _w1(name: str, machine: str | None, parts: int | None, layers: int) -> Callable[[], Callable[[], Any]]:
    from tests.models import w1_sharded

    config = w1.Config(layers=layers)
    mode = w1.modes(config, dist.get_world_size())[name]

    def make() -> Callable[[], Any]:
        mesh = w1_sharded.mesh_of(mode, machine=machine)
        with mesh:
            step = w1_sharded.sharded_step(mode, config, schedule=sl.Schedule(parts=parts))
            state, *batch = w1_sharded.place(mode, w1.init(config), *w1.batch(config))

        def call() -> Any:
            nonlocal state
            with mesh:
                value, state = step(state, *batch)
            return value

        return call

    return make


def _llama(machine: str | None, parts: int | None, layers: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        mesh = sl.Mesh(data=dist.get_world_size(), machine=machine)
        with mesh:
            ids = torch.arange(8 * 128).remainder(4096).reshape(8, 128)
            step, given = trained(llama(256, layers), ids, parts)

        def call() -> Any:
            with mesh:
                return step(*given)

        return call

    return make


class Turns(NamedTuple):
    """Seconds of a program, round by round: of a step on the first of 4 ranks, and of all ranks the mean of those that
    they waited for messages, and of these that they stood in the queue for a core."""

    steps: list[float]
    waits: list[float]
    queues: list[float]


def turns(
    name: str, layers: int, rounds: int, machine: str | None = None, parts: int | None = None
) -> tuple[Turns, Turns]:
    """A case without its schedule, and with it."""
    of_ranks = run_ranks(measure, 4, name, layers, rounds, machine, parts, timeout=900.0)

    def mean(who: str, kind: int) -> list[float]:
        return [statistics.mean(each) for each in zip(*(of_rank[who][kind] for of_rank in of_ranks), strict=True)]

    before, after = (Turns(of_ranks[0][who][0], mean(who, 1), mean(who, 2)) for who in ("unscheduled", "scheduled"))
    return before, after


def on_ranks(names: list[str], layers: int, rounds: int, machine: str | None, parts: int | None) -> str:
    rows: list[tuple[object, ...]] = []
    for name in names:
        before, after = turns(name, layers, rounds, machine, parts)
        steps = ms(before.steps), ms(after.steps), ratio(after.steps, before.steps)
        waits = ms(before.waits), ms(after.waits), ratio(after.waits, before.waits)
        rows.append((f"{name} L={layers}", *steps, *waits, ms(before.queues), ms(after.queues)))
    header = ("4 processes", "step, unscheduled", "scheduled", "ratio", "waited, unscheduled", "scheduled", "ratio")
    header += ("of it in the queue for a core, unscheduled", "scheduled")
    return markdown("Measured over shared memory, one thread each", header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=("simulated", "ranks"), default="simulated")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--machine")
    parser.add_argument("--parts", type=int)
    args = parser.parse_args()
    how = args.cases, args.layers, args.rounds, args.machine, args.parts
    print(simulated() if args.table == "simulated" else on_ranks(*how))
