"""What ranks hold in memory, step by step, is what the plan says: `alive` of the program against their storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import shardlib as sl
from shardlib.compiler.codegen.codegen import Generator
from shardlib.compiler.program.buffers import alive
from shardlib.compiler.program.steps import Free, Program, Start, Step, Wait
from shardlib.compiler.program.text import show_step
from tests.helpers.ranks import run_ranks
from tests.models import w1, w1_sharded, zoo
from tests.validation.fakecuda.programs import model_step

TINY = w1.Config(layers=1, d=32, heads=4, kv_heads=4, ff=64, vocab=64, batch=8, seq=16)


@contextmanager
def measured(found: list[tuple[Program, dict[int, int]]]) -> Iterator[None]:
    """Every program that is made ready inside notes the bytes of all storages that it holds behind each step."""
    step, generate = Generator._step, Generator.generate

    def look(rows: dict[int, int]) -> Callable[[int, dict[str, Any]], None]:
        def note(at: int, names: dict[str, Any]) -> None:
            tensors = [x for name, x in names.items() if name not in ("pieces", "leaves")]
            storages = [x.untyped_storage() for x in (*tensors, *_flat(names["pieces"])) if isinstance(x, torch.Tensor)]
            rows[at] = sum({s._cdata: s.nbytes() for s in storages}.values())

        return note

    def looked(g: Generator, one: Step) -> None:
        if not isinstance(one, Free):  # which frees a value at a time
            g.lines.append(f"look({g.program.steps.index(one)}, globals() | locals())")

    def one_step(g: Generator, one: Step, coords: Any) -> None:
        step(g, one, coords)
        looked(g, one)

    def all_steps(g: Generator, communicate: Any) -> Any:
        found.append((g.program, {}))
        g.namespace["look"] = look(found[-1][1])
        return generate(g, lambda g, start: (communicate(g, start), looked(g, start)))

    with mock.patch.object(Generator, "_step", one_step), mock.patch.object(Generator, "generate", all_steps):
        yield


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, list | tuple):
        for y in x:
            yield from _flat(y)
    else:
        yield x


def differences(program: Program, real: dict[int, int]) -> list[str]:
    """The steps at which ranks hold something else than the program says; results in flight are out of sight."""
    wrong, flying = [], 0
    for i, (step, said) in enumerate(zip(program.steps, alive(program), strict=True)):
        if isinstance(step, Start | Wait):
            sign = 1 if isinstance(step, Start) else -1
            flying += sign * sum(v.nbytes for v in step.outs)
        if i in real and real[i] + flying != said:
            wrong.append(f"{real[i] + flying:,} bytes, not {said:,}, at {show_step(step)}")
    return wrong


def trained(name: str, parts: int = 1) -> tuple[list[str], int, bool]:
    """On ranks: what differs in a step of W1, how many steps were looked at, whether the plan says the same peak."""
    mode = w1.modes(TINY, 4)[name]
    found: list[tuple[Program, dict[int, int]]] = []
    with w1_sharded.mesh_of(mode), measured(found):
        args = w1_sharded.place(mode, w1.init(TINY), *w1.batch(TINY))
        step = w1_sharded.sharded_step(mode, TINY, schedule=sl.Schedule(parts=parts))
        plan = step.plan(*args)
        step(*args)
    program, real = max(found, key=lambda one: len(one[1]))
    return differences(program, real), len(real), plan.peak_memory == max(alive(program))


@pytest.mark.long
@pytest.mark.sampled(5, first=4)
@pytest.mark.ranks
@pytest.mark.parametrize("name", w1.modes(TINY, 4))
def test_w1_on_ranks_holds_what_its_plan_says(name: str) -> None:
    for wrong, looked, same_peak in run_ranks(trained, 4, name):
        assert wrong == []
        assert looked > 150
        assert same_peak


@pytest.mark.long
@pytest.mark.ranks
def test_rows_in_parts_hold_what_their_plan_says() -> None:
    for wrong, looked, same_peak in run_ranks(trained, 4, "fsdp_tp", 2):
        assert wrong == []
        assert looked > 250
        assert same_peak


def stepped(name: str) -> tuple[list[str], int, bool]:
    """The same of a step of a model of transformers."""
    from tests.models import gpt2, llama

    if name in zoo.FAMILIES:
        lm, rules, vocab = zoo.build(name), zoo.RULES, zoo.VOCAB
    else:
        module = {"gpt2": gpt2, "llama": llama}[name]
        lm, rules, vocab = module.build(layers=1, d=32, seq=16, vocab=64), module.RULES, 64
    tokens = torch.randint(2, vocab, (8, 16), generator=torch.Generator().manual_seed(0))
    found: list[tuple[Program, dict[int, int]]] = []
    rules = {n: axis for n, axis in rules.items() if axis in ("data", "tensor")}
    with sl.Mesh(data=2, tensor=2, rules=rules), measured(found):
        step = sl.jit(model_step(lm), in_specs=(lm.specs(), "batch seq"), out_specs=(None, lm.specs()))
        params = {name: sl.shard(p, lm.specs()[name]) for name, p in lm.params().items()}
        args = params, sl.shard(tokens, "batch seq")
        plan = step.plan(*args)
        step(*args)
    program, real = max(found, key=lambda one: len(one[1]))
    return differences(program, real), len(real), plan.peak_memory == max(alive(program))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpt2", "llama", *sorted(zoo.FAMILIES)])
def test_models_on_ranks_hold_what_their_plans_say(name: str) -> None:
    for wrong, looked, same_peak in run_ranks(stepped, 4, name):
        assert wrong == []
        assert looked > 100
        assert same_peak


def kept_too_long() -> int:
    """A program whose values are never given back, where the plan says that they are."""
    found: list[tuple[Program, dict[int, int]]] = []
    held = lambda g, step, coords: None if isinstance(step, Free) else plain(g, step, coords)
    plain = Generator._step
    with sl.Mesh(x=2), mock.patch.object(Generator, "_step", held), measured(found):
        sl.jit(lambda x: x.exp().sum(0).square() * 2, in_specs=("a b@x",))(torch.ones(4, 4))
    return sum(len(differences(*one)) for one in found)


@pytest.mark.long
@pytest.mark.ranks
def test_what_is_kept_too_long_is_seen() -> None:
    assert all(run_ranks(kept_too_long, 2))
