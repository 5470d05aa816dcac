"""One layer is planned in place of many that are alike: program and decisions are those of planning every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler import pipeline as compiling
from shardlib.compiler.layer_folding import expand_program, fold_graph
from shardlib.compiler.program.text import show
from tests.models import w1, w1_sharded

LAYERS, D = 8, 256


@contextmanager
def folding(least: float) -> Iterator[list[int]]:
    """Graphs are folded if so many ops are left out; the numbers of layers that were left out, each time it held."""
    seen: list[int] = []
    written, worth = expand_program._Unroller.unrolled, fold_graph.WORTH

    def noted(self: Any) -> Any:
        seen.append(len(self.folded.left_out))
        return written(self)

    fold_graph.WORTH, expand_program._Unroller.unrolled = least, noted
    try:
        yield seen
    finally:
        fold_graph.WORTH, expand_program._Unroller.unrolled = worth, written


def compare(plan: Callable[[], sl.Plan]) -> list[int]:
    """Plan folded and not, and compare; the numbers of layers that were left out."""
    with folding(0) as seen:
        mine = plan()
    with folding(float("inf")):
        whole = plan()
    a, b = mine.compiled, whole.compiled
    assert show(a.program).splitlines() == show(b.program).splitlines()
    assert [str(c) for c in a.program.collectives] == [str(c) for c in b.program.collectives]
    assert [s.inside for s in a.program.steps if hasattr(s, "inside")] == [
        s.inside for s in b.program.steps if hasattr(s, "inside")
    ]
    for x, y in zip(a.graph.ops, b.graph.ops, strict=True):
        assert (x in a.propagated.units.unit) == (y in b.propagated.units.unit), x
        if x in a.propagated.units.unit:
            assert dict(a.propagated.assignment(x)) == dict(b.propagated.assignment(y)), x
    assert a.propagated.search.seconds == pytest.approx(b.propagated.search.seconds, rel=1e-9)
    return seen


@pytest.mark.parametrize(
    "mode", ["tp", *(pytest.param(x, marks=pytest.mark.long) for x in ("dp8", "fsdp8", "fsdp_tp", "tp_sp"))]
)
def test_modes_of_w1(mode: str) -> None:
    config = w1.Config(layers=LAYERS)
    said = w1.modes(config)[mode]
    mesh, args = w1_sharded.mesh_of(said, abstract=True), w1.abstract(config)

    def plan() -> sl.Plan:
        with mesh:
            return w1_sharded.sharded_step(said, config).plan(*args)

    assert compare(plan) == [LAYERS - 6]


class Block(nn.Module):
    """A layer with a gate, a norm, dropout, and what a test says."""

    def __init__(self, width: int = 2 * D, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=dtype)
        self.up, self.gate = (nn.Linear(D, width, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(width, D, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), 0.1, self.training)


class Deep(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.table = nn.Embedding(32, D)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(D, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Tapped(Deep):
    """The loss reads what one layer in the middle makes, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.table(tokens), torch.zeros(())
        for i, block in enumerate(self.blocks):
            x = block(x)
            seen = x.square().mean() if i == LAYERS else seen
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + seen


class Collected(Deep):
    """The loss reads what every layer makes, from a list."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.table(tokens), []
        for block in self.blocks:
            x = block(x)
            seen.append(x.square().mean())
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + torch.stack(seen).max()


class Reached(Deep):
    """Every layer reads what the table made, and all but the first what the one before the last made."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = before = self.table(tokens)
        for block in self.blocks:
            x, before = block(x + first) + before, x
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Shared(Deep):
    """One layer is called again and again, with a scale of its own each time."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(1)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(D)) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for scale in self.scales:
            x = self.blocks[0](x * scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Mixed(Deep):
    """One layer in the middle is wider than the others."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(layers)
        self.blocks[layers // 2] = Block(3 * D)


class Pairs(Deep):
    """Every second layer does something else."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x) if i % 2 else block(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Two(Deep):
    """Two stacks, the second of which reads the end of the first in every layer."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(layers)
        self.others = nn.ModuleList([Block(3 * D) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = y = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        for block in self.others:
            y = block(y + x)
        return F.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten())


TP = {"blocks.*.up.weight": "f@tensor _", "blocks.*.gate.weight": "f@tensor _", "blocks.*.down.weight": "_ f@tensor"}
MESH = sl.Mesh.abstract(data=2, tensor=2)
TOKENS = torch.zeros(64, 128, dtype=torch.long, device="meta")


def whole_step(kind: type[nn.Module], layers: int, specs: Any, **how: Any) -> Callable[[], sl.Plan]:
    with torch.device("meta"):
        model = kind(layers)
    with MESH:
        sl.parallelize(model, specs, strategy="fsdp")
    opt = torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, opt: Any, tokens: Tensor) -> Tensor:
        loss: Tensor = model(sl.shard(tokens, "batch@data _"))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    def plan() -> sl.Plan:
        with MESH:
            return sl.jit(step, **how).plan(model, opt, TOKENS)

    return plan


ODD = [(Tapped, 20, [2, 5]), (Mixed, 20, [3, 3]), (Pairs, 20, [3]), (Two, 10, [3, 2])]


@pytest.mark.parametrize(
    ("model", "layers", "left_out"),
    [
        (Deep, 10, [3]),
        (Collected, 10, []),
        (Reached, 12, []),
        (Shared, 10, [2]),
        *(pytest.param(*x, marks=pytest.mark.long) for x in ODD),
    ],
)
def test_whole_steps(model: type[Deep], layers: int, left_out: list[int]) -> None:
    """Clipped, with dropout, whatever is odd about the layers; those that are not alike are planned."""
    specs = TP if model is not Shared else {"head.weight": "v@tensor _"}
    assert compare(whole_step(model, layers, specs)) == left_out


@pytest.mark.long
def test_other_specs() -> None:
    """A layer whose weights lie elsewhere is not alike."""
    specs = {**TP, "blocks.12.down.weight": "_ _", "blocks.12.up.weight": "_ _"}
    specs |= {f"blocks.{i}.down.weight": TP["blocks.*.down.weight"] for i in range(24) if i != 12}
    specs |= {f"blocks.{i}.up.weight": TP["blocks.*.up.weight"] for i in range(24) if i != 12}
    del specs["blocks.*.down.weight"], specs["blocks.*.up.weight"]
    assert compare(whole_step(Deep, 24, specs)) == [6, 6]


@pytest.mark.long
def test_inner_layers_that_came_out_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is planned then."""
    monkeypatch.setattr(expand_program._Unroller, "is_steady", lambda self: False)
    assert compare(whole_step(Deep, 10, TP)) == []


@pytest.mark.long
def test_values_and_gradients() -> None:
    """A folded step on devices, against one device: dropout of every layer has numbers of its own."""

    def loss(weights: list[list[Tensor]], x: Tensor) -> Tensor:
        for up, down in weights:
            x = x + F.dropout(torch.relu(sl.shard(x @ up, "_ f@tensor")) @ down, 0.25)
        return x.square().mean()

    def step(weights: list[list[Tensor]], x: Tensor) -> Any:
        return torch.func.grad_and_value(loss)(weights, x)

    torch.manual_seed(3)
    weights = [[0.2 * torch.randn(8, 16), 0.2 * torch.randn(16, 8)] for _ in range(9)]
    x = torch.randn(4, 8)
    with folding(0) as seen, sl.Mesh(data=2, tensor=2) as mesh:
        torch.manual_seed(5)
        grads, value = sl.jit(step, in_specs=(None, "batch@data _"))(weights, x)
    assert seen == [2]
    with sl.Mesh(data=1, tensor=1):
        torch.manual_seed(5)
        plain, alone = sl.jit(step)(weights, x)
    torch.testing.assert_close(value.full_tensor(), alone.full_tensor())
    for mine, theirs in zip(grads, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())
    assert mesh.size == 4


@pytest.mark.long
def test_scans() -> None:
    """Weights of all layers in one tensor each, which are handed out, and whose gradients are collected."""

    def loss(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
        def layer(x: Tensor, mine: tuple[Tensor, ...]) -> tuple[Tensor, None]:
            return x + torch.tanh(sl.shard(x @ mine[0], "_ f@tensor")) @ mine[1], None

        return sl.scan(layer, x, weights)[0].square().mean()

    def step(weights: tuple[Tensor, ...], x: Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(weights, x)
        return value, tuple(w - g for w, g in zip(weights, grads, strict=True))

    torch.manual_seed(1)
    weights, x = (0.3 * torch.randn(10, 8, 16), 0.3 * torch.randn(10, 16, 8)), torch.randn(4, 8)
    how = (("_ _ f@tensor", "_ f@tensor _"), "batch@data _")

    def plan() -> sl.Plan:
        with sl.Mesh(data=2, tensor=2):
            return sl.jit(step, in_specs=how).plan(weights, x)

    assert compare(plan) == [3]
    with folding(0), sl.Mesh(data=2, tensor=2):
        value, got = sl.jit(step, in_specs=how)(weights, x)
    with sl.Mesh(data=1, tensor=1):
        want, whole = sl.jit(step)(weights, x)
    for a, b in zip((value, *got), (want, *whole), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor())


def test_constants_of_layers() -> None:
    """Tensors that layers make of numbers of their own are no part that they have in common."""

    def step(weights: list[Tensor], x: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            x = x + torch.relu(x @ w) * torch.tensor([1.0, 0.5 * i])[0] + torch.tensor([i, 2])[1]
        return x.square().sum()

    weights, x = [torch.eye(8) for _ in range(12)], torch.ones(4, 8)
    with folding(0), sl.Mesh(data=2):
        value = sl.jit(step, in_specs=(None, "batch@data _"))(weights, x)
    torch.testing.assert_close(value.full_tensor(), step(weights, x))


def _hidden(weights: list[Tensor], x: Tensor) -> list[Tensor]:
    found = []
    for w in weights:
        x = torch.tanh(x @ w)
        found.append(x)
    return found


COLLECTED: dict[str, Callable[[list[Tensor]], Any]] = {
    "in order": lambda found: torch.stack(found).softmax(-1),
    "reversed": lambda found: torch.stack(found[::-1]).softmax(-1),
    "twice": lambda found: torch.stack([x for x in found for _ in range(2)]).softmax(-1),
    "both ways": lambda found: torch.cat([x for two in zip(found, found[::-1], strict=True) for x in two], -1),
    "returned": lambda found: found,
    "returned reversed": lambda found: dict(enumerate(found[::-1])),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_what_is_collected_in_a_form_that_the_next_layer_made(name: str) -> None:
    """A value of one layer is gathered for the next: there its variable stands."""

    def step(weights: list[Tensor], x: Tensor) -> Any:
        return COLLECTED[name](_hidden(weights, x))

    torch.manual_seed(2)
    weights, x = [0.4 * torch.randn(8, 8) for _ in range(10)], torch.randn(16, 8)
    how: dict[str, Any] = {"in_specs": ("_ f@tensor", "b@data _")}
    if name.startswith("returned"):
        how["out_specs"] = "b@data _"
    with folding(0) as seen, sl.Mesh(data=2, tensor=2):
        got = sl.jit(step, **how)(weights, x)
    assert seen
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(got), leaves(step(weights, x)), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def test_two_foldings_in_uneven_pieces() -> None:
    """What stands apart in the inner one is known to the outer one."""

    def step(weights: list[Tensor], x: Tensor) -> Tensor:
        for i, w in enumerate(weights):
            x = (torch.relu if i != 9 else torch.tanh)(x @ w)
        return x

    torch.manual_seed(4)
    weights, x = [0.4 * torch.randn(8, 8) for _ in range(22)], torch.randn(16, 8)
    with folding(0) as seen, sl.Mesh(data=2, tensor=2):
        jitted = sl.jit(step, in_specs=("e@tensor=[3 5] f@data=[7 1]", "b@data _"))
        got, plan = jitted(weights, x), jitted.plan(weights, x)
    assert len(seen) >= 2
    torch.testing.assert_close(got.full_tensor(), step(weights, x))
    assert "weights_3" in plan.explain("weights_3").partition(" is ")[0]


def test_names_in_reasons() -> None:
    """Inputs that are called like words of reasons; and who asks for a cut is named in every layer."""
    names = ["a", "b", "over", "sum", "all", "returned", "e", "needs", "of", "read"]

    def step(x: Tensor, **weights: Tensor) -> Tensor:
        for name in names:
            x = torch.tanh(x @ weights[name])
        return x

    weights = {name: torch.zeros(8, 8) for name in names}
    told = []
    for least in (0, float("inf")):
        with folding(least), sl.Mesh(data=2, tensor=2):
            plan = sl.jit(step, in_specs=("b@data _", "e@tensor _")).plan(torch.zeros(16, 8), **weights)
        told.append(
            ([c.reason for c in plan.compiled.program.collectives], [plan.explain(f"mm_{i}") for i in range(1, 10)])
        )
    assert told[0] == told[1]


@pytest.mark.long
def test_one_layer_costs_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate of the short graph is that of the whole, so that layers weigh as much beside the rest."""
    seconds: list[float] = []
    decide = compiling.propagate

    def noted(*args: Any) -> Any:
        found = decide(*args)
        seconds.append(found.search.seconds)
        return found

    monkeypatch.setattr(compiling, "propagate", noted)
    plan = whole_step(Deep, 14, TP)
    for least in (0, float("inf")):
        with folding(least):
            plan()
    short, whole = seconds
    assert short == pytest.approx(whole, rel=1e-9)
