"""A dim in other factors after than before, which have no common refinement: devices exchange what overlaps."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import shardlib as sl
from shardlib.compiler.propagate.solver.reshard_costs import LayoutCosts, ValueReshards
from shardlib.compiler.propagate.solver.value_records import ValueEnd, ValueRecord
from shardlib.sharding.chunks import ShardSizes
from shardlib.sharding.mesh.axis import Axis, Coords
from shardlib.sharding.reshard import DEFAULT_PRICES
from shardlib.sharding.reshard.refactor_exchange import MAX_RANGES, Dim, RefactorExchange, held_ranges

T, U = Axis("t", 4), Axis("u", 2)
SPECS = [
    "d f@t",
    "d (three=3 f@t)",
    "d (f@t k=10)",
    "d (two=2 f@t k=5)",
    "d (k=5 f@(u t))",
    "d@u f@t",
    "d f@(t u)",
    "d (three=3@u f)",
    "d (two=2@u f@t)",
]


def elements(dim: Dim, coords: Coords) -> set[int]:
    """Places of a dim that a device holds, one by one."""
    sizes = [int(n) for n, _ in dim]
    whole = torch.arange(torch.Size(sizes).numel()).view(sizes)
    for d, (n, axes) in enumerate(dim):
        (start, stop), *_ = held_ranges(((n, axes),), coords) or [(0, 0)]
        whole = whole.narrow(d, start, stop - start)
    return {*whole.flatten().tolist()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((24, (T,)),), ((3, ()), (8, (T,)))),
        (((3, ()), (8, (T,))), ((24, (T,)),)),
        (((27, (T,)),), ((3, ()), (9, (T,)))),
        (((3, ()), (9, (T,))), ((9, (T, U)), (3, ()))),
        (((3, ()), (9, (T,))), ((27, (U,)),)),
        (((2, (U,)), (9, (T,))), ((18, (T,)),)),
        (((ShardSizes((5, 0, 12, 4), (T,)), (T,)),), ((3, ()), (7, (T,)))),
        (((5, (T,)), (2, ())), ((2, ()), (5, (T,)))),
        (((12, (T,)),), ((2, (U,)), (6, (T,)))),
    ],
)
def test_what_is_sent_is_what_overlaps(before: Dim, after: Dim) -> None:
    crossing = RefactorExchange(0, before, after)
    devices = [{"t": i, "u": j} for i in range(4) for j in range(2)]
    most = 0
    for c in devices:
        assert elements(before, c) == {x for a, b in held_ranges(before, c) for x in range(a, b)}
        group = [m for m in devices if all(m[name] == c[name] for name in {"t", "u"} - {a.name for a in crossing.axes})]
        mine = elements(before, c)
        most = max(most, sum(len(mine & elements(after, m)) for m in group if m != c))
        assert sum(size for _, size in crossing.arriving(c)) == len(elements(after, c))
    assert crossing.most == most


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("n", [30, 60, 90, 150])
def test_every_pair_in_values_and_gradients(n: int, part: int) -> None:
    x, weights = torch.arange(4.0 * n).reshape(4, n), torch.arange(1.0, n + 1)
    for before, after in [*itertools.permutations(SPECS, 2)][part::8]:

        def moved(x: torch.Tensor, after: str = after) -> torch.Tensor:
            return sl.shard(x * 2, after)

        def total(x: torch.Tensor, moved=moved) -> torch.Tensor:
            return (moved(x) * weights).sum()

        with sl.Mesh(t=4, u=2):
            assert torch.equal(sl.jit(moved, in_specs=(before,))(x).full_tensor(), 2 * x), (before, after)
            gradient = sl.jit(sl.grad(total), in_specs=(before,), out_specs=before)(x)
            assert torch.equal(gradient.full_tensor(), (2 * weights).expand(4, n)), (before, after)


@pytest.mark.parametrize(("before", "after"), [SPECS[:2], SPECS[1::-1]])
def test_a_fused_dim_goes_to_heads_and_back_without_a_gather(before: str, after: str) -> None:
    def moved(w: torch.Tensor) -> torch.Tensor:
        return sl.shard(w, after)

    with sl.Mesh.abstract(t=8):
        plan = sl.jit(moved, in_specs=(before,)).plan(torch.empty(64, 48, device="meta"))
    (exchange,) = plan.collectives
    assert exchange.kind == "all_to_all"
    assert f"f in other pieces: asked for by shard(w, '{after}')" in plan.full
    piece = 4 * 64 * 48 / 8
    assert exchange.bytes == piece  # of six columns, a device in the middle keeps none; a gather sends 7 pieces


def test_axes_go_from_factor_to_factor_in_one_exchange() -> None:
    """Two factors are enough for eight devices to cut a flat dim as they cut both: four gates, cut inside each."""

    def moved(w: torch.Tensor) -> torch.Tensor:
        return sl.shard(w, "d (four=4 h@t)")

    x = torch.arange(4 * 64.0).reshape(4, 64)
    with sl.Mesh(t=8):
        step = sl.jit(moved, in_specs=("d f@t",))
        (exchange,) = step.plan(x).collectives
        assert torch.equal(step(x).full_tensor(), x)
    assert (exchange.kind, exchange.bytes) == ("all_to_all", 4 * 4 * 64 / 8)


def test_a_dim_of_very_many_ranges_is_gathered() -> None:
    def moved(w: torch.Tensor) -> torch.Tensor:
        return sl.shard(w, f"d (many={MAX_RANGES + 1} f@t)")

    with sl.Mesh.abstract(t=2):
        plan = sl.jit(moved, in_specs=("d f@t",)).plan(torch.empty(4, (MAX_RANGES + 1) * 2, device="meta"))
    assert [c.kind for c in plan.collectives] == ["all_gather"]


def test_decisions_price_the_exchange() -> None:
    axes = Axis("t", 8).primes()
    producer = ValueEnd(None, axes=((), axes))
    read = ValueEnd(None, axes=((), ()), into=(((64,), (3, 16)), ((), (), axes)))
    seconds = ValueReshards(ValueRecord(((64,), (48,)), 4, (producer,), (read,)), 1, LayoutCosts(((64,), (48,)), 4)).at(
        ()
    )
    assert seconds == pytest.approx(DEFAULT_PRICES.comm_seconds(axes, 4 * 64 * 48 / 8, "all_to_all"), rel=1e-3)


def test_placed_tensors_move_so_too() -> None:
    x = torch.arange(4 * 48.0).reshape(4, 48)
    with sl.Mesh(t=4), sl.comm_budget(forbid=("all_gather",)):
        moved = sl.shard(x, "d f@t").redistribute("d (three=3 f@t)")
        assert [s.shape for s in (p.data for p in moved.shards)] == [(4, 12)] * 4
    assert torch.equal(moved.full_tensor(), x)


def test_the_busiest_device() -> None:
    """`most` is the largest sum of the messages of one device, over all groups."""
    rng, tried = random.Random(0), 0
    axes = Axis("t", 4), Axis("d", 2), Axis("e", 3)
    while tried < 200:
        dims = []
        for _ in range(2):
            sizes = [rng.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(rng.randint(1, 3))]
            on: list[list[Axis]] = [[] for _ in sizes]
            for axis in rng.sample(axes, rng.randint(1, 3)):
                rng.choice(on).append(axis)
            dims.append(tuple((size, tuple(mine)) for size, mine in zip(sizes, on, strict=True)))
        if math.prod(n for n, _ in dims[0]) != math.prod(n for n, _ in dims[1]):
            continue
        tried += 1
        exchange = RefactorExchange(0, *dims)
        busiest = 0
        for others in itertools.product(*(range(a.size) for a in axes)):
            coords = {a.name: c for a, c in zip(axes, others, strict=True)}
            for i, row in enumerate(exchange.sent(coords)):
                busiest = max(busiest, sum(row) - row[i])
        assert exchange.most == busiest, dims
