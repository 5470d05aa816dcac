"""Resharding, by brute force: every step runs, gives every device its part, and sends the bytes that it says."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib import Mesh
from shardlib.compiler.codegen import virtual
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.emit_reshard import Mover
from shardlib.compiler.program.steps import Var
from shardlib.sharding import reshard
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.mesh.machine import PRESETS, Link
from shardlib.sharding.reshard import DEFAULT_PRICES, Axes, FactorAxes, Prices, RouteStep, search
from shardlib.sharding.reshard.direct import DirectPlanner
from shardlib.sharding.split_axes import split_axes
from tests.validation.programs.campaign import as_if_large, broken_promise, counting

A = Axis("a", 4)
A0, A1 = A.primes()
B = Axis("b", 3)
C = Axis("c", 2)
D = Axis("d", 2)

Leaves = tuple[tuple[int, ...], ...]
VALUES: list[Leaves] = [
    ((8,),),
    ((5,),),
    ((4,), (6,)),
    ((3,), (5,)),
    ((2, 3), (4,)),
    ((4, 3),),
    ((6,), (1,), (5,)),
    ((2,), (2, 5)),
]


def cuts(n: int, atoms: Sequence[Axis]) -> Iterator[FactorAxes]:
    """Every way to put some of the atoms on n leaves."""
    for where in itertools.product(range(-1, n), repeat=len(atoms)):
        yield tuple(tuple(a for a, w in zip(atoms, where, strict=True) if w == i) for i in range(n))


def layout(leaves: Leaves, cut: FactorAxes) -> Layout:
    feed = iter(cut)
    return Layout(tuple(tuple(Factor(n, Axis.merge(next(feed))) for n in dim) for dim in leaves))


def run(
    leaves: Leaves, hops: Sequence[RouteStep], src: FactorAxes, dst: FactorAxes, mesh: Mesh, pending: Axes, reduce: str
) -> None:
    """Move a random value through Mover and virtual devices, and compare with where it ought to be."""
    shape = [math.prod(dim) for dim in leaves]
    addends = torch.randint(-9, 9, (group_size(pending), *shape)).double()
    whole = addends.amax(0) if reduce == "max" else addends.sum(0)
    have, want = layout(leaves, src), layout(leaves, dst)
    builder = Builder(mesh)
    var = Var("x", have, whole.dtype)
    builder.inputs.append(var)
    # Which addend a device holds is not in the layout here, so nothing may be shared between devices.
    for i, hop in enumerate(hops):
        to = layout(leaves, hop.after)
        out = Var(f"x{i}", to, var.dtype)
        Mover(builder).step(hop.step, var, hop.dims, out, reason="", because=None)
        var = out
    builder.outputs.append(var)
    program = builder.finish()

    def piece(coords: dict[str, int]) -> torch.Tensor:
        k = 0
        for axis in pending:
            k = k * axis.size + axis.coord(coords)
        return have.scatter(addends[k], coords)

    with counting() as calls:
        runner = virtual.load(program, mesh, share=False)
    pieces = [piece(c) for c in mesh.all_coords()]
    (locals_,) = runner([pieces])
    for coords, local in zip(mesh.all_coords(), locals_, strict=True):
        expected = want.scatter(whole, coords)
        assert local.shape == expected.shape, (have, want, coords)
        assert torch.equal(local, expected), (str(have), str(want), coords, [h.step for h in hops])
    assert not broken_promise(program.collectives, calls, mesh)
    if not pending:
        shared = virtual.load(program, mesh)([pieces])[0]
        assert all(map(torch.equal, shared, locals_))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("leaves", VALUES, ids=str)
@pytest.mark.parametrize("atoms", [(A0, A1), (A0, A1, C), (B, C), (C, A0, A1)], ids=lambda a: " ".join(map(str, a)))
def test_every_pair(leaves: Leaves, atoms: Axes) -> None:
    mesh = Mesh({a.name: a.axis_size for a in atoms})
    every = list(cuts(sum(map(len, leaves)), atoms))
    pairs = list(itertools.product(every, every))
    for src, dst in pairs[:: max(1, len(pairs) // 30)]:
        run(leaves, reshard.plan_route(leaves, 8, src, dst), src, dst, mesh, (), "sum")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "leaves",
    [*VALUES, ((8,), (8,)), ((4, 4), (16,)), ((12,), (6, 2)), ((12,), (24,), (12,)), ((5,), (8,), (8,), (8,))],
    ids=str,
)
@pytest.mark.parametrize(
    "atoms", [(A0, A1, C), (C, A0, A1), (A0, A1, C, D), (B, C, D)], ids=lambda a: " ".join(map(str, a))
)
def test_every_way_that_large_tensors_take(leaves: Leaves, atoms: Axes) -> None:
    """Axes in any order, with and without sums."""
    mesh, rng = Mesh({a.name: a.axis_size for a in atoms}), random.Random(0)
    every = [tuple(tuple(rng.sample(x, len(x))) for x in cut) for cut in cuts(sum(map(len, leaves)), atoms)]
    with as_if_large():
        for _ in range(6):
            src, dst, reduce = rng.choice(every), rng.choice(every), rng.choice(["sum", "max"])
            pending = tuple(a for a in atoms if rng.random() < 0.3 and not any(a in axes for axes in src))
            run(leaves, reshard.plan_route(leaves, 8, src, dst, pending, reduce), src, dst, mesh, pending, reduce)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("leaves", VALUES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_every_pending(leaves: Leaves, reduce: str) -> None:
    mesh, n = Mesh(a=4, c=2), sum(map(len, leaves))
    cases = []
    for k in range(1, 4):
        for pending in itertools.combinations((A0, A1, C), k):
            rest = [a for a in (A0, A1, C) if a not in pending]
            cases += [(src, dst, pending) for src in cuts(n, rest) for dst in cuts(n, (A0, A1, C))]
    for src, dst, pending in cases[:: max(1, len(cases) // 60)]:
        run(leaves, reshard.plan_route(leaves, 8, src, dst, pending, reduce), src, dst, mesh, pending, reduce)


@pytest.mark.parametrize(
    ("src", "dst", "pending", "expected"),
    [
        ([()], [(C,)], (), ["slice 0"]),
        ([(C,)], [()], (), ["all_gather 256"]),
        ([(C,), ()], [(), (C,)], (), ["all_to_all 128"]),
        ([()], [()], (C,), ["all_reduce 512"]),
        ([()], [(C,)], (C,), ["reduce_scatter 256"]),
        ([(), ()], [(C,), (A0, A1)], (C,), ["slice 0", "reduce_scatter 64"]),
        ([(A0, A1)], [(A0,)], (), ["all_gather 128"]),
        ([(A0, A1)], [()], (), ["all_gather 384"]),
        ([(C, A0, A1)], [(C,)], (), ["all_gather 192"]),
        ([()], [(A0,)], (A0, A1), ["reduce_scatter 256", "all_reduce 256"]),
    ],
)
def test_bytes(src: list[Axes], dst: list[Axes], pending: Axes, expected: list[str]) -> None:
    """64 numbers of 8 bytes under ring algorithms; the shape is [64] or [8, 8]."""
    sizes = (64,) if len(src) == 1 else (8, 8)
    steps = reshard.plan_steps(sizes, 8, tuple(src), tuple(dst), pending)
    assert [f"{s.kind} {s.bytes:.0f}" for s in steps] == expected


@pytest.mark.parametrize(
    ("src", "dst", "pending", "expected"),
    [
        # Both axes go to the factor that wants the major one, and the minor one is gathered there.
        ([(C, D), ()], [(), (C,)], (), ["all_to_all 384", "all_gather 512"]),
        # What the target needs anyway is cut off before the exchange, not after it.
        ([(C,), ()], [(), (C, D)], (), ["slice 0", "all_to_all 384"]),
        # Two factors swap axes of different sizes: a part of the larger one goes in an exchange of its own.
        ([(A0, A1), (C,)], [(C,), (A0, A1)], (), ["ppermute 256", "all_to_all 128"]),
        ([(C,), (A0, A1)], [(A0, A1), (C,)], (), ["ppermute 256", "all_to_all 128"]),
        # A sum is scattered where nobody wants it, for what is gathered then is less than what would be summed.
        ([(C,), ()], [(D,), ()], (D,), ["reduce_scatter 512", "ppermute 512", "all_gather 512"]),
    ],
)
def test_ways_round(src: list[Axes], dst: list[Axes], pending: Axes, expected: list[str]) -> None:
    """[512, 512] of 8 bytes, where the direct way sends more: KiB of every step, and the values."""
    leaves: Leaves = ((512,), (512,))
    hops = reshard.plan_route(leaves, 8, tuple(src), tuple(dst), pending)
    assert [f"{h.step.kind} {h.step.bytes / 1024:.0f}" for h in hops] == expected
    known = DirectPlanner((512, 512), 8, tuple(src), tuple(dst), pending, "sum", (512, 512), leaves).run()
    assert sum(h.step.bytes for h in hops) < sum(step.bytes for step in known)
    mesh = Mesh({a.name: a.axis_size for a in dict.fromkeys((*itertools.chain(*src, *dst), *pending))})
    run(leaves, hops, tuple(src), tuple(dst), mesh, pending, "sum")


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        # To one factor from two, back, and between pairs: one exchange over both axes, not one after the other.
        ([(A0, A1), (C,), ()], [(), (), (A0, A1, C)], ["all_to_all[a c] 224"]),
        ([(A0, A1), (C,), ()], [(), (), (C, A0, A1)], ["all_to_all[c a] 224"]),
        ([(), (), (A0, A1, C)], [(A0, A1), (C,), ()], ["all_to_all[c a] 224"]),
        ([(C,), (), (D,)], [(), (C, D), ()], ["all_to_all[c d] 384"]),
        ([(C, D), (), ()], [(), (D,), (C,)], ["all_to_all[d c] 384"]),
        # One factor gives to the next, and that to the third.
        ([(C,), (D,), ()], [(), (C,), (D,)], ["all_to_all[d] 256", "all_to_all[c] 256"]),
    ],
)
def test_exchanges_that_follow_each_other_are_one(src: list[Axes], dst: list[Axes], expected: list[str]) -> None:
    """[64, 64, 128] of 8 bytes on 4 or 8 devices: KiB of every step, and the values."""
    leaves: Leaves = ((32,), (64,), (128,))
    hops = reshard.plan_route(leaves, 8, tuple(src), tuple(dst))
    found = [f"{h.step.kind}[{' '.join(map(str, h.step.axes))}] {h.step.bytes / 1024:.0f}" for h in hops]
    assert found == expected
    mesh = Mesh({a.name: a.axis_size for a in itertools.chain(*src, *dst)})
    run(leaves, hops, tuple(src), tuple(dst), mesh, (), "sum")


@pytest.mark.parametrize("order", list(itertools.permutations((B, C, D))), ids=lambda o: "".join(a.name for a in o))
def test_pieces_in_any_order_of_axes(order: Axes) -> None:
    """An axis that stays second goes along where those around it have other sizes."""
    mesh = Mesh(b=3, c=2, d=2)
    for other in itertools.permutations(order):
        hops = reshard.plan_route(((12,),), 8, (order,), (other,))
        run(((12,),), hops, (order,), (other,), mesh, (), "sum")
        assert [h.step.kind for h in hops] == ["ppermute"] * (other != order)


@pytest.mark.slow
def test_a_way_round_is_never_dearer() -> None:
    """Every cut of three dims over three axes, and every set of pending ones, against the direct way."""
    atoms, sizes, better = (A0, A1, C), (64, 64, 64), 0
    for src, dst in itertools.product(cuts(3, atoms), cuts(3, atoms)):
        on = [a for axes in src for a in axes]
        for pending in ((), tuple(a for a in atoms if a not in on)):
            steps = reshard.plan_steps(sizes, 8, src, dst, pending)
            known = DirectPlanner(sizes, 8, src, dst, pending, "sum", sizes, ((64,),) * 3).run()
            assert sum(s.bytes for s in steps) <= sum(s.bytes for s in known)
            assert reshard.estimate_seconds(steps) <= reshard.estimate_seconds(known)
            better += steps != known
    assert better


class Unbounded(search._Search):
    """Dijkstra's algorithm: permutations may follow each other, and no state is dropped because of what it lacks.

    It may miss the limit of bytes late, on a way that was the fastest one until then.
    """

    def _missing(self, state: search.State) -> float:
        return 0.0

    def _moves(self, state: search.State, limit: float, is_permuted: bool) -> Iterator[search.Move]:
        return super()._moves(state, limit, False)


@pytest.mark.parametrize("node", [1, 2, 4, 8])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (1, 4), (8, 1)])
def test_no_collective_exceeds_the_highest_rate(node: int, inner: int, outer: int) -> None:
    axes = {"a": 2, "b": 4, "c": 2}
    machine = replace(PRESETS["h100"], inner=Link(inner * 1e9), outer=Link(outer * 1e9), node=node)
    prices = Prices(machine, axes)
    for n in range(1, 4):
        for names in itertools.combinations(axes, n):
            group = tuple(Axis(name, axes[name]) for name in names)
            assert all(prices.link(group, pairwise)[1] <= prices.highest_rate for pairwise in (False, True)), group


@pytest.mark.long
@pytest.mark.parametrize(
    ("prices", "share"),
    [
        (DEFAULT_PRICES, 0.47312705997927357),
        (Prices.for_mesh(Mesh.abstract(a=4, b=8, c=2, machine="h100")), 0.5090788092210561),
    ],
    ids=["links alike", "h100"],
)
def test_the_search_drops_nothing_cheap(prices: Prices, share: float) -> None:
    """The searched steps take `share` of the seconds of the direct ones; with fewer moves, they take more."""
    rng, spent, plain, parts = random.Random(0), 0.0, 0.0, ((64,), (4, 16), (32,))
    atoms = (A0, A1, Axis("b", 8), C)
    for _ in range(150):
        order = rng.sample(atoms, 4)
        src, dst = rng.choice([*cuts(3, order)]), rng.choice([*cuts(3, rng.sample(atoms, 4))])
        on = [a for axes in src for a in axes]
        pending = tuple(a for a in atoms if a not in on and rng.random() < 0.5)
        sizes = tuple(map(math.prod, parts))
        direct = DirectPlanner(sizes, 1 << 16, src, dst, pending, "sum", sizes, parts).run()
        blocks = search._blocks([*src, *dst, pending])
        every = [
            kind(parts, 1 << 16, blocks, src, dst, pending, prices).run(direct, "sum")
            for kind in (search._Search, Unbounded)
        ]
        seconds = [reshard.estimate_seconds(steps, prices) for steps in every]
        assert seconds[0] <= seconds[1] * (1 + 1e-9), (src, dst, pending, every)
        spent, plain = spent + seconds[0], plain + reshard.estimate_seconds(direct, prices)
    assert spent / plain == pytest.approx(share, rel=1e-6)


def test_what_is_there_costs_nothing() -> None:
    assert reshard.plan_steps((8, 8), 4, ((A0,), ()), ((A0,), ())) == ()
    assert reshard.estimate_seconds(reshard.plan_steps((8,), 4, ((),), ((A0, A1),))) == 0


def test_fused_leaves_move_as_one() -> None:
    """(2 4) cut over both is one chunk of 8; what an uneven minor leaf holds is not."""
    hops = reshard.plan_route(((2, 4),), 8, ((A0,), (A1,)), ((), ()))
    assert [h.step.kind for h in hops] == ["all_gather"]
    hops = reshard.plan_route(((2, 5),), 8, ((A0,), (A1,)), ((), ()))
    assert [(h.step.kind, h.after) for h in hops][-1] == ("all_gather", ((), ()))
    assert len(hops) == 2


def test_a_run_of_parts_on_an_uneven_factor_is_gathered_whole() -> None:
    """5 over a=4 is 2 2 1 0, over its major part 3 2: neither is made of the other."""
    steps = reshard.plan_steps((5,), 8, ((A0, A1),), ((A0,),))
    assert [s.kind for s in steps] == ["all_gather", "slice"]


# spread ---------------------------------------------------------------------------------------------------------------


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.lists(st.sampled_from([2, 3]), max_size=3))
def test_spread_cuts_like_the_whole(sizes: list[int], ways: list[int]) -> None:
    """Axes handed to the parts hold, on every device, the elements that they hold of the product."""
    shares = split_axes(sizes, ways)
    axes = [Axis(f"x{i}", n) for i, n in enumerate(ways)]
    if shares is None:
        assert math.prod(sizes) % math.prod(ways) or len(sizes) > 1
        return
    assert sorted(i for share in shares for i in share) == list(range(len(ways)))
    one = Layout(((Factor(math.prod(sizes), tuple(axes)),),))
    parts = Layout((tuple(Factor(n, tuple(axes[i] for i in share)) for n, share in zip(sizes, shares, strict=True)),))
    whole = torch.arange(math.prod(sizes))
    for at in itertools.product(*(range(n) for n in ways)):
        coords = {a.name: i for a, i in zip(axes, at, strict=True)}
        assert torch.equal(one.scatter(whole, coords), parts.scatter(whole, coords))


@pytest.mark.parametrize(
    ("sizes", "ways", "shares"),
    [
        ([4, 32], [2, 2, 2], [[0, 1], [2]]),
        ([8], [2, 3], [[0, 1]]),
        ([3, 5], [2], None),
        ([2, 5], [2, 2], None),
        ([2, 3], [2, 3], [[0], [1]]),
        ([1, 6], [2], [[], [0]]),
        ([], [], []),
    ],
)
def test_spread(sizes: list[int], ways: list[int], shares: list[list[int]] | None) -> None:
    assert split_axes(sizes, ways) == shares
