"""Random numbers depend on the seed, the op and the element's place, never on the sharding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError
from shardlib.core.context import single_device
from tests.helpers.ranks import run_ranks

MESHES: dict[str, dict[str, int]] = {
    "1": {"a": 1},
    "8": {"a": 8},
    "2x4": {"a": 2, "b": 4},
    "2x2x2": {"a": 2, "b": 2, "c": 2},
}
SPECS = {"1": "_@a _", "8": "_@a _", "2x4": "_@a _@b", "2x2x2": "_@(a c) _@b"}
SHAPES = {"even": (8, 12), "uneven": (7, 5), "empty": (3, 9)}

# What is drawn for a tensor x, which lies in [0, 1).
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "rand_like half": lambda x: torch.rand_like(x, dtype=torch.float16),
    "randn_like": torch.randn_like,
    "randn_like double": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randn_like complex": lambda x: torch.view_as_real(torch.randn_like(x, dtype=torch.complex64)),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like low": lambda x: torch.randint_like(x, -3, 9, dtype=torch.int32),
    "randint_like wide": lambda x: torch.randint_like(x, 1 << 40, dtype=torch.int64),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: torch.bernoulli(x, 0.25),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.25),
    "bernoulli_ tensor": lambda x: x.clone().bernoulli_(x),
    "normal": lambda x: torch.normal(x, x + 1),
    "normal mean": lambda x: torch.normal(x, 2.0),
    "normal std": lambda x: torch.normal(3.0, x),
    "normal_": lambda x: x.clone().normal_(3, 2),
    "uniform_": lambda x: x.clone().uniform_(-2, 3),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "cauchy_": lambda x: x.clone().cauchy_(1, 2),
    "log_normal_": lambda x: x.clone().log_normal_(0.5, 0.25),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "random_": lambda x: x.clone().random_(),
    "random_ to": lambda x: x.clone().random_(10),
    "random_ from": lambda x: x.to(torch.int16).random_(-5, 10),
    "multinomial": lambda x: torch.multinomial(x + 0.1, 1),
    "multinomial several": lambda x: torch.multinomial(x + 0.1, 3),
    "multinomial replaced": lambda x: torch.multinomial(x + 0.1, 20, replacement=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x[None], 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None], 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "two": lambda x: torch.rand_like(x) + torch.rand_like(x),
    "part": lambda x: x[1:].clone().normal_(),
}
# What is drawn of a shape alone, which only a program can shard.
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(*x.shape),
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "randint": lambda x: torch.randint(3, 17, x.shape),
    "randperm": lambda x: torch.randperm(17),
    "normal size": lambda x: torch.normal(1.0, 2.0, tuple(x.shape)),
    "out": lambda x: torch.randn(x.shape, out=torch.empty(x.shape)),
    "fractional": lambda x: F.fractional_max_pool2d(x[None, None].expand(1, 2, -1, -1), 2, output_size=2),
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def data(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def sharded_run(draw: Callable[[Tensor], Tensor], mesh: str, x: Tensor) -> Tensor:
    with Mesh(MESHES[mesh]):
        torch.manual_seed(3)
        return whole(sl.jit(draw, in_specs=(SPECS[mesh],))(x))


BY_SHAPE = [(name, "uneven") for name in (*DRAWS, *MADE)]
BY_SHAPE += [(name, shape) for name in ("dropout", "randn_like", "multinomial", "randn") for shape in ("even", "empty")]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "shape"), BY_SHAPE)
def test_programs_draw_the_same_on_every_mesh(name: str, shape: str) -> None:
    draw, x = (DRAWS | MADE)[name], data(SHAPES[shape])
    torch.manual_seed(3)
    with single_device():
        one = sl.jit(draw)(x)
    for mesh in MESHES:
        assert torch.equal(sharded_run(draw, mesh, x), one), mesh


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["8", "2x2x2"])
@pytest.mark.parametrize("name", DRAWS)
def test_operations_on_sharded_tensors_draw_what_plain_ones_do(name: str, mesh: str) -> None:
    x = data(SHAPES["uneven"])
    torch.manual_seed(3)
    with sl.global_random():
        plain = DRAWS[name](x)
    after = torch.rand(3)
    with Mesh(MESHES[mesh]):
        torch.manual_seed(3)
        drawn = DRAWS[name](sl.shard(x, SPECS[mesh]))
    assert torch.equal(whole(drawn), plain)
    assert torch.equal(torch.rand(3), after)  # both took as many numbers from torch's generator


def test_each_device_draws_its_own_part() -> None:
    with Mesh(MESHES["2x4"]):
        plan = sl.jit(lambda: torch.randn(8, 12), out_specs="_@a _@b").plan()
    (draw,) = [s for s in plan.compiled.program.steps if "draw" in str(getattr(s, "target", ""))]
    assert [n if isinstance(n, int) else str(n) for n in draw.args[4]] == [4, 3]
    x = sl.shard  # in place, numbers lie where the tensor lies
    with Mesh(MESHES["2x4"]):
        assert str(x(torch.zeros(8, 12), "_@a _@b").normal_().sharding) == "8@a, 12@b"


@pytest.mark.parametrize("spec", ["_ (t h@b d)", "n@a (t h@b d@c)", "n@b (t h@(a c) d)"])
def test_a_factor_inside_a_dim_may_be_cut(spec: str) -> None:
    x = torch.ones(6, 60)
    with Mesh(MESHES["2x2x2"]):
        step = sl.jit(lambda x: F.dropout(x) + torch.randn(6, 60))
        placed = sl.shard(x, spec, t=3, h=4, d=5)
        plan = step.plan(placed)
        torch.manual_seed(3)
        found = step(placed)
        torch.manual_seed(3)
        with single_device():
            one = step(x)
    assert torch.equal(whole(found), one)
    assert found.sharding.canonical == placed.sharding.canonical  # type: ignore[attr-defined]
    draws = [s for s in plan.compiled.program.steps if "draw" in str(getattr(s, "target", ""))]
    first = {"a": 0, "b": 0, "c": 0}
    drawn = [math.prod(n.at(first) if hasattr(n, "at") else n for n in s.args[4]) for s in draws]  # type: ignore[union-attr]
    assert drawn == [math.prod(placed.to_local().shape)] * 2  # type: ignore[attr-defined]


# --- state ------------------------------------------------------------------------------------------------------------


def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.dropout(x, 0.5), torch.rand_like(x)


def test_calls_draw_anew_without_compiling_again() -> None:
    with Mesh(MESHES["2x4"]):
        step, x = sl.jit(noisy), torch.ones(8, 12)
        first, second = step(x), step(x)
        assert not step.retraces
        assert len(step.programs.entries) == 1
        assert not any(torch.equal(whole(a), whole(b)) for a, b in zip(first, second, strict=True))
        assert not torch.equal(whole(first[0]) != 0, whole(first[1]) < 0.5)


def test_torchs_seed_and_state_are_ours() -> None:
    with Mesh(MESHES["2x4"]):
        step, x = sl.jit(lambda x: noisy(x)[1]), torch.ones(8, 12)
        torch.manual_seed(7)
        first, state, second = whole(step(x)), torch.get_rng_state(), whole(step(x))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            assert torch.equal(whole(step(x)), first)
        third = whole(step(x))
        torch.set_rng_state(state)
        assert torch.equal(whole(step(x)), second)
        assert torch.equal(whole(step(x)), third)


def test_a_call_takes_one_number_and_planning_takes_none() -> None:
    torch.manual_seed(7)
    torch.randint(1 << 62, ())
    after = torch.rand(3)
    with Mesh(MESHES["2x4"]):
        torch.manual_seed(7)
        step, x = sl.jit(noisy), torch.ones(8, 12)
        step.plan(x)
        step(x)
        assert torch.equal(torch.rand(3), after)
        torch.manual_seed(7)
        sl.jit(lambda x: x + 1)(x)
        torch.randint(1 << 62, ())
        assert torch.equal(torch.rand(3), after)


def test_generators_as_arguments() -> None:
    g = torch.Generator()

    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand(3, generator=g), torch.rand_like(x) + torch.empty(5).normal_(generator=g)

    def run(seed: int, own: int) -> tuple[Tensor, ...]:
        g.manual_seed(seed)
        torch.manual_seed(own)
        return tuple(map(whole, step(torch.ones(4, 5))))

    with Mesh(MESHES["8"]):
        step = sl.jit(draw)
        a, b, c, again = run(1, 1), run(2, 1), run(1, 2), run(1, 1)
        torch.manual_seed(1)
        g.manual_seed(1)
        with single_device():
            one = step(torch.ones(4, 5))
    assert all(torch.equal(x, y) for x, y in zip(a, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(a, one, strict=True))
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[0], c[0])
    assert not torch.equal(a[1], c[1])


def test_plain_code_is_left_alone() -> None:
    def draws() -> list[Tensor]:
        torch.manual_seed(2)
        x = torch.ones(40, 3)
        return [torch.randn(4), F.dropout(x), torch.randperm(9), nn.Linear(3, 4).weight.detach()]

    want = draws()
    with Mesh(MESHES["8"]):
        sl.jit(noisy)(torch.ones(8, 2))
        assert all(torch.equal(a, b) for a, b in zip(draws(), want, strict=True))
    with single_device():
        assert all(torch.equal(a, b) for a, b in zip(draws(), want, strict=True))
    with sl.global_random():
        assert not any(torch.equal(a, b) for a, b in zip(draws(), want, strict=True))


# --- initialization ---------------------------------------------------------------------------------------------------

INITS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": lambda w: nn.init.uniform_(w, -1, 2),
    "normal": lambda w: nn.init.normal_(w, 1, 2),
    "trunc_normal": nn.init.trunc_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
}


@pytest.mark.parametrize("name", INITS)
def test_init(name: str) -> None:
    torch.manual_seed(4)
    with sl.global_random():
        plain = INITS[name](torch.empty(7, 5))
    for mesh, axes in MESHES.items():
        with Mesh(axes):
            w = nn.Parameter(sl.shard(torch.empty(7, 5), SPECS[mesh]))
            torch.manual_seed(4)
            INITS[name](w)
            assert torch.equal(whole(w.detach()), plain)


def test_a_model_is_made_in_pieces() -> None:
    def init() -> dict[str, Tensor]:
        return {k: p.detach() for k, p in nn.TransformerEncoderLayer(8, 2, 16).named_parameters()}

    specs = {"self_attn.in_proj_weight": "_@(a c) _", "linear1.weight": "_@b _@a"}
    torch.manual_seed(4)
    with single_device():
        plain = sl.jit(init)()
    with Mesh(MESHES["2x2x2"]):
        torch.manual_seed(4)
        made = sl.jit(init, out_specs={k: specs.get(k) for k in plain})()
    assert str(made["linear1.weight"].sharding) == "16@b, 8@a"
    assert all(torch.equal(whole(made[k]), plain[k]) for k in plain)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "no form": (
        lambda x: torch.poisson(x) + torch.poisson(x),
        [
            "the program draws random numbers by ops that cannot be sharded, in 2 places:",
            "aten.poisson.default at",
            "(2 times)",
            "Remedy: draw them outside and pass them in",
        ],
    ),
    "binomial": (lambda x: torch.binomial(x, x), ["aten.binomial.default at"]),
    "gamma": (torch._standard_gamma, ["aten._standard_gamma.default at"]),
    "probability": (lambda x: x.clone().bernoulli_(1.5), ["p=1.5", "Rule: a probability lies between 0 and 1"]),
    "range": (lambda x: x.clone().uniform_(3, 2), ["from=3.0, to=2.0", "Rule: a range ends where it begins"]),
    "empty range": (lambda x: torch.randint(3, 3, (4,)), ["low=3, high=3", "Rule: a range of integers is not empty"]),
    "deviation": (lambda x: x.clone().normal_(0, -1), ["std=-1", "Rule: a standard deviation is not negative"]),
    "rate": (lambda x: x.clone().exponential_(0), ["lambd=0", "Rule: a rate is above 0"]),
    "integers": (lambda x: torch.rand(3, dtype=torch.int64), ["aten.rand.default cannot draw int64[3]"]),
    "samples": (lambda x: torch.multinomial(x, 9), ["num_samples=9", "as many samples as classes"]),
    "out": (
        lambda x: torch.rand(3, out=torch.empty(2, 3)),
        ["Rule: out has the shape of what is drawn: [3]"],
    ),
    "body": (
        lambda x: sl.shard_map(lambda x: x + torch.rand_like(x), in_specs=("_@a _",), out_specs="_@a _")(x),
        ["a shard_map body draws random numbers", "Remedy: draw outside"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    draw, texts = REFUSED[name]
    with Mesh(a=4), pytest.raises(ShardingError) as e:
        sl.jit(draw).plan(torch.rand(4, 5))
    assert all(text in str(e.value) for text in texts), str(e.value)


# --- what is communicated, and ranks ----------------------------------------------------------------------------------


def test_the_plan_shows_how_the_key_is_agreed_on() -> None:
    for mesh, axes in MESHES.items():
        with Mesh(axes):
            found = sl.jit(noisy).plan(torch.ones(8, 12)).collectives
        assert [(c.kind, c.axes) for c in found] == ([] if mesh == "1" else [("all_reduce", tuple(axes))])
        assert all(c.bytes <= 16 and "call_key" in c.value for c in found)


def on_a_rank(seeds: list[int], names: list[str], shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What a program, operations and plain code draw where every rank has its seed; and torch, after it all."""
    x = data(shape)
    with Mesh(a=2, b=2) as mesh:
        torch.manual_seed(seeds[mesh.rank])
        programs = [whole(sl.jit((DRAWS | MADE)[n], in_specs=("_@a _@b",))(x)) for n in names]
        placed = sl.shard(x, "_@a _@b")
        eager = [whole(DRAWS[n](placed)) for n in names if n in DRAWS]
        with sl.global_random():
            eager.append(torch.randn(5))
        return programs, eager, torch.rand(4)


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_draw_what_virtual_devices_draw() -> None:
    names, shape = ["dropout", "randn_like", "randperm", "multinomial", "bernoulli_ tensor"], (7, 5)
    torch.manual_seed(11)
    with Mesh(a=2, b=2):
        x = data(shape)
        programs = [whole(sl.jit((DRAWS | MADE)[n], in_specs=("_@a _@b",))(x)) for n in names]
        eager = [whole(DRAWS[n](sl.shard(x, "_@a _@b"))) for n in names if n in DRAWS]
        with sl.global_random():
            eager.append(torch.randn(5))
        after = torch.rand(4)
    for seeds in ([11, 12, 11, 14],):
        results = run_ranks(on_a_rank, 4, seeds, names, shape)
        for rank, (found, ops, rest) in enumerate(results):
            assert all(torch.equal(a, b) for a, b in zip(found, programs, strict=True)), (seeds, rank)
            assert all(torch.equal(a, b) for a, b in zip(ops, eager, strict=True)), (seeds, rank)
            assert torch.equal(rest, after) == (seeds[rank] == 11)


def _forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return x + torch.randn(3)


def _set_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = x + torch.randn(3)
    torch.set_rng_state(state)
    return y


@pytest.mark.parametrize("fn", [_forked, _set_back])
def test_a_call_that_sets_the_generator_back_takes_no_number(fn):
    with sl.Mesh(data=2):
        step, x = sl.jit(fn), torch.zeros(3)
        torch.manual_seed(0)
        own = torch.rand(2)
        torch.manual_seed(0)
        first, second = step(x).full_tensor(), step(x).full_tensor()
        assert torch.equal(first, second)
        with sl.global_random():
            assert torch.equal(fn(x), first)
        assert torch.equal(torch.rand(2), own)
