"""Seconds until a model has made its first step: this library beside `torch.compile` and JAX.

    python -m tests.validation.benchmarks.first_call [NAME ...] [--meshes data4 data2_tensor2]
        [--peers aot_eager inductor jax]

Each model of `first_call_models` runs in fresh processes of one thread, this library and its peers in turns. The time
of this library's *call* is that of `sl.parallelize` (with `sl.suggest`, where the mesh has a tensor axis), the first
forward and the first backward; that of its *step* adds AdamW's, all of it one program of `sl.jit`. A peer compiles the
plain model, `torch.compile(model)`, and runs forward and backward, with a cache folder of its own. JAX's time is that
of trace, lower and compile, of models that exist there. What the first call imports counts (`torch._dynamo`, on both
sides), the import of this library and the model's construction do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import peers_jax
from .first_call_models import BY_NAME, CASES, W1, Case
from .timing import markdown

MESHES: dict[str, dict[str, int]] = {"data4": {"data": 4}, "data2_tensor2": {"data": 2, "tensor": 2}}
DOORS = ("call", "step")
PEERS = ("aot_eager", "inductor", "jax")
STAGES = ("trace", "normalize", "rules", "propagate", "lower", "passes", "codegen")


def cpu_seconds() -> float:
    """CPU seconds of this process and of the compilers that it has run."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def timed(run: Callable[[], object]) -> dict[str, Any]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    return {"cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - wall}


def loss_of(case: Case, model: nn.Module, inputs: Any) -> Tensor:
    return case.loss(model(**inputs) if isinstance(inputs, Mapping) else model(*inputs))


def measure_peer(case: Case, backend: str) -> dict[str, Any]:
    """The first forward and backward of `torch.compile(model)`."""
    model, inputs = case.build(), case.inputs()
    run = torch.compile(model, backend=backend, fullgraph=False)
    return timed(lambda: loss_of(case, run, inputs).backward())


def measure(case: Case, mesh_name: str, door: str) -> dict[str, Any]:
    """The first call or step of this library, with the seconds of its stages and the number of programs planned."""
    import shardlib as sl
    from shardlib.compiler.pipeline import Compiled
    from shardlib.jit.call import compile_call

    model, inputs = case.build(), case.inputs()
    mesh, planned, suggesting = sl.Mesh(**MESHES[mesh_name]), list[Compiled](), 0.0
    compile_program = compile_call.compile_program

    def counted(*args: Any, **options: Any) -> Compiled:
        planned.append(compile_program(*args, **options))
        return planned[-1]

    def place() -> None:
        nonlocal suggesting
        table, start = {}, cpu_seconds()
        if "tensor" in mesh.axes:
            args, options = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
            table = sl.suggest(model, mesh, *args, **options)
            planned.clear()
            suggesting = cpu_seconds() - start
        sl.parallelize(model, table, strategy="fsdp")

    def step(model: nn.Module, opt: torch.optim.Optimizer, inputs: Any) -> Tensor:
        loss = loss_of(case, model, inputs)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def run() -> None:
        place()
        if door == "step":
            sl.jit(step)(model, torch.optim.AdamW(model.parameters()), inputs)
        else:
            loss_of(case, model, inputs).backward()

    compile_call.compile_program = counted
    with mesh:
        measured = timed(run)
        stages = Counter[str]()
        for compiled in planned:
            stages.update(compiled.seconds)
        stages["codegen"] = sum(map(generation_seconds, planned[-1:]))
    ops = len(planned[-1].graph.ops) if planned else 0
    return measured | {"suggest": suggesting, "stages": stages, "programs": len(planned), "ops": ops}


def generation_seconds(compiled: Any) -> float:
    """Seconds to write and compile the Python of a program, which the call has done already."""
    from shardlib.compiler.codegen import load
    from shardlib.compiler.plan.plan import Plan

    halves = compiled.halves
    programs = [compiled.program] if halves is None else [halves.forward, halves.backward]
    start = time.perf_counter()
    for program in programs:
        load(program, compiled.mesh, Plan(compiled))
    return time.perf_counter() - start


def launch(case: str, run: str, limit: float) -> dict[str, Any]:
    """Measure one run of a model in a process of its own: `RUN` is a backend, or a mesh and a door."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.validation.benchmarks.first_call", case, "--one", run]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started, too
            process.communicate()
            return {"error": f"over {limit:.0f} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    reasons = [line for line in error.splitlines() if "Error" in line] or error.splitlines() or ["no output"]
    return {"error": f"exit {process.returncode}: {reasons[-1]}"}


def launch_jax(mode: str, limit: float) -> dict[str, Any]:
    try:
        measured = peers_jax.launch(mode, W1.layers, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"over {limit:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": f"exit {error.returncode}"}
    return {"cpu": measured["cpu"], "wall": measured["trace"] + measured["lower"] + measured["compile"]}


def runs_of(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The runs of a model in their order: this library and a peer in turns."""
    ours = [f"{mesh}.{door}" for mesh in options.meshes for door in options.doors]
    peers: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (peer, partial(launch, case.name, peer, options.limit)) for peer in options.peers if peer != "jax"
    ]
    if case.w1_modes and "jax" in options.peers and importlib.util.find_spec("jax"):
        modes = zip(MESHES, case.w1_modes, strict=True)
        peers += [(f"jax.{mesh}", partial(launch_jax, mode, options.limit)) for mesh, mode in modes]
    for at in range(max(len(ours), len(peers))):
        if at < len(ours):
            yield ours[at], partial(launch, case.name, ours[at], options.limit)
        if at < len(peers):
            yield peers[at]


def row_of(case: Case, mesh: str, door: str, results: Mapping[str, Any]) -> tuple[list[str], dict[str, float]]:
    """A line of the table, and the ratios in it by peer."""
    ours = results[f"{mesh}.{door}"]
    if "error" in ours:
        return [case.name, mesh, door, ours["error"]], {}
    line = [case.name, mesh, door, f"{ours['cpu']:.1f} ({ours['wall']:.1f})"]
    ratios = {}
    for peer in PEERS:
        theirs = results.get(f"jax.{mesh}" if peer == "jax" else peer)
        if theirs is None or "error" in theirs:
            line.append("-" if theirs is None else theirs["error"])
            continue
        ratios[peer] = ours["cpu"] / theirs["cpu"]
        line.append(f"{theirs['cpu']:.1f} ({theirs['wall']:.1f}), {ratios[peer]:.2f}x")
    stages = [f"{stage} {ours['stages'][stage]:.1f}" for stage in STAGES if stage in ours["stages"]]
    suggested = [f"suggest {ours['suggest']:.1f}"] if ours["suggest"] else []
    return [*line, str(ours["ops"]), str(ours["programs"]), ", ".join(suggested + stages)], ratios


def report(options: argparse.Namespace) -> None:
    rows, every = [], list[tuple[str, dict[str, float]]]()
    for case in map(BY_NAME.__getitem__, options.names or BY_NAME):
        if importlib.util.find_spec(case.needs) is None:
            print(f"{case.name}: skipped, {case.needs} is not installed", flush=True)
            continue
        results = {}
        for name, run in runs_of(case, options):
            results[name] = run()
            figures = results[name].get("error") or f"{results[name]['cpu']:.1f} s of CPU time"
            print(f"{case.name}: {name}: {figures}", flush=True)
        for mesh in options.meshes:
            for door in options.doors:
                line, ratios = row_of(case, mesh, door, results)
                rows.append(line + [""] * (len(HEADER) - len(line)))
                every.append((door, ratios))
    print("\n" + markdown("The first call in a fresh process: seconds of CPU time (of wall time)", HEADER, rows))
    for door in options.doors:
        for peer in PEERS:
            peer_ratios = [ratios[peer] for name, ratios in every if name == door and peer in ratios]
            if peer_ratios:
                median, count = statistics.median(peer_ratios), len(peer_ratios)
                print(f"median of {door} against {peer}: {median:.2f}x ({count} rows, at most {max(peer_ratios):.2f}x)")


HEADER = ("model", "mesh", "what", "shardlib", *PEERS, "ops", "programs", "stages, wall seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds until a model has made its first step, beside torch.compile")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(case.name for case in CASES))
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a run is killed")
    parser.add_argument("--one", help="measure a backend, or MESH.DOOR, in this process, and print JSON")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BY_NAME]:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    if options.one is None:
        report(options)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (case,), (run, _, door) = map(BY_NAME.__getitem__, options.names), options.one.partition(".")
    print(json.dumps(measure(case, run, door) if run in MESHES else measure_peer(case, run)))


if __name__ == "__main__":
    main()
