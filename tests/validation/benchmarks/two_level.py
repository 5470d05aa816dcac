"""Two-level collectives beside flat ones between two hosts: `python -m tests.validation.benchmarks.two_level`.

The hosts are namespaces of this machine with 4 processes each, started by torchrun. The link between them has a tenth
of the bandwidth inside, which is that of the fastest of 9 all_gathers of 16 MB in shared memory on both hosts at once:
they share this machine's cores. Both forms take turns in the same processes, one thread each; a call's time is that of
its slowest rank. "flat" is the form that runs without a machine model: a ring, or an exchange where Gloo has none.
Bytes are those that leave the first host: as planned, as counted at each message, and at the network interface (with
headers and acknowledgements). Every form of an all_to_all sends the same bytes, so only its latency can differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlib.ops.collectives import all_gather
from shardlib.ops.collectives.transport.forms import choose_form
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for
from shardlib.sharding.mesh.machine import Link, Machine
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.hosts import hosts, torchrun
from tests.helpers.ranks import run_ranks
from tests.helpers.wire_bytes import WireBytes

from .collectives import OPS
from .timing import interleave, markdown, ms, ratio

HOSTS, NEAR = 2, 4
INSIDE_BYTES = 16 << 20
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
TARGETS = {"all_gather": ">= 1.5x", "reduce_scatter": ">= 1.5x", "all_reduce": ">= 1.5x"}  # from 16 MB on


def gather_inside(nbytes: int) -> list[float]:
    """Seconds of calls in which the ranks of each host gather `nbytes` in shared memory, all hosts at once."""
    mesh = Mesh(host=HOSTS, x=NEAR)
    group = group_for(mesh, (mesh.axis("x"),))
    x = torch.ones(nbytes // 4 // NEAR)
    seconds = []
    for _ in range(9):
        dist.barrier()
        start = time.perf_counter()
        all_gather.start(x, 0, [len(x)] * NEAR, group).finish()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(op: str, nbytes: int, groups: dict[str, GroupHandle], rounds: int) -> dict[str, Any]:
    """Seconds of each call on this rank, bytes that it sends to the other host in one, and those of its interface."""
    count = nbytes // 4 // (dist.get_world_size() if op == "all_gather" else 1)
    x = torch.ones(count)
    calls: dict[str, Callable[[], object]] = {
        name: lambda group=group: OPS[op](x, group).finish() for name, group in groups.items()
    }
    counted, wire = {}, {}
    for name, call in calls.items():
        call()
        dist.barrier()
        before = _interface_bytes()
        dist.barrier()
        with WireBytes(lambda rank: rank // NEAR) as sent:
            call()
        dist.barrier()  # other ranks of this host have sent all
        counted[name], wire[name] = sent.sent, _interface_bytes() - before
    return {"seconds": interleave(calls, rounds, before=dist.barrier), "counted": counted, "wire": wire}


def _interface_bytes() -> int:
    """The bytes that have left this host through its network interface."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def run_rank(machine: str, nbytes: int, rounds: int, ops: list[str], out: Path) -> None:
    """Runs on each rank: writes what the ranks have measured, by collective and rank."""
    torch.set_num_threads(1)
    meshes = {"flat": Mesh(x=HOSTS * NEAR), "two_level": Mesh(x=HOSTS * NEAR, machine=machine)}
    groups = {name: group_for(mesh, (mesh.axis("x"),)) for name, mesh in meshes.items()}
    assert groups["two_level"].levels is not None, groups["two_level"].why
    results: dict[str, list[Any]] = {}
    for op in ops:
        results[op] = [None] * dist.get_world_size()
        dist.all_gather_object(results[op], measure(op, nbytes, groups, rounds))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare(nbytes: int, rounds: int, ops: list[str]) -> str:
    """Runs both forms on two hosts, and returns the table."""
    from tests.validation.benchmarks import two_level  # ranks find functions by the name of their module

    rounds_inside = zip(*run_ranks(two_level.gather_inside, HOSTS * NEAR, INSIDE_BYTES), strict=True)
    inside = INSIDE_BYTES * (NEAR - 1) / NEAR / min(map(max, rounds_inside))
    machine = Machine(Machine.preset("cpu").device, Link(inside, 2e-5), Link(inside / 10, 1e-4, NEAR), node=NEAR)
    with hosts(HOSTS) as members, tempfile.TemporaryDirectory() as folder:
        for host in members:
            host.limit(inside / 10)
        out = Path(folder) / "results.json"
        script = ["-m", __spec__.name, "--machine", repr(machine), "--out", str(out)]
        script += ["--bytes", str(nbytes), "--rounds", str(rounds), "--ops", *ops]
        runs = torchrun(members, NEAR, script, OMP_NUM_THREADS="1")
        texts = [process.communicate(timeout=600)[0] for process in runs]
        if any(process.returncode for process in runs):
            raise RuntimeError("\n".join(texts))
        results = json.loads(out.read_text())
    return format_table(nbytes, inside, machine, results)


def format_table(nbytes: int, inside: float, machine: Machine, results: dict[str, Any]) -> str:
    """Formats a row for each collective: medians, their ratio with quartiles, and bytes between the hosts."""
    header = ["collective", "flat ms", "two-level ms", "faster (quartiles)", "target"]
    header += ["flat: bytes counted / interface", "two-level: planned / counted / interface"]
    rows = []
    for op, ranks in results.items():
        slowest = {
            name: [max(times) for times in zip(*(r["seconds"][name] for r in ranks), strict=True)]
            for name in ("flat", "two_level")
        }
        counted = {name: sum(r["counted"][name] for r in ranks[:NEAR]) for name in slowest}
        wire = {name: ranks[0]["wire"][name] for name in slowest}
        span = machine.span([Mesh.abstract(x=HOSTS * NEAR).axis("x")], {"x": HOSTS * NEAR})
        planned = choose_form(op, nbytes, True, torch.float32, "sum" if "reduce" in op else "", span)
        figures = [ms(slowest["flat"]), ms(slowest["two_level"]), ratio(slowest["flat"], slowest["two_level"])]
        cells = f"{planned.name} {planned.across:,.0f} / {counted['two_level']:,} / {wire['two_level']:,}"
        rows.append([op, *figures, TARGETS.get(op, "-"), f"{counted['flat']:,} / {wire['flat']:,}", cells])
    rates = f"{inside / 1e6:.0f} MB/s inside, {inside / 1e7:.0f} MB/s between"
    return markdown(f"{nbytes:,} bytes, {HOSTS} hosts x {NEAR} processes, {rates}", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Two-level collectives beside flat ones between two hosts.")
    parser.add_argument("--bytes", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--machine", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.machine:
        run_rank(a.machine, a.bytes, a.rounds, a.ops, a.out)
    else:
        print(compare(a.bytes, a.rounds, a.ops))


if __name__ == "__main__":
    main()
