"""The order in which a rank runs its program: dependencies, bundles, and the same on every rank."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh
from shardlib.lower.memory import local_bytes
from shardlib.lower.program import Collective, Instr, Program, Var, reads
from shardlib.meshes.axis import Axis
from shardlib.run import schedule as scheduling
from shardlib.run.schedule import Event, schedule
from shardlib.specs.layout import Layout
from tests.campaign import compiled
from tests.programs import draw

A, B = Axis("a", 2), Axis("b", 2)


@functools.cache
def programs() -> list[Program]:
    """Programs with many collectives, from the generator, and a deep one by hand."""
    found = []
    for seed in itertools.count():
        p = draw(random.Random(seed), 20)
        mesh = Mesh(dict(p.mesh))
        with mesh:
            step = sl.jit(compiled(p.function), in_specs=tuple(x.spec for x in p.inputs))
            try:
                program = step.plan(*(x.make() for x in p.inputs)).compiled.program
            except sl.ShardingError:
                continue
        if len(program.collectives) >= 6:
            found.append(program)
        if len(found) == 12:
            return found
    raise AssertionError


def steps(events: list[Event]) -> list[Any]:
    return [s for event in events for s in (event if isinstance(event, tuple) else (event,))]


@pytest.mark.parametrize("i", range(12))
def test_every_step_once_and_after_what_it_reads(i: int) -> None:
    program = programs()[i]
    events = schedule(program)
    assert Counter(map(id, steps(events))) == Counter(map(id, program.steps))
    known = {*program.inputs, *(v for v, _ in program.captured)}
    for event in events:
        members = event if isinstance(event, tuple) else (event,)
        for step in members:  # members of a bundle start together: none reads another's result
            assert known.issuperset(reads(step)), step
        known.update(out for step in members for out in step.outs if out is not None)


@pytest.mark.parametrize("i", range(12))
def test_bundles_are_of_one_kind_and_group(i: int) -> None:
    for event in schedule(programs()[i]):
        if isinstance(event, tuple):
            assert len({(c.kind, c.axes, c.reduce) for c in event}) == 1
            assert len(event) == 1 or event[0].kind in ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("i", range(12))
def test_deterministic(i: int) -> None:
    program = programs()[i]
    assert [list(map(id, steps([e]))) for e in schedule(program)] == [
        list(map(id, steps([e]))) for e in schedule(program)
    ]


# By hand --------------------------------------------------------------------------------------------------------------


class _Made:
    """A program written step by step."""

    def __init__(self) -> None:
        self.program = Program(Mesh(a=2, b=2))
        self.count = 0

    def var(self, n: int) -> Var:
        self.count += 1
        return Var(f"v{self.count}", Layout.replicated((n,)), torch.float32)

    def input(self, n: int = 8) -> Var:
        self.program.inputs.append(self.var(n))
        return self.program.inputs[-1]

    def op(self, *args: Var, n: int = 8, flops: float = 1.0) -> Var:
        out = self.var(n)
        self.program.steps.append(Instr(torch.ops.aten.add.Tensor, args, {}, (out,), flops=flops))
        return out

    def collective(self, kind: str, source: Var, axis: Axis = A, n: int = 8) -> Var:
        out = self.var(n)
        self.program.steps.append(Collective(kind, (axis,), source, out, {}, 4.0 * n))
        return out

    def order(self, *outputs: Var) -> list[str]:
        self.program.outputs += outputs
        return [
            f"{e[0].kind} {' '.join(c.out.name for c in e)}" if isinstance(e, tuple) else f"op {e.outs[0]!r}"
            for e in schedule(self.program)
        ]


def test_one_message_for_several() -> None:
    m = _Made()
    x, y = m.input(), m.input()
    p, q = m.op(x, y), m.op(y, x)
    r, s = m.collective("all_reduce", p), m.collective("all_reduce", q)
    assert m.order(r, s) == ["op %v3", "op %v4", "all_reduce v5 v6"]


@pytest.mark.parametrize("difference", ["kind", "axis", "reads"])
def test_what_does_not_go_together(difference: str) -> None:
    m = _Made()
    x, y = m.input(), m.input()
    p = m.op(x, y)
    r = m.collective("all_reduce", p)
    q = m.op(r, x) if difference == "reads" else m.op(y, x)
    s = m.collective("reduce_scatter" if difference == "kind" else "all_reduce", q, B if difference == "axis" else A)
    assert sum("v4" in line or "v6" in line for line in m.order(r, s) if not line.startswith("op")) == 2


def test_a_message_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MESSAGE_BYTES", 100)
    m = _Made()
    x, y = m.input(), m.input()
    outs = [m.collective("all_reduce", v) for v in [m.op(x, y) for _ in range(6)]]  # 32 bytes each
    m.program.outputs += outs
    bundles = [e for e in schedule(m.program) if isinstance(e, tuple)]
    assert [len(b) for b in bundles] == [3, 3]
    assert all(sum(local_bytes(c.out) for c in b) <= 100 for b in bundles)


def test_arithmetic_that_waits_for_nothing_comes_first() -> None:
    m = _Made()
    x, y = m.input(), m.input()
    r = m.collective("all_reduce", m.op(x, y))
    last = m.op(r, x)
    free = m.op(y, y, flops=1e9)
    lines = m.order(last, free)
    assert lines.index("op %v6") < lines.index("op %v5")


def test_a_gather_starts_before_it_is_read_and_not_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PREFETCH", 3)
    m = _Made()
    x, w = m.input(), m.input()
    for _ in range(10):
        x = m.op(x, x)
    g = m.collective("all_gather", w)
    lines = m.order(m.op(x, g))
    where = next(i for i, line in enumerate(lines) if line.startswith("all_gather"))
    assert 5 <= where <= 9
