"""Plans do not depend on the order of what is said, nor on the process; and not on a small change of a size."""

from __future__ import annotations

import base64
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, P
from shardlib.compiler.plan.plan import Plan
from shardlib.sharding.mesh.axis import Axis
from tests.models import w1
from tests.validation.shardy import oracle
from tests.validation.shardy.programs import Program, draw

SEEDS = [s for s in range(40) if math.prod(draw(s, conflicts=True).mesh.values()) <= 8]


def planned(p: Program, order: Sequence[str]) -> Plan:
    """The plan with arguments, and their specs, in this order."""
    namespace: dict[str, Any] = {"torch": torch, "shard": sl.shard, "P": P}
    exec(p.torch, namespace)
    said = {v.name: (torch.empty(p.shape(v), device="meta"), at) for v, at in p.inputs}
    specs = {name: None if at is None else P(*(axes or None for axes in at)) for name, (_, at) in said.items()}
    with Mesh.abstract(p.mesh):
        step = sl.jit(lambda xs: namespace["program"](**xs), in_specs=({name: specs[name] for name in order},))
        return step.plan({name: said[name][0] for name in order})


def told(p: Program, order: Sequence[str]) -> object:
    plan = planned(p, order)
    outputs = [str(out.layout) for out in plan.compiled.program.outputs]
    inputs = {v.name: str(plan.layout_of(f"xs['{v.name}']")) for v, _ in p.inputs}
    return plan.comm_bytes, plan.compiled.propagated.search.seconds, outputs, inputs


def digest(seeds: Sequence[int]) -> str:
    """All that is decided for some programs, as text."""
    programs = [draw(seed, conflicts=True) for seed in seeds]
    return "\n".join(str(told(p, [v.name for v, _ in p.inputs])) for p in programs)


@pytest.mark.sampled(29)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_arguments_does_not_matter(seed: int) -> None:
    p = draw(seed, conflicts=True)
    names = [v.name for v, _ in p.inputs]
    shuffled = list(names)
    random.Random(seed).shuffle(shuffled)
    assert told(p, names) == told(p, shuffled) == told(p, names[::-1])


@pytest.mark.long
@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_the_order_of_a_process_does_not_matter(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's sets have another order in every process, and texts another hash: ranks plan on their own."""
    axis = base64.b64encode(pickle.dumps(Axis("x", 2, pre=2, axis_size=4))).decode()
    program = f"from tests.compiler.plan.test_stable_plans import told_here; told_here({axis!r}, {count})"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    other = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
    )
    told_here(axis, count)
    first, second = capsys.readouterr().out, other.communicate(timeout=300)[0]
    assert first == second
    assert first.endswith("the axis is a key\n")


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for one in w:
        x = torch.layer_norm(torch.tanh(x @ one), (8,)) + x
    return x.square().mean()


def told_here(axis: str, count: int) -> None:
    """Print what is planned in this process, and whether an axis of another one is a key like one that is made here."""
    print(digest(SEEDS[:count]))
    config = w1.Config(layers=1, batch=8, seq=16)
    mode = w1.modes(config)["tp_sp"]
    with sl.Mesh.abstract(**mode.axes, rules=dict(mode.rules)):
        step = sl.jit(
            lambda *a: w1.step(*a, config, lambda x: sl.shard(x, mode.residual)),
            in_specs=(mode.params, mode.batch, mode.batch),
        )
        print(step.plan(*w1.abstract(config)).full)
    with sl.Mesh.abstract(data=2):
        args = torch.empty(512, 8, device="meta"), torch.empty(4, 8, 8, device="meta")
        most = sl.jit(sl.grad(deep, argnums=1), in_specs=("b@data _", None)).plan(*args).peak_memory
        print(sl.jit(sl.grad(deep, argnums=1), in_specs=("b@data _", None), memory=int(0.7 * most)).plan(*args).full)
    other = pickle.loads(base64.b64decode(axis))
    if other in {Axis("x", 2, pre=2, axis_size=4)}:
        print("the axis is a key")


# --- sizes ------------------------------------------------------------------------------------------------------------


def sweep(seed: int) -> list[tuple[Program, Plan]]:
    """A program with its largest atom 2 % shorter to 2 % longer."""
    p = draw(seed, conflicts=True)
    used = {a for v, _ in p.inputs for a in v.atoms}
    atom = max(used, key=lambda a: (p.sizes[a], a))
    step = math.prod(p.mesh.values())
    sizes = range(p.sizes[atom] - p.sizes[atom] // 50 // step * step, p.sizes[atom] * 51 // 50 + 1, step)
    some = [replace(p, sizes={**p.sizes, atom: n}) for n in list(sizes)[:: max(1, len(sizes) // 6)]]
    return [(q, oracle.plan(q)) for q in some]


def cuts(p: Program, plan: Plan) -> list[str]:
    outs = [oracle.layout_text(out.layout) for out in plan.compiled.program.outputs]
    return [*outs, *(oracle.layout_text(plan.layout_of(v.name)) for v, _ in p.inputs)]


@pytest.mark.long
@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 8, 10, 12])
def test_a_small_change_of_a_size_changes_nothing(seed: int) -> None:
    found = [cuts(p, plan) for p, plan in sweep(seed)]
    assert len(found) > 5
    assert all(cut == found[0] for cut in found)


def _turns(n: int) -> Plan:
    """x is gathered while it is the smaller one, w is where x is larger."""
    with Mesh.abstract(data=2):
        step = sl.jit(lambda x, w: (x @ w).sum(), in_specs=("m@data _", "_ n@data"))
        return step.plan(torch.empty(n, 64, device="meta"), torch.empty(64, 1024, device="meta"))


def test_where_a_plan_turns_it_says_so() -> None:
    texts = {n: _turns(n).explain(0) for n in (512, 1000, 1048, 2048)}
    assert "a near-tie with" in texts[1000]
    assert "a near-tie with" in texts[1048]
    assert "a near-tie with" not in texts[512] + texts[2048]
