"""Random programs compute on random meshes what they compute on one device, or are refused before anything runs.

`tests.programs` draws them, `tests.campaign` runs and compares them. A failure prints a script that shows it.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.campaign import broken_promise, outcome, smallest
from tests.programs import Input, Program, draw

_REFUSALS = (
    "program has contradictory annotations",  # two annotations of one value, with no op between them
    "a strided view cannot be traced",
)


def _check(p: Program) -> str:
    found = outcome(p)
    if found.failed:
        small = smallest(p, found)
        pytest.fail(f"{found.kind}: {found.detail}\n{small.script}\n# {outcome(small).detail}", pytrace=False)
    if found.kind == "refused":
        assert found.detail.startswith(_REFUSALS), f"{p.script}\n# {found.detail}"
    return found.kind


def _options(**more: Any) -> settings:
    """The same programs in every run; `smallest` shrinks them, which is faster than to draw them again."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        **more,
    )


@_options(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_small_programs(rng: random.Random) -> None:
    """hypothesis's own idea of randomness: many small and repeated choices."""
    _check(draw(rng, rng.randint(1, 6)))


@pytest.mark.parametrize("block", range(8))
def test_programs(block: int) -> None:
    score = collections.Counter(_check(draw(random.Random(1000 * block + i))) for i in range(20))
    assert score["same"] >= 18, score


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_programs(block: int) -> None:
    score = collections.Counter(_check(draw(random.Random(100_000 + 1000 * block + i))) for i in range(200))
    assert score["same"] >= 190, score


# What the machine itself must notice ------------------------------------------------------------------------------------

_SIMPLE = Program(
    mesh=(("a", 2),),
    inputs=(Input("x0", (5, 4), spec="_@a _"), Input("x1", (4, 3)), Input("x2", (3,))),
    lines=("v0 = x0 @ x1", "v1 = v0 + x2", "v2 = v1.sum(0)", "v3 = v1 * 2"),
    outputs=("v2",),
    out_specs=(None,),
    grad=True,
)


def test_a_right_program_is_right() -> None:
    found = outcome(_SIMPLE)
    assert (found.kind, found.collectives > 0) == ("same", True)


def test_a_wrong_value_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardlib.ops import all_reduce
    from shardlib.run import virtual

    def first_wins(shards: list[Any], kind: str = "sum") -> list[Any]:
        return [shards[0]] * len(shards)

    monkeypatch.setattr(virtual, "_SHARED", virtual._SHARED | {"all_reduce": first_wins})
    found = outcome(_SIMPLE)
    assert found.kind == "wrong"
    assert all_reduce.reference is not first_wins
    small = smallest(_SIMPLE, found)
    assert len(small.lines) < len(_SIMPLE.lines)
    assert small.script.startswith("import torch")


def test_a_broken_promise_is_found() -> None:
    import shardlib as sl
    from tests.campaign import compiled

    mesh = sl.Mesh(dict(_SIMPLE.mesh))
    with mesh:
        step = sl.jit(compiled(_SIMPLE.function), in_specs=tuple(x.spec for x in _SIMPLE.inputs))
        promised = step.plan(*(x.make() for x in _SIMPLE.inputs)).compiled.program.collectives
    assert "ran [None]" in broken_promise(promised, [], mesh)
    assert broken_promise([], [("all_reduce", 2, 8)], mesh) == "more collectives ran than were planned"


def test_scripts_run() -> None:
    """What a failure prints is a program."""
    exec(compile(draw(random.Random(3), 4).script.replace("print(", "str("), "<script>", "exec"), {})
