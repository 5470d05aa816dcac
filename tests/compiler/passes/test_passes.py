"""Passes: what each makes of a program that is written down, and what all of them leave of generated programs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.passes import PASSES, fuse_alpha, run_passes
from shardlib.compiler.passes.comm import bucket_collectives, hide_messages
from shardlib.compiler.passes.memory import free, reuse_buffers, update_in_place
from shardlib.compiler.program.buffers import alive, peak_bytes
from shardlib.compiler.program.check_order import ProgramError, check
from shardlib.compiler.program.steps import Compute, Program, reads
from shardlib.compiler.program.text import parse, show
from tests.validation.programs import draw
from tests.validation.programs.campaign import compiled

Pass = Callable[[Program], Program]


def by(one: Pass, text: str) -> list[str]:
    """What a pass makes of the steps of a program."""
    found = show(check(one(check(parse(f"mesh a=2, b=2\n{text}"))))).splitlines()
    return [line for line in found if not line.startswith(("mesh", "input", "captured"))]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


# fuse -----------------------------------------------------------------------------------------------------------------

STEP = """
    input p: f32[8]
    input g: f32[8]
    d: f32[8] = aten.mul.Tensor(g, $0)
    q: f32[8] = aten.sub.Tensor(p, d)
    return q
"""


def test_a_scaled_sum_is_one_call() -> None:
    assert by(fuse_alpha.fuse, STEP) == ["q: f32[8] = aten.sub.Tensor(p, g, alpha=$0)", "return q"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return q", "return q, d"),
        ("(p, d)", "(d, p)"),
        ("(p, d)", "(d, d)"),
        ("(p, d)", "(p, d, alpha=2)"),
        ("(g, $0)", "(g, p)"),
        ("(g, $0)", "(g, True)"),
        ("f32", "i64"),
    ],
)
def test_what_is_not_fused(old: str, new: str) -> None:
    text = STEP.replace(old, new)
    assert by(fuse_alpha.fuse, text) == lines(text)[2:]


# bundle ---------------------------------------------------------------------------------------------------------------


TWO_SUMS = """
    input x: f32[8@a]
    input y: f32[8@a]
    p: f32[+a] = aten.sum.default(x)
    start all_reduce[a] s: f32[] = p {} 4 B
    wait s
    q: f32[+a] = aten.sum.default(y)
    start all_reduce[a] t: f32[] = q {} 4 B
    wait t
"""


def test_one_message_for_several_and_a_wait_where_one_is_read() -> None:
    text = f"""{TWO_SUMS}
        z: f32[8@a] = aten.mul.Tensor(x, y)
        r: f32[] = aten.add.Tensor(s, t)
        return r, z
    """
    assert by(bucket_collectives.bundle, text) == lines("""
        p: f32[+a] = aten.sum.default(x)
        q: f32[+a] = aten.sum.default(y)
        start all_reduce[a] s: f32[] = p {} 4 B | t: f32[] = q {} 4 B
        z: f32[8@a] = aten.mul.Tensor(x, y)
        wait s, t
        r: f32[] = aten.add.Tensor(s, t)
        return r, z
    """)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "q: f32[+a] = aten.sum.default(y)": "q: f32[max+a] = aten.amax.default(y)",
            "start all_reduce[a] t: f32[] = q {}": "start all_reduce[a] max t: f32[] = q {}",
        },
        {
            "input y: f32[8@a]": "input y: f32[8@(a b)]",
            "q: f32[+a] = aten.sum.default(y)": "q: f32[+(a b)] = aten.sum.default(y)",
            "start all_reduce[a] t: f32[]": "start all_reduce[b] t: f32[+a]",
        },
        {"q: f32[+a] = aten.sum.default(y)": "q: f32[+a] = aten.mul.Tensor(p, s)"},
    ],
    ids=["kind", "axes", "reads"],
)
def test_what_does_not_go_together(changes: dict[str, str]) -> None:
    text = f"{TWO_SUMS}return s, t"
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    found = by(bucket_collectives.bundle, text)
    assert sum(line.startswith("start") for line in found) == 2


def test_a_message_has_a_limit() -> None:
    steps = [
        f"p{i}: f32[8 +a] = aten.mul.Tensor(x, {i})\nstart all_reduce[a] s{i}: f32[8] = p{i} {{}} 32 B\nwait s{i}"
        for i in range(6)
    ]
    text = "\n".join(["input x: f32[8 +a]", *steps, "return s0, s1, s2, s3, s4, s5"])
    found = by(partial(bucket_collectives.bundle, how=sl.Schedule(bucket=100)), text)
    assert [line.count(" = ") for line in found if line.startswith("start")] == [3, 3]


WIDE = 1 << 17


@pytest.mark.parametrize(
    ("how", "starts"),
    [
        (sl.Schedule(prefetch=0), [0, 2, 4, 6]),  # each in front of its own reader
        (sl.Schedule(), [0, 0, 2, 4]),
        (sl.Schedule(prefetch=2), [0, 0, 0, 2]),
        (sl.Schedule(prefetch=9), [0, 0, 0, 0]),
        (
            sl.Schedule(prefetch=2, cap=8 * WIDE),
            [0, 0, 1, 3],
        ),  # two are held at once: the next starts where one was read
        (sl.Schedule(prefetch=2, cap=7 * WIDE), [0, 1, 3, 5]),
    ],
)
def test_weights_are_gathered_layers_ahead(how: sl.Schedule, starts: list[int]) -> None:
    """Four layers of one gather and two calls; the places of the starts are counted in calls before them."""
    text = "\n".join(
        [
            f"input x0: f32[{WIDE}]",
            *(f"input w{i}: f32[{WIDE}@a]" for i in range(4)),
            *(
                f"start all_gather[a] g{i}: f32[{WIDE}] = w{i} {{dim: 0, sizes: [65536, 65536]}} 16 B\nwait g{i}\n"
                f"y{i}: f32[{WIDE}] = aten.add.Tensor(x{i}, g{i})\nx{i + 1}: f32[{WIDE}] = aten.neg.default(y{i})"
                for i in range(4)
            ),
            "return x4",
        ]
    )
    found = by(partial(bucket_collectives.bundle, how=how), text)
    calls = itertools.accumulate((" = aten." in line for line in found), initial=0)
    places = dict(zip((line.split(" = ")[0] for line in found), calls, strict=False))
    assert [places[f"start all_gather[a] g{i}: f32[{WIDE}]"] for i in range(4)] == starts
    assert all(places[f"wait g{i}"] == 2 * i for i in range(4))


# schedule -------------------------------------------------------------------------------------------------------------


def test_arithmetic_that_waits_for_nothing_comes_first() -> None:
    text = """
        input x: f32[8, 8 +a]
        input y: f32[8, 8]
        start all_reduce[a] s: f32[8, 8] = x {} 256 B
        wait s
        r: f32[8, 8] = aten.mm.default(s, y)  ; 1024.0 flop
        n: f32[8, 8] = aten.neg.default(y)
        z: f32[8, 8] = aten.mm.default(y, y)  ; 1024.0 flop
        m: f32[8, 8] = aten.mm.default(n, y)  ; 1024.0 flop
        return r, z, m
    """
    assert by(hide_messages.schedule, text) == lines("""
        start all_reduce[a] s: f32[8, 8] = x {} 256 B
        n: f32[8, 8] = aten.neg.default(y)
        z: f32[8, 8] = aten.mm.default(y, y)  ; 1024.0 flop
        m: f32[8, 8] = aten.mm.default(n, y)  ; 1024.0 flop
        wait s
        r: f32[8, 8] = aten.mm.default(s, y)  ; 1024.0 flop
        return r, z, m
    """)


LED = """
    input x: f32[8, 8 +a]
    input y: f32[8, 8]
    input u: f32[8, 16@{over}]
    input v: f32[16@{over}, 8]
    n: f32[8, 8 +a] = aten.neg.default(x)
    z: f32[8, 8 +{over}] = aten.mm.default(u, v)  ; 1024.0 flop
    start all_reduce[{over}] t: f32[8, 8] = z {{}} 256 B
    start all_reduce[a] s: f32[8, 8] = n {{}} 256 B
    wait s
    r: f32[8, 8] = aten.mm.default(s, y)  ; 1024.0 flop
    wait t
    return r, t
"""


def test_what_does_not_lead_to_a_message_goes_behind_its_start() -> None:
    """With a message of another group that it leads to itself."""
    assert by(hide_messages.schedule, LED.format(over="b"))[:5] == lines("""
        n: f32[8, 8 +a] = aten.neg.default(x)
        start all_reduce[a] s: f32[8, 8] = n {} 256 B
        z: f32[8, 8 +b] = aten.mm.default(u, v)  ; 1024.0 flop
        start all_reduce[b] t: f32[8, 8] = z {} 256 B
        wait s
    """)


def test_no_message_passes_another_of_its_group() -> None:
    found = by(hide_messages.schedule, LED.format(over="a"))
    assert [line.split()[2] for line in found if line.startswith("start")] == ["t:", "s:"]


def test_a_reader_that_nobody_waits_for_is_late() -> None:
    """A gradient's cast waits for its sum, and nothing waits for the cast."""
    text = """
        input x: f32[8, 8 +a]
        input y: f32[8, 16@b]
        input u: f32[8, 16@b]
        start all_reduce[a] s: f32[8, 8] = x {} 256 B
        wait s
        c: f64[8, 8] = aten._to_copy.default(s, dtype=torch.float64)
        v: f32[16@b, 8] = aten.permute.default(y, [1, 0])
        z: f32[8, 8 +b] = aten.mm.default(u, v)  ; 1024.0 flop
        start all_reduce[b] t: f32[8, 8] = z {} 256 B
        wait t
        r: f32[8, 8] = aten.neg.default(t)
        return r, c
    """
    found = by(hide_messages.schedule, text)
    assert found.index("wait s") > next(i for i, line in enumerate(found) if line.startswith("start all_reduce[b]"))


# settle ---------------------------------------------------------------------------------------------------------------

UPDATE = """
    input p: f32[8] becomes 1
    input m: f32[8] becomes 2
    input g: f32[8]
    new: f32[8] = aten.add.Tensor(g, m)
    q: f32[8] = aten.sub.Tensor(p, new)
    y: f32[8] = aten.exp.default(p)
    return y, q, new
"""


def test_what_replaces_state_is_written_there_last() -> None:
    assert by(update_in_place.settle, UPDATE) == [
        "y: f32[8] = aten.exp.default(p)",
        "new: f32[8] over m = aten.add.Tensor(g, m)",
        "q: f32[8] over p = aten.sub.Tensor(p, new)",
        "return y, q, new",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("aten.sub.Tensor(p, new)", "aten.sub.Tensor(new, p)"),  # no op in place has p's memory
        ("return y, q", "return p, q"),  # somebody else has p's memory at the end
        ("aten.exp.default(p)", "aten.mul.Tensor(q, p)"),  # reads the old value and the new one
        ("aten.sub.Tensor(p, new)", "aten.sub.Tensor(p, p)"),
        ("f32[8] becomes 1", "f32[8]"),
    ],
)
def test_what_is_not_written_where_it_was(old: str, new: str) -> None:
    assert old in UPDATE
    steps = by(update_in_place.settle, UPDATE.replace(old, new))
    assert not any("over p" in line for line in steps)
    assert "new: f32[8] over m = aten.add.Tensor(g, m)" in steps


@pytest.mark.parametrize(
    "may_fail",
    [
        "y: f32[8] = aten.index_select.default(g, 0, q)",
        "y: f32[8] = aten.remainder.Tensor(g, new)",
        "start all_gather[a] y: f32[16] = new {dim: 0, sizes: [8, 8]} 32.0 B\nwait y",
    ],
)
def test_what_may_fail_comes_first(may_fail: str) -> None:
    update = UPDATE.replace("y: f32[8] = aten.exp.default(p)", may_fail)
    steps = by(update_in_place.settle, update.replace("f32[8]", "f32[16@a]"))
    assert not any("over m" in line for line in steps)


def test_what_may_fail_is_not_what_writes() -> None:
    write = "q: f32[8] = aten.index_add.default(p, 0, rows, new)"
    text = UPDATE.replace("q: f32[8] = aten.sub.Tensor(p, new)", write).replace(
        "    new", "    input rows: i64[8]\n    new", 1
    )
    assert write in text
    assert not any(" over " in line for line in by(update_in_place.settle, text))


def test_what_a_permutation_may_show_to_others_is_not_written_over() -> None:
    """On virtual devices it hands on the tensor itself, and they read it when they come to it."""
    text = """
        input p: f32[8] becomes 0
        start ppermute[a] w: f32[8] = p {pairs: [[0, 1], [1, 0]]} 32.0 B
        wait w
        y: f32[8] = aten.neg.default(w)
        q: f32[8] = aten.mul.Tensor(p, $0)
        return q, y
    """
    assert not any(" over " in line for line in by(update_in_place.settle, text))
    with pytest.raises(ProgramError, match="writes over %p, which others hold"):
        check(parse("mesh a=2, b=2\n" + text.replace("q: f32[8] =", "q: f32[8] over p =")))


def test_an_input_that_another_one_replaces() -> None:
    text = """
        input x: f32[8]
        input y: f32[8] becomes 0
        return x
    """
    assert by(update_in_place.settle, text) == ["return x"]


def test_large_values_are_not_kept_for_the_end() -> None:
    text = """
        input s: f32[128] becomes 0
        input x: f32[8, 128]
        big: f32[8, 128] = aten.sin.default(x)
        t: f32[128] = aten.add.Tensor(s, $0)
        y: f32[8, 128] = aten.mul.Tensor(big, t)
        return t, y
    """
    assert not any(" over " in line for line in by(update_in_place.settle, text))
    small = by(update_in_place.settle, text.replace("mul.Tensor(big, t)", "mul.Tensor(x, t)"))
    assert "t: f32[128] over s = aten.add.Tensor(s, $0)" in small


def test_a_message_of_the_old_value_is_waited_for() -> None:
    text = """
        input p: f32[16@a] becomes 0
        q: f32[16@a] = aten.mul.Tensor(p, $0)
        start all_gather[a] w: f32[16] = p {dim: 0, sizes: [8, 8]} 32.0 B
        wait w
        return q, w
    """
    assert by(update_in_place.settle, text)[-2:] == ["q: f32[16@a] over p = aten.mul.Tensor(p, $0)", "return q, w"]


def test_sums_over_many_values_are_not_kept_for_the_end() -> None:
    text = """
        input s: f32[128] becomes 0
        input x: f32[128]
        a: f32[128] = aten.sin.default(x)
        s1: f32[128] = aten.add.Tensor(s, a)
        b: f32[128] = aten.cos.default(x)
        s2: f32[128] = aten.add.Tensor(s1, b)
        return s2
    """
    assert by(update_in_place.settle, text) == [line for line in lines(text) if not line.startswith("input")]


# reuse ----------------------------------------------------------------------------------------------------------------


def test_a_result_takes_the_memory_of_what_nobody_reads_again() -> None:
    text = """
        input x: f32[8] donated
        input y: f32[8]
        p: f32[8] = aten.exp.default(y)
        q: f32[8] = aten.add.Tensor(p, x)
        r: f32[8] = aten.mul.Tensor(y, q)
        s: f32[8] = aten.sub.Tensor(y, x)
        return r, s
    """
    assert by(reuse_buffers.reuse, text) == lines("""
        p: f32[8] = aten.exp.default(y)
        q: f32[8] over p = aten.add.Tensor(p, x)
        r: f32[8] over q = aten.mul.Tensor(y, q)
        s: f32[8] = aten.sub.Tensor(y, x)
        return r, s
    """)
    swapped = by(reuse_buffers.reuse, text.replace("aten.sub.Tensor(y, x)", "aten.sub.Tensor(x, y)"))
    assert swapped[-2] == "s: f32[8] over x = aten.sub.Tensor(x, y)", "the memory of a donated input"


@pytest.mark.parametrize(
    "text",
    [
        "p: f32[8, 8] = aten.neg.default(x)\nt: f32[8, 8] = aten.permute.default(p, [1, 0])\n"
        "q: f32[8, 8] = aten.add.Tensor(p, t)\nreturn q",
        "p: f32[8, 8] = aten.neg.default(x)\nt: f32[8, 8] = aten.permute.default(p, [1, 0])\n"
        "q: f32[8, 8] = aten.exp.default(p)\nr: f32[8, 8] = aten.add.Tensor(q, t, alpha=2)\nreturn r, p",
        "p: f32[8, 8 +a] = aten.mul.Tensor(o, 2)\nstart all_reduce[a] s: f32[8, 8] = p {} 8 B\n"
        "q: f32[8, 8 +a] = aten.neg.default(p)\nwait s\nreturn q, s",
        "p: f32[8, 8] = aten.neg.default(x)\nq: f64[8, 8] = aten.add.Tensor(p, y)\nreturn q",
        "p: f32[8, 8] = aten.exp.default(x)\nstart ppermute[a] s: f32[8, 8] = p {pairs: [[0, 1], [1, 0]]} 8 B\n"
        "wait s\nq: f32[8, 8] = aten.neg.default(s)\nreturn q",
        "q: f32[8, 8] = aten.neg.default(x)\nreturn q",
    ],
    ids=["both operands", "a view is read", "in flight", "dtype", "handed on", "an input"],
)
def test_what_keeps_its_memory(text: str) -> None:
    found = by(reuse_buffers.reuse, f"input x: f32[8, 8]\ninput y: f64[8, 8]\ninput o: f32[8, 8 +a]\n{text}")
    assert not any(" over " in line for line in found if not line.startswith("r: ")), found


@pytest.mark.parametrize(
    ("results", "copies"),
    [
        ("p, q", []),
        ("x", ["x.own"]),
        ("v", ["v.own"]),
        ("p, p", []),
        ("p, w", ["w.own"]),
        ("v, x", ["v.own", "x.own"]),
        ("d", []),
        ("q, x owned 1", []),
        ("x, x owned 1", ["x.own"]),
    ],
)
def test_results_have_memory_of_their_own(results: str, copies: list[str]) -> None:
    head = """
        input x: f32[8, 4]
        input d: f32[8, 4] donated
        v: f32[4, 8] = aten.permute.default(x, [1, 0])
        p: f32[8, 4] = aten.neg.default(x)
        w: f32[4, 8] = aten.permute.default(p, [1, 0])
        q: f32[8, 4] = aten.exp.default(x)
    """
    found = by(reuse_buffers.reuse, f"{head}\nreturn {results}")
    assert [line.split()[1].rstrip(":") for line in found if line.startswith("copy")] == copies


# free -----------------------------------------------------------------------------------------------------------------

FREED = """
    input x: f32[8]
    input o: f32[8 +a]
    p: f32[8 +a] = aten.neg.default(o)
    start all_reduce[a] s: f32[8] = p {} 32 B
    q: f32[8] = aten.exp.default(x)
    m: f32[4, 2] = aten.reshape.default(q, [4, 2])
    wait s
    r: f32[8] = aten.add.Tensor(s, x)
    n: f32[4, 2] = aten.neg.default(m)
    return r, n
"""


def test_values_are_freed_behind_their_last_reader_or_the_message_that_carries_them() -> None:
    assert by(free.free, FREED) == lines("""
        p: f32[8 +a] = aten.neg.default(o)
        start all_reduce[a] s: f32[8] = p {} 32 B
        q: f32[8] = aten.exp.default(x)
        m: f32[4, 2] = aten.reshape.default(q, [4, 2])
        free q
        wait s
        free p
        r: f32[8] = aten.add.Tensor(s, x)
        free s
        n: f32[4, 2] = aten.neg.default(m)
        free m
        return r, n
    """)


def test_memory_in_use_step_by_step() -> None:
    """In units of 32 bytes: x and o, and then p; s is there from the start of its message; m shows q."""
    program = free.free(parse(f"mesh a=2\n{FREED}"))
    assert [n / 32 for n in alive(program)] == [3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5]
    assert peak_bytes(program) == 5 * 32
    over = FREED.replace("r: f32[8] =", "r: f32[8] over s =")
    assert [n / 32 for n in alive(free.free(parse(f"mesh a=2\n{over}")))] == [3, 4, 5, 5, 5, 5, 5, 4, 4, 5, 5]


# all of them ----------------------------------------------------------------------------------------------------------


def program_of(i: int) -> Program:
    """The i-th program with many collectives that the generator draws; none is drawn before somebody wants it."""
    while len(_programs) <= i:
        _programs.append(next(_drawn))
    return _programs[i]


def _with_collectives() -> Iterator[Program]:
    for seed in itertools.count(13):  # the first seeds make fewer
        p = draw(random.Random(seed), 20)
        with Mesh(dict(p.mesh)):
            step = sl.jit(compiled(p.function), in_specs=tuple(x.spec for x in p.inputs))
            try:
                program = step.plan(*(x.make() for x in p.inputs)).compiled.program
            except sl.ShardingError:
                continue
        if len(program.collectives) >= 6:
            yield program


_programs: list[Program] = []
_drawn = _with_collectives()
COUNT = [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 6))]


@pytest.mark.long
@pytest.mark.xdist_group("programs")  # which take seconds to make
@pytest.mark.parametrize("i", COUNT)
def test_a_program_is_read_as_it_prints(i: int) -> None:
    text = show(program_of(i))
    assert show(parse(text)) == text


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("one", [p.__name__ for p in PASSES])
@pytest.mark.parametrize("i", COUNT)
def test_a_pass_changes_nothing_twice_and_loses_nothing(i: int, one: str) -> None:
    program = program_of(i)
    bare = parse("\n".join(s for s in show(program).splitlines() if not s.startswith("free")))
    anew = (replace(s, over=()) if isinstance(s, Compute) else s for s in bare.steps)
    bare = replace(bare, steps=tuple(anew))
    made = {p.__name__: p for p in PASSES}[one](bare)
    calls, before = (Counter(str(s.target) for s in x.steps if isinstance(s, Compute)) for x in (made, bare))
    assert calls == before
    assert Counter(c.kind for c in made.collectives) == Counter(c.kind for c in bare.collectives)
    check(made)


@pytest.mark.long
def test_a_pass_that_is_wrong_is_found_behind_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, and whether or not each has to answer for itself."""
    text = "\n".join(s for s in show(program_of(0)).splitlines() if not s.startswith("free"))
    for i in range(len(PASSES)):

        def wrong(program: Program, one: Pass = PASSES[i]) -> Program:
            made = one(program)
            read = {v for s in made.steps for v in reads(s)}
            first = next(
                k for k, s in enumerate(made.steps) if isinstance(s, Compute) and read.intersection(s.out_vars)
            )
            return replace(made, steps=(*made.steps[:first], *made.steps[first + 1 :]))

        monkeypatch.setattr("shardlib.compiler.passes.PASSES", (*PASSES[:i], wrong, *PASSES[i + 1 :]))
        with pytest.raises(ProgramError, match="is not made yet"):
            run_passes(parse(text))


@pytest.mark.parametrize(("machine", "times"), [(None, 1), ("h100", 2)])
def test_only_a_machine_that_is_named_limits_memory(
    machine: str | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit there goes through the passes once more, with messages where they stand."""
    made: list[Program] = []

    def counted(program: Program) -> Program:
        made.append(program)
        return free.free(program)

    monkeypatch.setattr("shardlib.compiler.passes.PASSES", (*PASSES[:-1], counted))
    with Mesh.abstract(data=2, machine=machine):
        sl.jit(torch.sum, in_specs="n@data").plan(torch.empty(1 << 38, device="meta"))
    assert len(made) == times


def test_passes_are_the_same_every_time() -> None:
    text = show(program_of(0))
    bare = "\n".join(s for s in text.splitlines() if not s.startswith("free"))
    assert show(run_passes(parse(bare))) == show(run_passes(parse(bare)))


# Text -----------------------------------------------------------------------------------------------------------------

LINES = [
    'shardlib.debug_print.default("a  # b, c = d  ; e $5 {} owned 3", [x])',
    "y: f32[8] = aten.mul.Tensor(x, (1 / (1 - ($0 ** $1))))",
    "y: f32[8] = aten.mul.Tensor(x, float($1 ** 2))",
    "y: f32[8] = aten.mul.Tensor(x, float(float($1 ** 2)))",
    "y: f32[8] = aten.mul.Tensor(x, ($0 * float('inf')))",
    "y: f32[8] = aten.mul.Tensor(x, (-$0))",
    "y: f32[8] = aten.new_full.default(x, [1, $0, -2], -inf)",
    "y: complex64[8] = aten.mul.Tensor(x, (inf+1j))",
    "y: f32[8] = aten._to_copy.default(x, dtype=torch.float32, device=device(type='cuda', index=1))",
    "y: f32<3, 2> = aten.add.Tensor(x, nan, alpha=1e-05)  ; 3.0 flop, copies",
]


@pytest.mark.parametrize("line", LINES)
def test_a_step_is_read_as_it_prints(line: str) -> None:
    text = f"mesh a=2\ninput x: f32[8] varies []\ninput z: f32[8] donated\n{line}\nreturn x, 3, 'a owned 3' owned 1"
    printed = show(parse(text))
    assert show(parse(printed)) == printed
    assert printed == text.replace('"', "'").replace("'a owned 3'", "'a owned 3'")


@pytest.mark.parametrize(
    "line",
    ["y = aten.neg.default(x)", "y: f31[8] = aten.neg.default(x)", "y: f32[8] = aten.nothing.default(x)", "z"]
    + ["y: f32[8] = aten.neg.default(q)", "wait q", "start x", "captured x"],
)
def test_what_is_no_program_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(f"mesh a=2\ninput x: f32[8]\n{line}\nreturn x")


def test_halves_are_read_as_they_print() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with Mesh(data=2):
        halves = sl.jit(lambda x: (x @ x.t()).relu().sum(), in_specs=("a@data b",)).plan(x).compiled.halves
    assert halves is not None
    for half in (halves.forward, halves.backward):
        assert show(parse(show(half))) == show(half)


@pytest.mark.long
def test_a_long_chain_in_front_of_a_collective() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1200):
            x = torch.sin(x)
        return sl.shard(x, "a b")

    with Mesh(data=2):
        plan = sl.jit(chain, in_specs=("a@data b",)).plan(torch.ones(4, 4))
    assert [c.kind for c in plan.collectives] == ["all_gather"]


def test_what_a_message_carries_is_not_written_over_through_a_view() -> None:
    text = """
        mesh a=2
        input x: f32[8]
        h: f32[8] = aten.neg.default(x)
        v: f32[8] = aten.alias.default(h)
        start all_reduce[a] s: f32[8] = v {} 32 B
        y: f32[8] over h = aten.exp.default(h)
        wait s
        return s, y
    """
    with pytest.raises(ProgramError, match="writes over %h, which others hold"):
        check(parse(text))
