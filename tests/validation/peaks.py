"""What devices hold at most while a step runs, by the plan and by counting their storages.

`python -m tests.validation.peaks` trains tiny models of 12 families of transformers cut over tensor, fsdp, and hsdp and
tensor, with nothing made again, all of it, and under a budget of memory, and prints planned and measured peaks of the
fullest device. `--families gpt2 t5`, `--meshes fsdp` and `--ways full` take some of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple
from unittest import mock

import torch

import shardlib as sl
from shardlib.compiler.codegen import virtual
from shardlib.compiler.codegen.codegen import Generator
from shardlib.compiler.program.steps import Compute, Copy, Program, Start, Step
from shardlib.core.aten.op_traits import is_view
from tests.validation import doors

FAMILIES = ("gpt2", "llama", "gptj", "gptneo", "gptneox", "bloom", "bert", "t5", "qwen2", "qwen3", "mixtral", "gptoss")
MESHES = {
    "tp": doors.Way({"data": 2, "tensor": 2}),
    "fsdp": doors.Way({"data": 4}, "fsdp"),
    "hsdp+tp": doors.Way({"replica": 2, "shard": 2, "tensor": 2}, "hsdp"),
}
WAYS = ("none", "full", "budget")
SHARE = 0.7  # of the peak with nothing made again, or the least that can be


@contextmanager
def counting(found: dict[Program, dict[Any, int]]) -> Iterator[None]:
    """Programs that are made ready inside note, by device, the most bytes of all storages that it holds.

    Devices share nothing then, so that each holds what it would hold by itself. What waits in the host's memory is not
    the device's.
    """
    step, generate, load = Generator._step, Generator.generate, virtual.load

    def one_step(g: Generator, one: Step, coords: Any) -> None:
        step(g, one, coords)
        if isinstance(one, Compute | Copy) and not is_view(getattr(one, "target", None)):
            g.lines.append(f"look([{g.devices.index(coords)}], locals())")

    def all_steps(g: Generator, communicate: Any) -> Any:
        peaks = found.setdefault(g.program, {})
        here = [not v.host for v in g.program.inputs]
        device_of: dict[str, int] = {}

        def look(devices: list[int], there: dict[str, Any]) -> None:
            held: dict[int, dict[int, int]] = {d: {} for d in devices}
            for name, x in [*there.items(), *((name, g.namespace[name]) for name in captured)]:
                if isinstance(x, torch.Tensor) and (d := device_of.get(name, -1)) in held:
                    held[d][x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            for d, storages in held.items():
                storages |= {
                    x._cdata: x.nbytes() for x in (p[d].untyped_storage() for p in compress(there["pieces"], here))
                }
                peaks[d] = max(peaks.get(d, 0), sum(storages.values()))

        def both(g: Generator, start: Start) -> None:
            communicate(g, start)
            g.lines.append(f"look({list(range(len(g.devices)))}, locals())")

        g.namespace["look"] = look
        source = generate(g, both)
        for d, coords in enumerate(g.devices):
            device_of |= {
                name: d
                for (v, at), name in g._names.items()
                if not v.host and at == tuple(a.coord(coords) for a in g.varies[v])
            }
        captured = [name for name in device_of if name in g.namespace]
        return source

    def apart(program: Program, mesh: sl.Mesh) -> Any:
        run = load(program, mesh, share=False)
        return lambda pieces, *rest: run([[x.clone() for x in each] for each in pieces], *rest)

    with (
        mock.patch.object(Generator, "_step", one_step),
        mock.patch.object(Generator, "generate", all_steps),
        mock.patch.object(Generator, "_shared_reads", return_value={}),
        mock.patch.object(virtual, "load", apart),
    ):
        yield


class Peaks(NamedTuple):
    """Bytes on the fullest device; `asked` is the budget."""

    planned: int
    measured: int
    asked: int | None


def peaks(family: str, mesh: str, way: str) -> Peaks:
    """Of a step of SGD on a family's model."""
    how = MESHES[mesh]
    model, specs, args = doors.build(family)
    found: dict[Program, dict[int, int]] = {}
    with sl.Mesh(dict(how.axes), rules=doors.RULES if "tensor" in how.axes else {}), counting(found):
        sl.parallelize(model, specs if "tensor" in how.axes else {}, strategy=how.strategy)
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)

        def planned(**options: Any) -> tuple[Any, sl.Plan]:
            step = sl.jit(doors.step, **options)
            return step, step.plan(model, opt, args)

        options: dict[str, Any] = {} if way == "none" else {"remat": "full"}
        step, plan = planned(**options)
        if way == "budget":
            asked = max(int(SHARE * planned()[1].peak_memory), plan.peak_memory)
            options = {"memory": asked}
            step, plan = planned(**options)
        step(model, opt, args)
    (real,) = (by_device for by_device in found.values() if by_device)
    return Peaks(plan.peak_memory, max(real.values()), options.get("memory"))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, every in (("--families", FAMILIES), ("--meshes", tuple(MESHES)), ("--ways", WAYS)):
        parser.add_argument(name, nargs="*", default=every, choices=every)
    only = parser.parse_args()
    print(f"{'family':10} {'mesh':8} {'way':8} {'planned':>12} {'measured':>12} {'ratio':>6}")
    worst = 0.0
    for family in only.families:
        for mesh in only.meshes:
            for way in only.ways:
                planned, measured, _ = peaks(family, mesh, way)
                worst = max(worst, abs(planned / measured - 1))
                print(
                    f"{family:10} {mesh:8} {way:8} {planned:12,} {measured:12,} {planned / measured:6.3f}", flush=True
                )
    print(f"worst: {worst:.1%}")


if __name__ == "__main__":
    main()
