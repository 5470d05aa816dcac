"""Equal pieces of a program are traced once: the program is the one that tracing every call would have made."""

from __future__ import annotations

import contextvars
import queue
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.frontend import trace as tracing
from shardlib.frontend.reuse import subgraph_reuse

LAYERS = 5
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


@contextmanager
def pieces(after: int) -> Iterator[list[str]]:
    """What is traced apart, and what is refused, when calls are traced as they come `after` times."""
    seen: list[str] = []
    traced, before = subgraph_reuse.SubgraphReuse._trace, subgraph_reuse.AFTER

    def noted(self: Any, of: Any, run: Any, call: Any) -> Any:
        name = type(of).__name__ if isinstance(of, nn.Module) else of.__name__
        seen.append(f"not {name}")
        piece = traced(self, of, run, call)
        seen[-1] = name
        return piece

    subgraph_reuse.AFTER = after
    subgraph_reuse._IMPURE.clear()
    subgraph_reuse._BY_FLAGS.clear()
    subgraph_reuse.SubgraphReuse._trace = noted
    try:
        yield seen
    finally:
        subgraph_reuse.SubgraphReuse._trace, subgraph_reuse.AFTER = traced, before


def nodes(plan: sl.Plan) -> list[tuple[Any, ...]]:
    """A traced graph, node by node: op, arguments (nodes by their number), line, pass, shape."""
    number: dict[Any, int] = {}
    out = []
    for node in plan.compiled.traced.graph.graph.nodes:
        number[node] = len(number)
        args = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda x: f"%{number[x]}")
        shape = tuple(getattr(node.meta.get("val"), "shape", ()))
        target = str(node.target) if node.op == "call_function" else node.op
        out.append((node.name, target, str(args), str(node.meta.get("line")), bool(node.meta.get("backward")), shape))
    return out


class Block(nn.Module):
    """A layer that knows its number, and does not ask for it."""

    def __init__(self, number: int = 0, p: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.number = nn.Dropout(p), number

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(F.relu(self.up(self.norm(x)))))
        return y


class Asks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


class AsksForAll(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + vars(self)["number"])


class Parity(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.odd = number % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.odd else 3)


class Writes(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return super().forward(x)


COUNT = {"calls": 0, "scale": 1}


class Counts(Block):
    def forward(self, x: Tensor) -> Tensor:
        COUNT["calls"] += 1
        return super().forward(x)


class ByGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * COUNT["scale"]


class Scaled(nn.Module):
    """A global that the code of the layers reads changes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ByGlobal(i) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            COUNT["scale"] = 1 + i
            x = layer(x)
        COUNT["scale"] = 1
        return x


class Around(nn.Module):
    """Layers with something around them, or between them."""

    def __init__(self, layer: Callable[[int], nn.Module], call: Callable[[nn.Module, int, Any], Any]) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(layer(i) for i in range(LAYERS)), call

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.call(layer, i, x)
        return x


class Store:
    """What layers are handed, and fill."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.named: dict[Any, Any] = {}
        self.calls = 0


class Fills(Block):
    """It keeps what nobody differentiates, and what somebody does, at its own number."""

    def forward(self, x: Tensor, store: Any) -> Tensor:
        y = super().forward(x)
        store.kept.append(torch.tanh(y))
        store.named[self.number] = {"y": y * 2, "shape": y.shape}
        store.calls += 1
        return y * store.kept[self.number]


class Odd(Fills):
    """All but the last make the same."""

    def forward(self, x: Tensor, store: Any) -> Tensor:
        return self.ends(super().forward(x, store), x, last=self.number == LAYERS - 1)

    def ends(self, y: Tensor, x: Tensor, *, last: bool) -> Tensor:
        return y * 3 if last else y


class OddNumber(Odd):
    def ends(self, y: Tensor, x: Tensor, *, last: bool) -> Tensor:
        return y * (3 if last else 2)


class OddTensor(Odd):
    def ends(self, y: Tensor, x: Tensor, *, last: bool) -> Tensor:
        return y + (y if last else x)


class OddWeight(Odd):
    def ends(self, y: Tensor, x: Tensor, *, last: bool) -> Tensor:
        return y * (self.down.bias if last else self.norm.bias)


class Flagged(Odd):
    """Every other one does something else, as a number says."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.flag = (number + 1) % 2

    def ends(self, y: Tensor, x: Tensor, *, last: bool) -> Tensor:
        return y.sin() if self.flag else y


class Less(Odd):
    def ends(self, y: Tensor, x: Tensor, *, last: bool) -> Tensor:
        return y if last else y.sin()


class Chained(Block):
    """It finds what the one before has left."""

    def forward(self, x: Tensor, store: Any) -> Tensor:
        y = super().forward(x) + (store.kept[-1] if store.kept else 0)
        store.kept.append(y.sin())
        return y


LIMIT = torch.tensor(3.0)


class Slides(Block):
    """It keeps a part of what is saved, and a constant."""

    def forward(self, x: Tensor, store: Any) -> Tensor:
        y = super().forward(x).exp()
        store.kept.append(y[:, 2:])
        store.named[self.number] = {"y": LIMIT.to(y.device)}
        return torch.log(y + 1)


class Hides(Block):
    """The last one keeps a value where nobody looks."""

    def forward(self, x: Tensor, store: Any) -> Tensor:
        y = super().forward(x)
        z = y * 2
        store.kept.append(y.sin() if self.number < LAYERS - 1 else iter([z, y.sin()]))
        return y


class Overwrites(Block):
    def forward(self, x: Tensor, store: Any) -> Tensor:
        if not store.kept:
            store.kept.append(torch.zeros_like(x))
        store.kept[0].add_(x.detach())
        return super().forward(x) + store.kept[0]


class Tempered(torch.autograd.Function):
    """Its gradient knows a number that nobody asks for on the way there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (1 + ctx.number), None


class Tempers(Block):
    def forward(self, x: Tensor, store: Any) -> Tensor:
        store.calls += 1
        return Tempered.apply(super().forward(x), self.number)


class Casts(Block):
    def forward(self, x: Tensor, store: Any) -> Tensor:
        store.calls += 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.number > 2):
            return super().forward(x)


class Stops(Block):
    def forward(self, x: Tensor, store: Any) -> Tensor:
        store.calls += 1
        with torch.set_grad_enabled(self.number < 3):
            y = super().forward(x)
        return x + y


class Filled(nn.Module):
    """Layers that are handed an object, which is read when all have run."""

    def __init__(self, layer: Callable[[int], nn.Module], count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(layer, range(count)))

    def forward(self, x: Tensor) -> Tensor:
        store = Store()
        for layer in self.layers:
            x = layer(x, store)
        COUNT["calls"] += store.calls
        found = [y if isinstance(y, Tensor) else next(y) for y in [x, *store.kept]]
        x = x + sum(y.sum() for y in found[1::2])
        return x + sum(y["y"].detach() for y in store.named.values()) + len(store.named)


def _in_place(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y.add_(1).mul_(0.5)


def _other_modes(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    if i < 3:
        with torch.no_grad():
            return layer(x).detach() + x
    return layer(x)


def _checkpointed(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def _cast(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i > 0):
        return layer(x)


class Inner(Block):
    """What it does with its input it forgets until the way back."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Pair(Block):
    """Returns what it is given beside what it makes, and a word."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return {"y": super().forward(x * mask), "mask": mask, "how": "masked"}


def _paired(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    out = layer(x, mask=(X > 0).to(x.dtype))
    assert out["how"] == "masked"
    return out["y"] + out["mask"]


class Two(Block):
    """Nobody asks for its second result, nor, if `own`, for a parameter."""

    def __init__(self, number: int, *, own: bool) -> None:
        super().__init__(number)
        self.scale = nn.Parameter(torch.ones(8)) if own else 1

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(super().forward(x))
        return y.sin() * y, y * self.scale


def _first(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    return layer(x)[0]


def _caught(layer: nn.Module, i: int, x: Tensor) -> Tensor:
    try:
        return layer(x)
    except ValueError:
        return x


class Raises(Block):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


def _stack(layer: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*map(layer, range(LAYERS)))


def _shared() -> nn.Module:
    return nn.Sequential(*[Block()] * LAYERS)


def _half_frozen() -> nn.Module:
    model = nn.Sequential(*map(Block, range(2 * LAYERS)))
    for layer in model[:LAYERS]:
        layer.requires_grad_(requires_grad=False)
    return model


def _hooked() -> nn.Module:
    model = nn.Sequential(*map(Block, range(LAYERS)))
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda m, a, out, i=i: out * (i + 1))
    return model


def _weights_hooked() -> nn.Module:
    model = nn.Sequential(*map(Block, range(LAYERS)))
    for i, layer in enumerate(model):
        layer.up.weight.register_hook(lambda g, i=i: g * (i + 1))
    return model


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "equal": (_stack(Block), ["Block"]),
    "their number is read": (_stack(Asks), ["Asks"] * 2),
    "all attributes are read": (_stack(AsksForAll), ["AsksForAll"] * 2),
    "two kinds of flags": (lambda: nn.Sequential(*map(Parity, range(8))), ["Parity", "Parity"]),
    "dropout": (_stack(lambda i: Block(i, 0.4)), ["Block"]),
    "one module, several times": (_shared, ["Block"]),
    "some are frozen": (_half_frozen, ["Block", "Block"]),
    "they write to a buffer": (_stack(Writes), ["not Writes"]),
    "batch norm": (_stack(lambda i: Block(i, 0.0, nn.BatchNorm1d)), ["not Block"]),
    "they keep a tensor": (_stack(Keeps), ["not Keeps"]),
    "they count": (_stack(Counts), []),
    "a global changes": (Scaled, []),
    "hooks": (_hooked, []),
    "hooks of weights": (_weights_hooked, []),
    "results are written to": (lambda: Around(Block, _in_place), ["Block"]),
    "without gradients": (lambda: Around(Block, _other_modes), ["Block"]),
    "checkpoints around": (lambda: Around(Block, _checkpointed), []),
    "checkpoints inside": (_stack(lambda i: Inner(i, 0.4)), ["Inner"]),
    "autocast": (lambda: Around(Block, _cast), ["Block"]),
    "arguments come back": (lambda: Around(Pair, _paired), ["Pair"]),
    "a result is not used": (lambda: Around(lambda i: Two(i, own=False), _first), ["Two"]),
    "nor is a parameter": (lambda: Around(lambda i: Two(i, own=True), _first), ["Two"]),
    "they fill an object": (lambda: Filled(Fills), ["Fills"]),
    **{
        f"one is other: {kind.__name__}": (lambda kind=kind: Filled(kind), [kind.__name__])
        for kind in (Odd, OddNumber, OddTensor, OddWeight, Less)
    },
    "a number is a flag": (lambda: Filled(Flagged, 8), ["Flagged", "Flagged", "Flagged"]),
    "they find what was left": (lambda: Filled(Chained), ["Chained"]),
    "they keep parts": (lambda: Filled(Slides), ["Slides"]),
    "they draw, and fill an object": (lambda: Filled(lambda i: Fills(i, 0.4)), ["Fills"]),
    "one hides a value in an object": (lambda: Filled(Hides), ["Hides"]),
    "they write to what an object holds": (lambda: Filled(Overwrites), ["not Overwrites"]),
    "their gradient knows their number": (lambda: Filled(Tempers), ["Tempers"]),
    "one casts": (lambda: Filled(Casts), ["Casts"]),
    "one stops gradients": (lambda: Filled(Stops), ["Stops"]),
    "what they raise is caught": (lambda: Around(Raises, _caught), ["not Raises"]),
}


def _train(build: Callable[[], nn.Module], after: int) -> tuple[list[Any], list[str], dict[str, int]]:
    """Losses, what the module holds after three steps, what was traced apart, and what a global counts."""
    COUNT.update(calls=0, scale=1)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    @sl.jit
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        if loss.requires_grad:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    torch.manual_seed(1)
    with pieces(after) as seen, sl.Mesh(data=2):
        losses: list[Any] = [float(step(model, optimizer, X)) for _ in range(3)]
    return [*losses, *model.state_dict().values()], seen, dict(COUNT)


@pytest.mark.long
@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", MODULES)
def test_the_program_is_the_same(name: str) -> None:
    build, apart = MODULES[name]
    every, none, counted = _train(build, 1 << 30)
    found, seen, count = _train(build, 2)
    assert len(found) == len(every)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, every, strict=True))
    assert (none, count) == ([], counted)
    kinds = [x for x in seen if x.removeprefix("not ") in {y.removeprefix("not ") for y in apart}]
    assert kinds[: len(apart)] == apart, "in the first of the programs"


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": LAYERS}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=32, decoder_start_token_id=0))


def _looks(node: tuple[Any, ...]) -> tuple[Any, ...]:
    """Op, line, pass and shape; where two gradients of a value meet, the engine is at either's line."""
    _, target, _, line, backward, shape = node
    return target, "" if backward and target == "aten.add.Tensor" else line, backward, shape


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("build", "apart"), [(_gpt2, "GPT2Block"), (_llama, "LlamaDecoderLayer"), (_t5, "T5Block")])
def test_layers_of_transformers(build: Callable[[], nn.Module], apart: str) -> None:
    """The graph of a whole step has the same ops, each at its line; those of a piece stand together."""
    tokens = torch.randint(32, (4, 8))

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=x, labels=x).loss  # layers fill a cache, which nobody reads
        loss.backward()
        optimizer.step()
        return loss

    def planned(after: int) -> tuple[Counter[Any], list[str]]:
        torch.manual_seed(0)
        with pieces(after) as seen, sl.Mesh(data=4):
            model = sl.parallelize(build())
            optimizer = torch.optim.AdamW(model.parameters())
            every = nodes(sl.jit(step).plan(model, optimizer, tokens))
            return Counter(map(_looks, every)), seen

    every, _ = planned(1 << 30)
    found, seen = planned(2)
    assert found == every
    assert apart in seen


@pytest.mark.long
def test_functions_that_are_jitted_are_traced_once_inside_another() -> None:
    def layer(x: Tensor, w: Tensor, *, power: int, odd: bool) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ w) ** power
        return (y + 1, x) if odd else (y, x)

    def loss(ws: list[Tensor], x: Tensor, layer: Callable[..., Any]) -> Tensor:
        for i, w in enumerate(ws):
            x, before = layer(x, w, power=2, odd=i % 2 == 1)
            x = x + before
        return x.square().sum()

    ws = [torch.randn(8, 8) for _ in range(12)]
    value, grads = torch.func.grad_and_value(loss)(ws, X, layer)[::-1]
    with pieces(2) as seen, sl.Mesh(data=2, tensor=2):
        step = sl.jit(lambda ws, x: sl.value_and_grad(loss)(ws, x, sl.jit(layer)), in_specs=("_ b@tensor", "a@data _"))
        found, gradients = step(ws, X)
    assert seen == ["layer", "layer"], "one of each of the two kinds"
    torch.testing.assert_close(found.full_tensor(), value)
    for a, b in zip(gradients, grads, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


@pytest.mark.long
@pytest.mark.sampled(3, first=2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp calls it
@pytest.mark.parametrize("transform", ["grad of grad", "vmap", "jvp"])
def test_transforms_that_are_no_single_gradient(transform: str) -> None:
    """Their layers are traced as they come, or the trace begins anew."""
    model = nn.Sequential(*map(Block, range(LAYERS))).double()
    layers, x = list(model), X.double()

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x.square().sum()

    forms: dict[str, Callable[[Tensor], Any]] = {
        "grad of grad": torch.func.grad(lambda x: torch.func.grad(run)(x).square().sum()),
        "vmap": torch.func.vmap(run),
        "jvp": lambda x: torch.func.jvp(run, (x,), (torch.ones_like(x),)),
    }
    want = forms[transform](x)
    with sl.Mesh(data=2):
        found = sl.jit(forms[transform])(x)
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


PLACE: contextvars.ContextVar[Any] = contextvars.ContextVar("place", default=None)


class Leaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        PLACE.set((PLACE.get(), x))
        return super().forward(x)


@pytest.mark.long
def test_a_value_that_is_left_where_nobody_looks_is_refused_as_ever() -> None:
    model = nn.Sequential(*map(Leaks, range(LAYERS)))
    with sl.Mesh(data=2), pytest.raises(sl.ShardingError, match="keeps tensors that it computes while it is traced"):
        sl.jit(lambda m, x: m(x))(model, X)
    PLACE.set(None)


@pytest.mark.long
def test_a_write_between_a_layer_and_its_gradient_is_found() -> None:
    """As torch finds it: the value that the way back needs is another one by then."""

    def loss(m: Any, x: Tensor) -> Tensor:
        for layer in m:
            x = layer(x)
        y = x.exp()
        x.mul_(2)
        return (y * x).sum() + m[-1].up.weight.sum()

    class Squares(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp()  # whose gradient reads the result

    model = nn.Sequential(*map(Squares, range(LAYERS)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(model, X).backward()
    with sl.Mesh(data=2), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sl.jit(lambda m, x: loss(m, x).backward())(model, X)


@pytest.mark.long
def test_a_write_to_what_a_layer_has_left_is_found() -> None:
    """Behind the gradient it is one as any other."""

    def step(m: Any, x: Tensor, early: bool) -> Any:
        store = Store()
        for layer in m:
            x = layer(x, store)
        if early:
            store.kept[3].mul_(2)
        x.sum().backward()
        store.kept[3].mul_(2)
        return store.kept[3].detach(), m[0].up.weight.grad

    model = nn.Sequential(*map(Slides, range(LAYERS)))
    with pieces(1) as seen, sl.Mesh(data=2):
        found, grad = (x.full_tensor() for x in sl.jit(step)(model, X, early=False))
        model.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sl.jit(step)(model, X, early=True)
    assert seen[0] == "Slides"
    model.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, X, early=True)
    model.zero_grad()
    for a, b in zip((found, grad), step(model, X, early=False), strict=True):
        torch.testing.assert_close(a, b)


class Deep:
    """A number that is far inside."""

    def __init__(self, depth: int = 40) -> None:
        self.number, self.inner = 0, Deep(depth - 1) if depth else None

    def count(self) -> int:
        self.number += 1
        return self.number if self.inner is None else self.inner.count()


def _in_a_long_one(counts: dict[int, list[int]]) -> int:
    counts[5].append(1)
    return len(counts[5])


def _queued(waiting: queue.SimpleQueue[int]) -> int:
    waiting.put(1)
    return waiting.qsize()


HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a number far inside": (Deep, Deep.count),
    "a list in a long dict": (lambda: {i: [] for i in range(2000)}, _in_a_long_one),
    "a queue": (queue.SimpleQueue, _queued),
    "a generator of numpy's": (lambda: np.random.default_rng(7), lambda x: float(x.random())),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_walk_sees_changes_once_a_layer(name: str) -> None:
    """A layer that is traced apart runs once more, and all that it did to objects is undone before."""
    made, change = HIDDEN[name]

    class Changes(Block):
        def forward(self, x: Tensor, store: Any) -> Tensor:
            change(store.named["hidden"])
            return super().forward(x)

    def step(layers: Any, x: Tensor) -> tuple[Tensor, float]:
        store = Store()
        store.named["hidden"] = made()
        for layer in layers:
            x = layer(x, store)
        return x, change(store.named["hidden"])

    model = nn.Sequential(*map(Changes, range(LAYERS)))
    with pieces(1), sl.Mesh(data=2):
        _, found = sl.jit(step)(model, X)
    assert found == step(model, X)[1]


@pytest.mark.filterwarnings("ignore::shardlib.nn.forward.EagerWarning")
def test_what_is_drawn_from_python_is_drawn_once() -> None:
    """A module that no program runs is as it was, also where its trace began anew."""

    class Draws(Block):
        def forward(self, x: Tensor, store: Any) -> Tensor:
            store.calls += 1
            return super().forward(x) * random.random()

    model = Filled(Draws)
    random.seed(5)
    want = model(X)
    with pieces(1), sl.Mesh(data=2):
        sharded = sl.parallelize(model)
        random.seed(5)
        torch.testing.assert_close(sharded(X).full_tensor(), want)


def test_a_function_that_a_layer_leaves_is_let_go() -> None:
    class Leaves(Block):
        def forward(self, x: Tensor, store: Any) -> Tensor:
            y = super().forward(x)
            store.kept.append(lambda: y * 2)
            return y.sin()

    def step(layers: Any, x: Tensor) -> Tensor:
        store = Store()
        for layer in layers:
            x = layer(x, store)
        return x + sum(fn() for fn in store.kept)

    model = nn.Sequential(*map(Leaves, range(LAYERS)))
    with pieces(1) as seen, sl.Mesh(data=2):
        torch.testing.assert_close(sl.jit(step)(model, X).full_tensor(), step(model, X))
    assert seen == ["Leaves"]


def _scaled(x: Tensor, by: float) -> Tensor:
    return x.sin() * by


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_torch_asks_inside_its_own_code_ends_no_process() -> None:
    script = torch.jit.script(_scaled)

    class Scripted(Block):
        def forward(self, x: Tensor, store: Any) -> Tensor:
            store.calls += 1
            y: Tensor = script(super().forward(x), 1.0 + self.number)
            return y

    model = Filled(Scripted)
    with pieces(1), sl.Mesh(data=2):
        torch.testing.assert_close(sl.jit(lambda m, x: m(x))(model, X).full_tensor(), model(X))


def test_gradients_of_pieces_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, through the reshape that a view became, in the only trace."""
    traces: list[int] = []
    one = tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *args: (traces.append(1), one(*args))[1])

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x.view(2, 2, 8) * self.weight).sin().view(4, 8)

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        model(x).square().sum().backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        return [p.grad for p in model.parameters()]

    model = nn.Sequential(*(Weighted() for _ in range(LAYERS)))
    with pieces(1) as seen, sl.Mesh(data=2):
        got = sl.jit(step)(model, X)
    assert seen == ["Weighted"]
    assert len(traces) == 1
    for p in model.parameters():
        p.grad = None
    for a, b in zip(got, step(model, X), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
