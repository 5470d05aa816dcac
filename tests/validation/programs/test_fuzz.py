"""Random programs compute on random meshes what they compute on one device, or are refused before anything runs.

`tests.validation.programs` draws them, `tests.validation.programs.campaign` runs and compares them. A failure prints a
script that shows it.
"""

from __future__ import annotations

import collections
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardlib.compiler.program import steps
from tests.validation.programs import Input, Program, draw, record
from tests.validation.programs.campaign import as_if_large, broken_promise, outcome, smallest

pytestmark = pytest.mark.usefixtures("strict")

_REFUSALS = ("a strided view cannot be traced",)


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


@pytest.mark.long
@pytest.mark.parametrize("count", [6, pytest.param(25, marks=pytest.mark.slow)])
def test_small_programs(count: int) -> None:
    """hypothesis's own idea of randomness: many small and repeated choices."""

    @_options(max_examples=count)
    @given(st.randoms(use_true_random=False))
    def check(rng: random.Random) -> None:
        _check(draw(rng, rng.randint(1, 6)))

    check()


def _blocks(n: int) -> list[Any]:
    """First seeds of ten programs each; `make test` runs the first two of the first ten."""
    every = [(1000 * (i // 2) + 10 * (i % 2), 10) for i in range(n)]
    return [(0, 2), *(pytest.param(*block, marks=pytest.mark.slow) for block in every)]


@pytest.mark.long
@pytest.mark.parametrize(("first", "count"), _blocks(26))
def test_programs(first: int, count: int) -> None:
    score = collections.Counter(_check(draw(random.Random(first + i))) for i in range(count))
    assert score["same"] >= 0.9 * count, score


@pytest.mark.long
@pytest.mark.parametrize(("first", "count"), _blocks(8))
def test_programs_as_if_tensors_were_large(first: int, count: int) -> None:
    with as_if_large():
        score = collections.Counter(_check(draw(random.Random(50_000 + first + i))) for i in range(count))
    assert score["same"] >= 0.9 * count, score


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_programs(block: int) -> None:
    score = collections.Counter(_check(draw(random.Random(100_000 + 1000 * block + i))) for i in range(200))
    assert score["same"] >= 190, score


# What was found -------------------------------------------------------------------------------------------------------


def _program(mesh: str, inputs: str, lines: str, out: str | None = None, *, grad: bool = False) -> Program:
    """`x0 5,4 _@a _; i1 3<5` are inputs (name, shape, below, spec), `v0 = ...; v1 = ...` lines; the last returned."""
    made = []
    for text in inputs.split("; "):
        name, shape, spec = (text.split(" ", 2) + [""])[:3]
        dims, _, high = shape.partition("<")
        made.append(Input(name, tuple(map(int, dims.split(","))), int(high or 0), spec or None))
    axes = tuple((axis[0], int(axis[1:])) for axis in mesh.split())
    body = tuple(lines.split("; "))
    last = [line for line in body if " = " in line][-1]
    return Program(axes, tuple(made), body, (last.split(" = ")[0],), (out,), grad)


@pytest.mark.parametrize(
    "p",
    [
        # 5 over 4 devices is 2 2 1 0, cut by parts of the axis one after the other it would be 2 1 1 1.
        _program("a4", "x0 5,6,5 _@a _ _", "v0 = x0.unflatten(0, (1, 5))"),
        _program("a4", "x0 10,8 _@a _; x1 8,8", "v0 = x0 @ x1", grad=True),
        # A part of an axis is made of its primes: 3 of 6 is the minor part.
        _program("a2 b6", "x0 5,6,5 _ _@a _@b", "v0 = shard(x0 * 1.5, '_? _@(a b)? _')", "_@a? (_=2@b _=3) _?"),
        # (2@a' 3@a'') is not 6@a.
        _program("a8", "x0 6,6 _ (_=2@a _=3); x1 6 _?", "v0 = x0.masked_fill(x1 > 0, 0.25)", "(_=2 _=3@a) _"),
        # An uneven minor leaf does not move together with the major one.
        _program(
            "a2 c2",
            "x0 2,5,5,2 _ _@a _@(c) _; x1 5,5; x2 2,1,5,2 _@(c) _@a _ _",
            "v0 = F.scaled_dot_product_attention(x0, x2, x2, attn_mask=x1, enable_gqa=True)",
            grad=True,
        ),
        # Annotations of one dim by factors that have no cut in common.
        _program("a2", "x0 10,10 _ (_=5 _=2)", "v0 = x0 * 1.5; v1 = shard(v0, '_ _@a')", "_ (_=5@a _=2)"),
        # Sums that meet in an addition, of which one is seen through a view with other leaves.
        _program(
            "b2",
            "x0 6,8,6",
            "v0 = x0.unsqueeze(-1) * x0.unsqueeze(-2); v1 = torch.stack([v0, v0], 3); v2 = v1.sum(3); "
            "v3 = v2.unsqueeze(4); v4 = v3.flatten(3, 4)",
            "_ _ _@b (_=3 _=2)?",
            grad=True,
        ),
        _program(
            "a2 b2",
            "x0 12,10,10",
            "v0 = shard(x0[:, :5], '_@(a b) _? _'); v1 = v0 @ v0.transpose(-1, -2); "
            "v2 = shard(v1, '(_=2@a _=6@b) _? _')",
            grad=True,
        ),
        # 7 over (2 3) is 2 2 0 1 1 1: not the last device is the empty one.
        _program("a2 b3", "x0 6,7 _ _@(a b)", "v0 = x0.amax(-1, keepdim=True)"),
        # 8 as (4 2), of which the 4 is cut over 3: 2 2 0 of 4, and so of 8.
        _program("a3", "x0 4,2 _@a _; x1 2,8", "v0 = x1 + x0.flatten(); v1 = v0.amax(1)"),
        # Two factors are reduced, one of them is cut.
        _program("a2", "x0 4,6 _@a _", "v0 = x0.logsumexp((0, 1))"),
        # Keys whose rows are not dense, and writes to slices.
        _program(
            "a2", "x0 4,2,6 _@a _ _",
            "v0 = x0.unsqueeze(3).expand([-1, -1, -1, 2]); v1 = F.scaled_dot_product_attention(v0, v0, v0)",
        ),
        _program("a2", "x0 10,10 _@a _", "v0 = x0 * 1.5; v0[8:] *= 2", grad=True),
        _program("a2", "x0 5,4,3 _@a _ _", "v0 = x0 * 1.5; v0[8:] *= 2", grad=True),
        # The gradient of x + x.mT adds a value to a view of itself, which must not happen in place.
        _program("z1", "x0 5,5,5", "v0 = x0 + x0.transpose(-1, -2)", grad=True),
        _program("a2", "x0 4,6 _ _@a; i1 3<6", "v0 = x0[:, i1]", grad=True),
        # What is written to has the strides of a transpose.
        _program("a2", "x0 8,10 _@a _", "v0 = x0.mT[:, ::2] * 1.5; v0[:, 0:] *= 2", grad=True),
        # A sum passes tril only while the rows and columns that a device holds are ranges.
        _program("a2 b2", "x0 12,12 _ _@a; x1 12,12 _@a (_=6 _=2@b)", "v0 = (x0 @ x1).tril()"),
        # (6 2) cut by (2 3 2) may not be permuted to (2 2 3).
        _program(
            "a2 b6",
            "x0 12,12,12; x1 12,5 _@(a b) _; x2 5,12 _@b (_=6@a _=2); x3 12,5 (_=6@b _=2@a) _",
            "v0 = x0 + torch.tanh(x0 @ x1 / 12) @ x2 / 5; v1 = F.silu(v0 @ x3 / 12)",
            grad=True,
        ),
        # An exchange whose sizes differ between devices that hold the same.
        _program(
            "a2 b2", "x0 10,1; x1 10,10 _@a _; x2 1,10",
            "v0 = x1.expand([10, -1, -1]); v1 = v0 + torch.tanh(v0 @ x0 / 10) @ x2", "_@(b a) _ _",
        ),
        # Pieces that go to other devices, where an axis stays second and the ones around it have other sizes.
        _program(
            "a3 b2 c2", "x0 12,6,6,12 _@(c b) (_=2@a _=3) _ _; x1 4,3,3,2",
            "v0 = F.conv2d(x0, x1, None, stride=1, padding=1, groups=2, dilation=1)", "_@(a b) _ _@c _?",
        ),
        # Kernels that want dense memory, and get a view.
        _program("z1", "x0 1", "v0 = x0.repeat_interleave(2, 0); v1 = v0.median(0).values"),
        _program("z1", "x0 8,12; x1 12", "v0 = x0.unfold(-2, 4, 1); v1 = F.group_norm(v0, 1, weight=x1)", grad=True),
    ],
    ids=lambda p: "; ".join(p.lines)[:60],
)  # fmt: skip
def test_found(p: Program) -> None:
    assert _check(p) == "same"


# What the machine itself must notice ----------------------------------------------------------------------------------

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


@pytest.mark.long
def test_a_wrong_value_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardlib.compiler.codegen import virtual
    from shardlib.ops.collectives import all_reduce

    def first_wins(shards: list[Any], kind: str = "sum") -> list[Any]:
        return [shards[0]] * len(shards)

    monkeypatch.setattr(virtual, "_SHARED", virtual._SHARED | {"all_reduce": first_wins})
    found = outcome(_SIMPLE)
    assert found.kind == "wrong"
    assert all_reduce.reference is not first_wins
    small = smallest(_SIMPLE, found)
    assert len(small.lines) < len(_SIMPLE.lines)
    assert small.script.startswith("import torch")


def test_a_program_that_writes_to_its_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    p = replace(_SIMPLE, lines=("v0 = torch.unsafe_chunk(x0, 2, 1)[0] + 1",), outputs=("v0",), grad=False)
    assert outcome(p).kind == "same"
    monkeypatch.setattr(steps, "is_view", lambda target: False)
    found = outcome(p)
    assert (found.kind, found.detail) == ("wrong", "the call wrote to input 0")


def test_a_broken_promise_is_found() -> None:
    import shardlib as sl
    from tests.validation.programs.campaign import compiled

    mesh = sl.Mesh(dict(_SIMPLE.mesh))
    with mesh:
        step = sl.jit(compiled(_SIMPLE.function), in_specs=tuple(x.spec for x in _SIMPLE.inputs))
        promised = step.plan(*(x.make() for x in _SIMPLE.inputs)).compiled.program.collectives
    assert "ran [None]" in broken_promise(promised, [], mesh)
    assert broken_promise([], [("all_reduce", 2, 8)], mesh) == "more collectives ran than were planned"


@pytest.mark.long
def test_a_campaign_is_recorded_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fuzz.jsonl"
    for examples, ran in ((1, 1), (2, 1), (2, 0)):
        with mock.patch("sys.argv", ["programs", "--first", "7", "--examples", str(examples), "--out", str(out)]):
            record.main()
        assert f"s for {ran} programs" in capsys.readouterr().out
    with out.open("a") as file:
        file.write('{"seed": 99, "kin')  # cut off
    assert sorted(record.read(out)) == [7, 8]


def test_the_score_names_every_failure() -> None:
    lines = [
        record.Line(1, "same", lines=3, collectives=2),
        record.Line(2, "wrong", "leaf 0", 4, script="import torch"),
    ]
    text = "\n".join(record.summary([*lines, record.Line(3, "timeout", "not done after 1 s")]))
    assert "| 3 | 7 | 2 | 1 | 0 | 0 | 1 | 1 |" in text
    assert "Seed 2, wrong: leaf 0\n\n```python\nimport torch" in text
    assert "Seed 3, timeout: not done after 1 s" in text


def test_scripts_run() -> None:
    """What a failure prints is a program."""
    exec(compile(draw(random.Random(3), 4).script.replace("print(", "str("), "<script>", "exec"), {})
