"""`shard` of a value that lives elsewhere is a move: at its line, and at no other. The oracle is plain torch."""

from __future__ import annotations

import linecache
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, Spec, shard
from shardlib.core.context import single_device
from shardlib.testing.check import run_unshared
from tests.helpers.ranks import run_ranks
from tests.validation.programs.campaign import broken_promise, counting

Sizes = dict[str, int]
MESHES: tuple[Sizes, ...] = ({"a": 2}, {"a": 4}, {"a": 8}, {"a": 3, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})
DIMS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


# --- chains that nobody thought of ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A function of one tensor, most of whose lines are shards; `said` are the specs of those, by name."""

    mesh: Sizes
    shape: tuple[int, ...]
    lines: tuple[str, ...]
    said: dict[str, str]
    outputs: tuple[str, ...]
    in_spec: str | None
    out_specs: tuple[str | None, ...]

    @property
    def source(self) -> str:
        return "\n".join(["def f(x):", *(f"    {x}" for x in self.lines), f"    return ({', '.join(self.outputs)},)"])


class Drawing:
    def __init__(self, seed: int, *, plain: bool = False, meshes: Sequence[Sizes] = MESHES) -> None:
        self.rng = random.Random(seed)
        self.meshes = meshes
        self.plain = plain  # only shards, of one whole axis a dim, in even chunks

    def chain(self) -> Chain:
        rng = self.rng
        self.mesh = rng.choice(self.meshes)
        shape = tuple(rng.choice((24, 48) if self.plain else DIMS) for _ in range(rng.choice([1, 2, 2, 3])))
        self.shapes: dict[str, tuple[int, ...]] = {"x": shape}
        self.said: dict[str, str] = {}
        lines, last = [], "x"
        for i in range(rng.randint(2, 6)):
            of = last if self.plain or rng.random() < 0.8 else rng.choice(list(self.shapes))
            last = f"v{i}"
            lines.append(f"{last} = {self.call(last, of)}")
        outputs = (last,) if self.plain else (last, *rng.choices(list(self.shapes), k=rng.randint(0, 2)))
        specs = tuple(self.spec(self.shapes[o]) if not self.plain and rng.random() < 0.2 else None for o in outputs)
        in_spec = self.spec(shape) if self.plain or rng.random() < 0.6 else None
        return Chain(self.mesh, shape, tuple(lines), self.said, outputs, in_spec, specs)

    def call(self, name: str, of: str) -> str:
        shape, rng = self.shapes[of], self.rng
        others = [
            (f"torch.sin({of})", shape),
            (f"{of} + 0.5 * {rng.choice([x for x, s in self.shapes.items() if s == shape])}", shape),
            (f"{of}.reshape(-1)", (math.prod(shape),)),
        ]
        if shape:
            others += [(f"{of}.transpose(0, -1)", (shape[-1], *shape[1:-1], shape[0]) if len(shape) > 1 else shape)]
            others += [(f"{of}.sum(0)", shape[1:])]
        if len(shape) == 2:
            others += [(f"{of} @ {of}.t()", (shape[0], shape[0]))]
        if not self.plain and rng.random() < 0.4:
            text, self.shapes[name] = rng.choice(others)
            return text
        self.said[name], self.shapes[name] = self.spec(shape), shape
        return f"shard({of}, {self.said[name]!r})"

    def spec(self, shape: tuple[int, ...]) -> str:
        rng, axes = self.rng, self._axes()
        if rng.random() < 0.1:
            return "..."
        dims = []
        for n in shape:
            factors = [k for k in range(2, n) if n % k == 0]
            if not self.plain and factors and rng.random() < 0.2:
                k = rng.choice(factors)
                dims.append(f"(_={k}{self._over(axes, 0)} _={n // k}{self._over(axes, 0)})")
            else:
                dims.append(f"_{self._over(axes, n)}")
            if not self.plain and "[" not in dims[-1] and rng.random() < 0.1:
                dims[-1] += "?"
        return " ".join(dims)

    def _axes(self) -> list[tuple[str, int]]:
        out: list[tuple[str, int]] = []
        for name, n in self.mesh.items():
            parts = [(f"{name}:(1)2", 2), (f"{name}:(2){n // 2}", n // 2)]
            out += parts if not self.plain and n in (4, 8) and self.rng.random() < 0.3 else [(name, n)]
        self.rng.shuffle(out)
        return out

    def _over(self, axes: list[tuple[str, int]], size: int) -> str:
        """Some of `axes`, and perhaps in which pieces they cut a dim of `size`."""
        taken = [axes.pop() for _ in range(min(self.rng.choice([0, 1, 1, 1 if self.plain else 2]), len(axes)))]
        if not taken:
            return ""
        names = " ".join(name for name, _ in taken)
        text = f"@{names}" if len(taken) == 1 else f"@({names})"
        if self.plain or size < 2 or self.rng.random() > 0.2:
            return text
        edges = sorted(self.rng.randint(0, size) for _ in range(math.prod(n for _, n in taken) - 1))
        return f"{text}=[{' '.join(str(b - a) for a, b in zip([0, *edges], [*edges, size], strict=True))}]"


def _function(chain: Chain, name: str = "<chain>") -> Callable[[Tensor], tuple[Tensor, ...]]:
    linecache.cache[name] = (len(chain.source), None, chain.source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"torch": torch, "shard": shard}
    exec(compile(chain.source, name, "exec"), names)
    fn: Callable[[Tensor], tuple[Tensor, ...]] = names["f"]
    return fn


def _gradient(fn: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], Any]:
    """The gradient of a number that weighs every element of every result differently, and the results."""

    def loss(x: Tensor) -> tuple[Tensor, Any]:
        out = fn(x)
        weighed = [(t * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)) ** 2 for t in out]
        return torch.stack([w.sum() for w in weighed]).sum(), out

    return sl.grad(loss, has_aux=True)


def _layout(spec: str, shape: tuple[int, ...], mesh: Mesh, *, pieces: bool) -> str:
    layout = Spec.convert(spec).resolve(shape, mesh, name="x").layout
    return str((layout if pieces else layout.chunked).canonical)


@pytest.mark.long
@pytest.mark.sampled(8)
@pytest.mark.parametrize("block", range(8))
def test_any_chain(block: int) -> None:
    """Values and gradients are those of one device, bytes those of the plan, and what is returned lives as it was said.

    Views, sums, factors, parts of axes, chosen pieces and open dims in between.
    """
    for seed in range(10 * block, 10 * block + 10):
        chain = Drawing(seed).chain()
        told = f"seed {seed}, {chain.mesh}, {chain.shape}, {chain.in_spec!r} -> {chain.out_specs}\n{chain.source}"
        fn = _function(chain)
        x = torch.randn(chain.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        with single_device():
            slope, values = _gradient(fn)(x)
        with Mesh(**chain.mesh) as mesh:
            step = sl.jit(_gradient(fn), in_specs=(chain.in_spec,), out_specs=(None, chain.out_specs))
            plan = step.plan(x)
            found_slope, found = step(x)
            with counting() as calls:
                run_unshared(step, mesh, [x], {})
            assert not broken_promise(plan.compiled.program.collectives, calls, mesh), told
            for name, asked, out in zip(chain.outputs, chain.out_specs, found, strict=True):
                said = chain.said.get(name, "?") if asked is None else "?"
                if "?" not in said:
                    pieces = "=[" in said
                    lives = out.sharding if pieces else out.sharding.chunked
                    assert str(lives.canonical) == _layout(said, tuple(out.shape), mesh, pieces=pieces), told
            for a, b in zip((slope, *values), (found_slope, *found), strict=True):
                torch.testing.assert_close(b.full_tensor(), a, rtol=1e-9, atol=1e-9, msg=lambda m: f"{told}\n{m}")  # noqa: B023


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("block", range(4))
def test_who_asks_pays(block: int) -> None:
    """Collectives of a chain stand at the shards that say another place than the line before, forward and backward."""
    for seed in range(10 * block, 10 * block + 10):
        chain = Drawing(seed, plain=True).chain()
        fn = _function(chain, f"<chain {seed}>")
        with Mesh.abstract(**chain.mesh) as mesh:
            places = [_layout(s, chain.shape, mesh, pieces=False) for s in (str(chain.in_spec), *chain.said.values())]
            moves = {i + 2 for i in range(len(chain.lines)) if places[i] != places[i + 1]}
            weights = torch.empty(chain.shape, device="meta")
            forward = sl.jit(fn, in_specs=(chain.in_spec,)).plan(weights)
            both = sl.jit(sl.grad(lambda x: (fn(x)[0] ** 2).sum()), in_specs=(chain.in_spec,)).plan(weights)  # noqa: B023
        assert {lineno for _, _, lineno, _ in _asked(forward)} <= moves, chain.source
        assert all("asked for by shard(" in c.reason for c in forward.collectives), chain.source
        # The cotangent of a shard's operand lives where the shard before put it, so that shard's line asks for it.
        back = {lineno for _, backward, lineno, _ in _asked(both) if backward}
        # That of the input goes to where the input is.
        assert back <= {i - 1 for i in moves} | (moves & {2}), chain.source


def _asked(plan: sl.Plan) -> list[tuple[str, bool, int, str]]:
    """Every collective: its kind, whether it is a gradient's, and its line."""
    lines = [(c, c.line) for c in plan.compiled.program.collectives]
    return [(c.kind, c.backward, line.lineno, line.text) for c, line in lines if line is not None]


# --- chosen cases -----------------------------------------------------------------------------------------------------

X = torch.arange(128.0, dtype=torch.float64).view(16, 8)


def _kinds(fn: Callable[..., Any], *args: Any, in_specs: Any = None, **mesh: int) -> list[tuple[str, str]]:
    """Kind and source line of every collective."""
    with Mesh(**mesh):
        step = sl.jit(fn, in_specs=in_specs)
        out = step(*args)
        with single_device():
            torch.testing.assert_close(out.full_tensor(), fn(*args))
        return [(kind, text) for kind, _, _, text in _asked(step.plan(*args))]


def test_an_input_that_in_specs_place_elsewhere() -> None:
    def fn(x: Tensor) -> Tensor:
        x = shard(x, "_ e@data")
        return x.sin()

    assert _kinds(fn, X, in_specs=("b@data _",), data=4) == [("all_to_all", 'x = shard(x, "_ e@data")')]


def test_beside_the_argument_that_it_was_placed_from() -> None:
    """Whose factors it cannot have: a piece ends inside one."""
    fn = lambda x: shard(x, "_@b=[3 5]") + x
    with Mesh(b=2):
        x = torch.arange(8.0)
        assert torch.equal(sl.jit(fn, in_specs=("(_=4 _=2@b)",))(x).full_tensor(), x + x)


def test_a_placed_argument_moves_too() -> None:
    with Mesh(data=4):
        step = sl.jit(lambda x: shard(x, "_ e@data") * 2)
        placed = shard(X, "b@data _")
        assert [c.kind for c in step.plan(placed).collectives] == ["all_to_all"]
        assert torch.equal(step(placed).full_tensor(), X * 2)


def test_only_the_argument_itself_contradicts() -> None:
    with Mesh(data=4):
        step = sl.jit(lambda x: shard(x, "_ _"), in_specs=("_ e@data",))
        with pytest.raises(sl.ShardingError, match="1 of 1 arguments with a spec is elsewhere"):
            step(shard(X, "b@data _"))


def test_to_whole_and_back() -> None:
    """Making it whole is a gather; cutting a whole value is free."""

    def fn(x: Tensor) -> Tensor:
        x = shard(x, sl.P())
        return shard(x, "b@data _")

    assert _kinds(fn, X, in_specs=("b@data _",), data=4) == [("all_gather", "x = shard(x, sl.P())")]


def test_a_sum_made_whole_and_then_scattered() -> None:
    def fn(x: Tensor) -> Tensor:
        y = shard(x.t() @ x, "m n")
        return shard(y, "m@data n")

    assert _kinds(fn, X, in_specs=("b@data _",), data=4) == [("all_reduce", 'y = shard(x.t() @ x, "m n")')]


def test_a_view_of_what_moved() -> None:
    def fn(x: Tensor) -> Tensor:
        y = shard(x, "b@data e").t()
        z = shard(y, "e@data b")
        return shard(z.reshape(2, 4, 16), "_ _ b@data")

    kinds = _kinds(fn, X, data=4)
    assert [kind for kind, _ in kinds] == ["all_to_all", "all_to_all"]
    assert [line.split(" = ")[0] for _, line in kinds] == ["z", 'return shard(z.reshape(2, 4, 16), "_ _ b@data")']


def test_every_place_of_one_value_is_returned() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = shard(x * 2, "b@data e")
        z = shard(y, "b e@data")
        return y, z, y + z, shard(z, "b e")

    with Mesh(data=4):
        out = sl.jit(fn)(X)
    assert [sl.typeof(t) for t in (*out[:2], out[3])] == ["f64[16@data, 8]", "f64[16, 8@data]", "f64[16, 8]"]
    assert all(torch.equal(t.full_tensor(), X * k) for t, k in zip(out, (2, 2, 4, 2), strict=True))


def test_the_cotangent_moves_back() -> None:
    def fn(x: Tensor) -> Tensor:
        y = shard(x.sin(), "b@data e")
        z = shard(y, "b e@data")
        return z.cos().sum()

    with Mesh(data=4):
        step = sl.jit(sl.grad(fn))
        torch.testing.assert_close(step(X).full_tensor(), -X.sin().sin() * X.cos())
        moves = [(kind, backward, text) for kind, backward, _, text in _asked(step.plan(X))]
        assert sl.typeof(step(X)) == "f64[16@data, 8]"
    assert moves == [
        ("all_to_all", False, 'z = shard(y, "b e@data")'),
        ("all_to_all", True, 'y = shard(x.sin(), "b@data e")'),
    ]


def test_under_vmap() -> None:
    def one(x: Tensor) -> Tensor:
        return shard(shard(x.sin(), "b@data e"), "b e@data")

    assert [k for k, _ in _kinds(sl.vmap(one), torch.stack([X, X + 1, X + 2]), data=4)] == ["all_to_all"]


def test_beside_a_shard_map() -> None:
    def fn(x: Tensor) -> Tensor:
        x = shard(x, "b@data e")
        y = sl.shard_map(lambda x: x * 2, in_specs="b e@data", out_specs="b e@data")(x)
        return shard(y, "b@data e")

    kinds = _kinds(fn, X, data=4)
    assert [kind for kind, _ in kinds] == ["all_to_all", "all_to_all"]
    assert kinds[1][1] == 'return shard(y, "b@data e")'


def test_factors_that_have_no_cut_in_common() -> None:
    """The result lives as the last shard says, also where the way there leads over the whole tensor."""
    x = torch.arange(12.0)
    with Mesh(a=2, b=3):
        out, view = sl.jit(_regrouped)(x)
        assert (str(out.sharding), str(view.sharding)) == ("(3 4@a)", "4@a, 3")
        assert torch.equal(out.full_tensor(), x * 2)
        assert torch.equal(view.full_tensor(), (x * 2).view(3, 4).t())


def _regrouped(x: Tensor) -> tuple[Tensor, Tensor]:
    y = shard(shard(x * 2, "(_=2 _=6@b)"), "(_=3 _=4@a)")
    return y, y.view(3, 4).t()


def test_two_choices_that_meet() -> None:
    """One class has one choice, the first; what has another is returned as it was said, and moves where it is read."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = shard(x * 2, "n@data=[5 3 8 0]")
        z = shard(y, "n@data=[8 8 0 0]")
        return y + z, z

    x = torch.arange(16.0, dtype=torch.float64)
    with Mesh(data=4):
        added, moved = sl.jit(fn)(x)
    assert [str(t.sharding) for t in (added, moved)] == ["16@data=[5 3 8 0]", "16@data=[8 8 0 0]"]
    assert torch.equal(added.full_tensor(), x * 4)
    assert torch.equal(moved.full_tensor(), x * 2)


@pytest.mark.parametrize(
    ("first", "second", "sent"),
    [
        ("[5 3 8 0]", "[8 8 0 0]", 64),
        ("[5 3 8 0]", "[4 4 4 4]", 32),
        ("[4 4 4 4]", "[8 8 0 0]", 32),
        ("[8 8 0 0]", "", 0),
    ],
)
def test_other_pieces(first: str, second: str, sent: int) -> None:
    """What follows has the second pieces; a spec that says none leaves them."""

    def fn(x: Tensor) -> Tensor:
        y = shard(x * 2, f"n@data={first}")
        return shard(y, f"n@data={second}" if second else "n@data") * 3

    x = torch.arange(16.0, dtype=torch.float64)
    with Mesh(data=4):
        step = sl.jit(fn)
        assert torch.equal(step(x).full_tensor(), x * 6)
        wanted = f"[{second or first}]".replace("[[", "[").replace("]]", "]")
        assert str(step(x).sharding) == ("16@data" if "4 4" in wanted else f"16@data={wanted}")
        assert sum(c.bytes for c in step.plan(x).collectives) == sent


def test_pieces_and_factors_at_once() -> None:
    def fn(x: Tensor) -> Tensor:
        y = shard(x * 2, "_@a=[4 0] (_=2 _=6@b)")
        return shard(y, "_@a=[1 3] (_=3 _=4@b)")

    x = torch.arange(48.0).view(4, 12)
    with Mesh(a=2, b=3):
        out = sl.jit(fn)(x)
    assert torch.equal(out.full_tensor(), x * 2)
    assert str(out.sharding) == "4@a=[1 3], (3 4@b)"


def test_a_constant_lives_where_it_is_said() -> None:
    with Mesh(data=2):
        out = sl.jit(lambda x: (shard(torch.arange(8), "n@data"), x))(X)[0]
    assert sl.typeof(out) == "i64[8@data]"
    assert out.full_tensor().tolist() == list(range(8))


# --- Muon -------------------------------------------------------------------------------------------------------------


def _orthogonal(x: Tensor) -> Tensor:
    """Newton and Schulz: a stack of matrices, each near to an orthogonal one."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def _by_layers(grads: Tensor) -> Tensor:
    whole = shard(grads, "layer@data m n")
    return shard(_orthogonal(whole), "layer m@data n")


@pytest.mark.long
def test_muon_moves_its_stack_and_nothing_else() -> None:
    layers, m, n, devices = 32, 4096, 11008, 8
    stack = torch.empty(layers, m, n, device="meta")
    with Mesh.abstract(data=devices):
        plan = sl.jit(_by_layers, in_specs="layer m@data n", out_specs="layer m@data n").plan(stack)
    assert [c.kind for c in plan.collectives] == ["all_to_all", "all_to_all"]
    assert plan.comm_bytes == 2 * stack.nbytes / devices * (devices - 1) / devices
    small = torch.randn(6, 8, 5, dtype=torch.float64)
    with Mesh(data=4):
        found = sl.jit(_by_layers, in_specs="layer m@data n")(small).full_tensor()
    torch.testing.assert_close(found, _orthogonal(small))


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_a_rank(seeds: range) -> list[str]:
    """What is wrong with the values and gradients of these chains on this rank's pieces."""
    wrong = []
    for seed in seeds:
        chain = Drawing(seed, meshes=({"a": 4}, {"a": 2, "b": 2})).chain()
        x = torch.randn(chain.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        fn = _gradient(_function(chain))
        with single_device():
            slope, values = fn(x)
        with Mesh(**chain.mesh):
            found_slope, found = sl.jit(fn, in_specs=(chain.in_spec,), out_specs=(None, chain.out_specs))(x)
            for a, b in zip((slope, *values), (found_slope, *found), strict=True):
                if not torch.allclose(b.full_tensor(), a, rtol=1e-9, atol=1e-9):
                    wrong.append(f"seed {seed}\n{chain.source}")
    return wrong


@pytest.mark.long
@pytest.mark.ranks
def test_chains_on_ranks() -> None:
    assert run_ranks(_on_a_rank, 4, range(8)) == [[]] * 4
