"""The brief text of a plan: golden texts, its size for many models, groups, phases and warnings."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardlib as sl
from shardlib import Mesh, Plan
from shardlib.compiler.plan.groups import Item, group, group_to_fit, join_siblings, largest, set_apart
from shardlib.compiler.plan.terminal import highlight
from shardlib.core.name_patterns import group_names, star
from shardlib.sharding.mesh.machine import Machine
from tests.models import w1, w1_sharded, zoo


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


MLP = (meta(16, 64), meta(64, 256), meta(256, 64))
SPECS = ("batch embed", "embed ff", "ff embed")
RULES = {"batch": "data", "ff": "tensor"}
LINE = mlp.__code__.co_firstlineno
HERE = "tests/compiler/plan/test_brief_text.py"


def planned(
    fn: Callable[..., Any] = mlp,
    args: Any = MLP,
    specs: Any = SPECS,
    *,
    rules: Any = RULES,
    machine: Any = None,
    **options: Any,
) -> Plan:
    with Mesh.abstract(data=2, tensor=4, rules=rules, machine=machine):
        plan: Plan = sl.jit(fn, in_specs=specs, **options).plan(*args)
    return plan


# --- golden texts -----------------------------------------------------------------------------------------------------


def test_golden() -> None:
    assert (
        planned().text(width=120)
        == f"""\
mlp on data=2, tensor=4 (8 devices, abstract)

sent per device   3.07 kB in 1 collective
FLOPs per device  132 kFLOP
peak memory       38.9 kB per device

inputs  type          per device  layout
  x     f32[16, 64]   2.05 kB     batch@data embed
  up    f32[64, 256]  16.4 kB     embed ff@tensor
  down  f32[256, 64]  16.4 kB     ff@tensor embed

collectives by module                        sent     i  why
  test_brief_text.py:{LINE + 1}  all_reduce[tensor]  3.07 kB  0  sum over ff

results   type         per device  layout
  result  f32[16, 64]  2.05 kB     batch@data embed

warnings: none

more: plan.full (every step), plan.explain(i) (why collective i is there), plan.show() (in color)"""
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Net(nn.Module):
    def __init__(self, layers: int, width: int, stages: int = 1) -> None:
        super().__init__()
        self.layers, self.stages = nn.ModuleList(Block(width) for _ in range(layers)), stages

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.stages == 1:
                x = layer(x)
            else:
                with sl.stage(i * self.stages // len(self.layers)):
                    x = layer(x)
        return x


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    opt.zero_grad()
    loss: Tensor = (model(x) - x).square().mean()
    loss.backward()
    opt.step()
    return loss


TABLE = {"layers.*.up.weight": "ff@tensor _", "layers.*.up.bias": "ff@tensor", "layers.*.down.weight": "_ ff@tensor"}


def trained(layers: int = 2, strategy: str = "zero1", step: Callable[..., Any] = train_step, width: int = 256) -> Plan:
    with torch.device("meta"):
        model = Net(layers, width)
    with Mesh.abstract(data=2, tensor=4, machine="h100"):
        sl.parallelize(model, TABLE, strategy=strategy)
        opt = torch.optim.AdamW(model.parameters())
        plan: Plan = sl.jit(step, in_specs=(None, None, "batch@data _")).plan(model, opt, meta(4096, width))
    return plan


def test_golden_training_step() -> None:
    assert trained().text(width=120) == TRAINING


TRAIN_LINE = train_step.__code__.co_firstlineno + 2
TRAINING = f"""\
train_step on data=2, tensor=4 (8 devices, abstract)

sent per device   11 MB in 24 collectives
                  all_reduce[tensor] 9.44 MB, all_gather[data] 1.05 MB, reduce_scatter[data] 525 kB, and 1 more
FLOPs per device  2.96 GFLOP
peak memory       23.1 MB per device
simulated step    197 us on h100, 51.8 us of it waiting for messages

inputs                        type                 per device  layout
  x                           f32[4096, 256]       2.1 MB      batch@data 256
  model.layers.*.up.weight    f32[1024, 256]  x 2  524 kB      ff@tensor 256
  model.layers.*.up.bias      f32[1024]       x 2  2.05 kB     ff@tensor
  model.layers.*.down.weight  f32[256, 1024]  x 2  524 kB      256 ff@tensor
  model.layers.*.down.bias    f32[256]        x 2  2.05 kB     whole
  opt.state[*].step           f32             x 8  32 B        whole
  opt.state[*].exp_avg        f32             x 8  527 kB      as its parameter, also over data (6 of 8)
  opt.state[*].exp_avg_sq     f32             x 8  527 kB      as its parameter, also over data (6 of 8)

collectives by module                                            sent     time     i   why
  forward                             3 collectives              6.29 MB  48.7 us
    model.layers.*.down               all_reduce[tensor]    x 2  6.29 MB  48.7 us  0   sum over ff
    test_brief_text.py:{TRAIN_LINE}            all_reduce[data]           4 B      11.7 ns  3   sum over batch
  backward                            15 collectives             4.2 MB   39.4 us
    model.layers.1.up                 all_reduce[tensor]         3.15 MB  24.3 us  2   sum over ff
    model.layers.*.up.bias: gradient  all_reduce[data]      x 2  2.05 kB  5.99 us  4   sum over batch
    model.layers.*: 3 gradients       reduce_scatter[data]  x 6  525 kB   4.55 us  6   sum over batch
    model.layers.*: 3 gradients       all_gather[data]      x 6  525 kB   4.55 us  12  returned as .grad
  optimizer                           6 collectives              525 kB   4.55 us
    model.layers.*: 3 new values      all_gather[data]      x 6  525 kB   4.55 us  18  kept gathered between calls

results   type   per device  layout
  result  f32[]  4 B         whole
  and new values of 32 inputs, 8 gradients

warnings
  ! 525 kB are sent only to leave gathered gradients in .grad -> end the step with opt.zero_grad(): it returns none then

more: plan.full (every step), plan.explain(i) (why collective i is there), plan.show() (in color)"""


# --- size -------------------------------------------------------------------------------------------------------------


def _transformer(cls: str, config: str, patterns: dict[str, str] | None = None, **sizes: Any) -> Callable[[], Plan]:
    """Plans a step of AdamW on a model of transformers, cut over `data`, and over `tensor` by patterns of names."""

    def plan() -> Plan:
        transformers = pytest.importorskip("transformers")
        with torch.device("meta"):
            model = getattr(transformers, cls)(getattr(transformers, config)(**sizes))
        ids = meta(16, 16, dtype=torch.int64)
        return _train(model, {"input_ids": ids, "labels": ids}, patterns)

    return plan


def _family(name: str) -> Callable[[], Plan]:
    family = zoo.FAMILIES[name]
    return _transformer(family.cls, family.config, family.patterns | zoo._REST, **family.sizes)


def _train(model: nn.Module, batch: dict[str, Tensor], patterns: dict[str, str] | None) -> Plan:
    def step(model: nn.Module, opt: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
        opt.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        opt.step()
        return loss

    with Mesh.abstract(data=2, tensor=4, rules=zoo.RULES, machine="h100"):
        if patterns is None:
            specs = sl.suggest(model, sl.current_mesh(), batch["input_ids"])
        else:
            specs = zoo.CausalLM(model, patterns).specs()
        sl.parallelize(model, specs, strategy="zero1")
        opt = torch.optim.AdamW(model.parameters())
        plan: Plan = sl.jit(step, in_specs=(None, None, "batch ...")).plan(model, opt, batch)
    return plan


class Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        y = self.conv2(nn.functional.silu(self.norm2(y)))
        out: Tensor = y + self.skip(x)
        return out


class UNet(nn.Module):
    """Levels of other widths, so that no two layers have parameters of one shape."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.enter, self.leave = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in pairs)
        self.middle = Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(Residual(2 * b, a) for a, b in reversed(pairs))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        out: Tensor = self.leave(x)
        return out


def _unet() -> Plan:
    with torch.device("meta"):
        model = UNet()
    x = meta(16, 3, 64, 64)
    with Mesh.abstract(data=2, tensor=4, rules=zoo.RULES, machine="h100"):
        sl.parallelize(model, sl.suggest(model, sl.current_mesh(), x), strategy="zero1")
        opt = torch.optim.AdamW(model.parameters())
        plan: Plan = sl.jit(train_step, in_specs=(None, None, "batch@data ...")).plan(model, opt, x)
    return plan


def _pipeline() -> Plan:
    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        opt.zero_grad()
        loss: Tensor = sl.microbatch(lambda rows: (model(rows) - rows).square().mean(), x, n=4, schedule="1f1b")
        loss.backward()
        opt.step()
        return loss

    with torch.device("meta"):
        model = Net(4, 64, stages=2)
    with Mesh.abstract(stage=2, data=2, stages="stage", machine="h100"):
        sl.parallelize(model, strategy="zero1")
        opt = torch.optim.AdamW(model.parameters())
        plan: Plan = sl.jit(step, in_specs=(None, None, "batch@data _")).plan(model, opt, meta(64, 64))
    return plan


_GPT2 = {"n_layer": 4, "n_embd": 64, "n_head": 8, "vocab_size": 128, "n_positions": 32}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 176}
_LLAMA |= {"vocab_size": 128, "max_position_embeddings": 32}


def _llama(layers: int) -> Callable[[], Plan]:
    patterns = zoo._LLAMA | zoo._REST
    return _transformer("LlamaForCausalLM", "LlamaConfig", patterns, **_LLAMA, num_hidden_layers=layers)


CASES: dict[str, Callable[[], Plan]] = {
    "mlp": trained,
    "mlp fsdp": lambda: trained(strategy="fsdp"),
    "pipeline": _pipeline,
    "gpt2": _transformer("GPT2LMHeadModel", "GPT2Config", None, **_GPT2),
    "llama of 2 layers": _llama(2),
    "llama of 80 layers": _llama(80),
    "mixtral": _family("mixtral"),
    "t5": _family("t5"),
    "unet": _unet,
}
_FAST = ("mlp", "mlp fsdp", "pipeline")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FAST else pytest.mark.long) for name in CASES]
)
def test_fits_on_a_screen(name: str) -> None:
    """60 lines of 120 columns (or fewer), totals first; and the items are all collectives and their bytes."""
    plan = CASES[name]()
    for width in (120, 90):
        lines = plan.text(width=width).splitlines()
        assert len(lines) <= 60
        assert max(map(len, lines)) <= width
        heads = [line.partition("  ")[0] for line in lines[:10]]
        assert heads[0] == plan.heading
        assert {"sent per device", "FLOPs per device", "peak memory", "simulated step", "inputs"} <= {*heads}
        assert {"results", "collectives by module"} <= {line.partition("  ")[0] for line in lines}
        assert lines[-1].startswith("more: plan.full")
        assert ("pipeline" in lines) == (plan.pipeline is not None)
    items = plan.items.collectives
    assert [(i.position, i.bytes) for i in items] == [(i, c.bytes) for i, c in enumerate(plan.collectives)]
    assert len(plan.items.inputs) == len(plan.compiled.program.inputs)


@pytest.mark.long
def test_text_of_folded_layers_reads_one_of_them() -> None:
    """The text does not spread the decisions to all layers, which takes long, and says the same as with them."""
    config = w1.Config(layers=12)
    mode = w1.modes(config)["tp_sp"]
    with w1_sharded.mesh_of(mode, abstract=True):
        plan: Plan = w1_sharded.sharded_step(mode, config).plan(*w1.abstract(config))
    text = plan.text(width=120)
    assert plan.compiled.layer_decisions is not None, "the layers fold"
    assert "propagated" not in vars(plan.compiled)
    whole = Plan(replace(plan.compiled, layer_decisions=None))
    assert whole.text(width=120) == text
    assert "propagated" in vars(whole.compiled)


# --- forms ------------------------------------------------------------------------------------------------------------


def test_details() -> None:
    plan = planned()
    assert plan.text(detail="full") == plan.full
    assert "\n      mm = mm(x, up)" in plan.full
    assert str(plan) == plan.text() == plan.text(width=120), "stdout is no terminal here"
    with pytest.raises(sl.ShardingError, match=r"the plan of mlp has no text with detail='all'"):
        plan.text(detail="all")


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    """Text without colors for a stream, with colors for a terminal; both have the same characters."""
    plan = planned(rules={})
    plan.show()
    assert capsys.readouterr().out == f"{plan}\n"
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    terminal.print(highlight(str(plan)), soft_wrap=True)
    written = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1mmlp on data=2, tensor=4 (8 devices, abstract)\x1b[0m" in written
    assert "\x1b[31m  ! no rule for embed ff: up is whole on every device" in written
    assert highlight(str(plan)).plain == str(plan)


# --- groups -----------------------------------------------------------------------------------------------------------


def item(
    path: str, *, phase: str = "forward", kind: str = "all_reduce[t]", nbytes: float = 1.0, tensor: bool = False
) -> Item:
    return Item(phase, path, "", kind, "sum", nbytes, 0, is_tensor=tensor)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("layers.0.wq", "layers.*.wq"),
        ("params.layers[10].wq", "params.layers[*].wq"),
        ("0.weight", "*.weight"),
        ("net.0", "net.*"),
        ("opt.state[model.3.weight].exp_avg", "opt.state[model.*.weight].exp_avg"),
        ("w1.py:42", "w1.py:42"),
        ("block2.conv1", "block2.conv1"),
    ],
)
def test_star(path: str, pattern: str) -> None:
    assert star(path) == pattern


_PATHS = [f"net.block.{i}.layer.{j}.{name}.up" for i in range(3) for j, name in enumerate(("attn", "mlp"))]


@pytest.mark.parametrize(
    ("limit", "tensor", "patterns", "name"),
    [
        (2, False, ["net.block.*.layer.*.attn", "net.block.*.layer.*.mlp"], "net.block.*.layer.0.attn"),
        (1, False, ["net.block.*.layer.*"], "net.block.*.layer.*"),
        (9, True, ["net.block.*"], "net.block.*: 2 tensors"),
    ],
)
def test_paths_are_cut_until_the_groups_fit(limit: int, tensor: bool, patterns: list[str], name: str) -> None:
    groups = group_to_fit([item(path, tensor=tensor) for path in _PATHS], limit)
    assert [g.pattern for g in groups] == patterns
    assert sum(g.times for g in groups) == 6
    assert groups[0].name == name


def test_small_groups_do_not_shorten_paths() -> None:
    """If the largest groups hold 98 % of the bytes, the others become one line."""
    items = [item("a.0.x", nbytes=1000), *(item(f"{name}.0.y", nbytes=1) for name in "bcdef")]
    groups = group_to_fit(items, 3)
    assert len(groups) == 6
    shown, rest = largest(groups, 3)
    assert [g.pattern for g in shown] == ["a.*.x", "b.*.y"]
    assert [g.pattern for g in rest] == ["c.*.y", "d.*.y", "e.*.y", "f.*.y"]


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ("aaab", ["h.{0-2}.w", "h.3.w"]),
        ("aabb", ["h.{0,1}.w", "h.{2,3}.w"]),
        ("abababababa", ["h.{0,2,...}.w", "h.{1,3,...}.w"]),
        ("aaaabaa", ["h.{0-3,5,6}.w", "h.4.w"]),
        ("aaa", ["h.*.w"]),
    ],
)
def test_groups_of_one_pattern_are_set_apart(shapes: str, names: list[str]) -> None:
    items = [item(f"h.{i}.w", kind=f"f32[{shape}]", tensor=True) for i, shape in enumerate(shapes)]
    assert [g.name for g in set_apart(group(items))] == names
    assert [name for name, *_ in group_names((x.path, x.kind) for x in items)] == names, "in the full text and the page"


def test_groups_of_the_same_layers_keep_their_star() -> None:
    items = [item(f"h.{i}", kind=kind) for kind in ("all_gather[t]", "all_reduce[t]") for i in range(3)]
    subset = [item(f"h.{i}", kind="all_to_all[t]") for i in range(2)]
    assert [g.name for g in set_apart(group([*items, *subset]))] == ["h.*", "h.*", "h.{0,1}"]


def test_groups_differ_by_phase_and_kind() -> None:
    items = [item("a.0"), item("a.1"), item("a.2", phase="backward"), item("a.3", kind="all_gather[t]")]
    assert Counter((g.pattern, g.first.phase, g.first.kind, g.times) for g in group(items)) == Counter(
        [("a.*", "forward", "all_reduce[t]", 2), ("a.*", "backward", "all_reduce[t]", 1)]
        + [("a.*", "forward", "all_gather[t]", 1)]
    )


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["h.0.q", "h.0.k", "h.1.q", "h.1.k"], ["h.*.{q,k}"]),
        (["h.0.ln.w", "h.0.ln.b", "h.0.mlp.w"], ["h.0.ln.{w,b}", "h.0.mlp.w"]),
        (["a.x.w", "a.x.b", "a.y.w", "a.y.b"], ["a.{x,y}.{w,b}"]),
        (["a.w", "b.c.w"], ["a.w", "b.c.w"]),
    ],
)
def test_siblings_are_joined(paths: list[str], names: list[str]) -> None:
    assert [g.name for g in join_siblings(group(item(path, tensor=True) for path in paths))] == names


def test_phases_and_roles() -> None:
    """A step with ZeRO-1: sums in both passes, gradients to shards, new weights from shards."""
    plan = trained()
    rows = Counter((i.phase, i.kind, i.role, i.note) for i in plan.items.collectives)
    assert rows == Counter(
        {
            ("forward", "all_reduce[tensor]", "", "sum over ff"): 2,
            ("forward", "all_reduce[data]", "", "sum over batch"): 1,
            ("backward", "all_reduce[tensor]", "", "sum over ff"): 1,  # the first layer's input needs no gradient
            ("backward", "all_reduce[data]", "gradient", "sum over batch"): 2,
            ("backward", "reduce_scatter[data]", "gradient", "sum over batch"): 6,
            ("backward", "all_gather[data]", "gradient", "returned as .grad"): 6,
            ("optimizer", "all_gather[data]", "new value", "kept gathered between calls"): 6,
        }
    )
    reduced = {i.path for i in plan.items.collectives if i.kind == "reduce_scatter[data]"}
    assert reduced == {
        f"model.layers.{i}.{name}" for i in range(2) for name in ("up.weight", "down.weight", "down.bias")
    }
    assert [i.path for i in plan.items.collectives if i.kind == "all_reduce[tensor]"] == [
        "model.layers.0.down",
        "model.layers.1.down",
        "model.layers.1.up",
    ]


def functional_step(params: Any, mean: Any, square: Any, x: Tensor) -> Any:
    def loss_of(params: Any) -> Tensor:
        y = x
        for layer in params["layers"]:
            y = torch.relu(y @ layer["up"]) @ layer["down"]
        return (y - x).square().mean()

    loss, grads = sl.value_and_grad(loss_of)(params)
    mean = tree_map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = tree_map(lambda v, g: 0.9 * v + 0.1 * g * g, square, grads)
    return tree_map(lambda p, m, v: p - m / (v.sqrt() + 1e-8), params, mean, square), mean, square, loss


def test_results_are_grouped_like_inputs() -> None:
    """The loss is the first line; layers of another shape have their own indices; moments join their weights."""
    widths = (128, 256, 256, 128, 256)
    spec = {"layers": [{"up": "_ ff@tensor", "down": "ff@tensor _"} for _ in widths]}
    trees = [{"layers": [{"up": meta(64, n), "down": meta(n, 64)} for n in widths]} for _ in range(3)]
    plan = planned(functional_step, (*trees, meta(16, 64)), (spec, spec, spec, "batch@data _"))
    inputs, results = (part for part in str(plan).split("\n\n") if part.startswith(("inputs", "results")))
    assert (
        results
        == """\
results                               type               per device  layout
  result[3]                           f32[]              4 B         whole
  result[{0-2}].layers[{0,3}].up      f32[64, 128]  x 6  49.2 kB     64 ff@tensor
  result[{0-2}].layers[{0,3}].down    f32[128, 64]  x 6  49.2 kB     ff@tensor 64
  result[{0-2}].layers[{1,2,4}].up    f32[64, 256]  x 9  147 kB      64 ff@tensor
  result[{0-2}].layers[{1,2,4}].down  f32[256, 64]  x 9  147 kB      ff@tensor 64"""
    )
    assert [line.split()[1:] for line in inputs.splitlines()[1:-1]] == [
        line.split()[1:] for line in results.splitlines()[2:]
    ]


def test_a_loss_is_shown_beside_many_results() -> None:
    """Results that do not fit are one line; the scalars stand first, though they have the fewest bytes."""

    def step(*tensors: Tensor) -> Any:
        return [*tensors, sum(x.sum() for x in tensors)]

    tensors = tuple(meta(8 * i) for i in range(1, 40))
    text = str(planned(step, tensors, None))
    (results,) = (part.splitlines() for part in text.split("\n\n") if part.startswith("results"))
    assert results[1].split() == ["result[39]", "f32[]", "4", "B", "whole"]
    assert len(results) <= 12


# --- warnings ---------------------------------------------------------------------------------------------------------


def _ends_with_zero_grad(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def test_gradients_that_are_returned() -> None:
    """The remedy is the difference between the two plans."""
    (warning,) = trained().warnings
    assert str(warning) == (
        "525 kB are sent only to leave gathered gradients in .grad -> "
        "end the step with opt.zero_grad(): it returns none then"
    )
    better = trained(step=_ends_with_zero_grad)
    assert better.warnings == ()
    assert trained().comm_bytes - better.comm_bytes == pytest.approx(525e3, rel=1e-2)


@torch.library.custom_op("test_brief_text::spread", mutates_args=())
def spread(x: Tensor) -> Tensor:
    return x * 2


spread.register_fake(lambda x: x.new_empty(x.shape))


def double(x: Tensor) -> Tensor:
    return spread(x)


SMALL = replace(Machine.preset("h100"), device=replace(Machine.preset("h100").device, memory=1e4), name="small")


@pytest.mark.parametrize(
    ("options", "text", "remedy"),
    [
        (
            {"specs": (None, "embed ff", "ff embed")},
            f"redundant work: 50% of the FLOPs, most in mm at {HERE}:{LINE + 1}, alike on 2 devices along data",
            "annotate x over data; plan.redundant lists all such work",
        ),
        (
            {"specs": ("batch embed", None, None)},
            "not annotated and whole on every device (131 kB): up, down",
            "give specs: in_specs of sl.jit, sl.shard, or specs of sl.parallelize",
        ),
        (
            {"fn": lambda x: x.sort(0).values.sum(), "args": (meta(64, 32),), "specs": ("batch _",)},
            "large gather: all_gather[data] at x makes 8.19 kB on every device (batch whole for sort)",
            "plan.explain(0) names what needs it; annotate that value with sl.shard",
        ),
        (
            {"fn": double, "args": (meta(8, 8),), "specs": ("batch _",)},
            "no rule, runs on whole operands on every device: test_brief_text.spread.default at "
            f"{HERE}:{double.__code__.co_firstlineno + 1} (1 times)",
            "register one: sl.rule",
        ),
        (
            {"rules": {"batch": "data"}},
            "no rule for embed ff: up is whole on every device",
            'Mesh(..., rules={"embed": axis}), or rules={"embed": None} if it shall stay whole',
        ),
        (
            {"machine": SMALL},
            "out of memory: the peak is 38.9 kB, a device of small has 10 kB",
            'strategy="fsdp", memory=, remat=, a smaller batch or more devices',
        ),
    ],
    ids=["redundant work", "whole inputs", "large gather", "op without rule", "name without rule", "memory"],
)
def test_warnings(options: Any, text: str, remedy: str) -> None:
    warnings = {w.text: w.remedy for w in planned(**options).warnings}
    assert text in warnings, list(warnings)
    assert warnings[text] == remedy


def test_a_gather_of_the_users_own_is_no_warning() -> None:
    with sl.Mesh.abstract(data=2):
        gather = sl.shard_map(lambda x: sl.all_gather(x, "data").sum(), in_specs="b@data _", out_specs="")
        plan = sl.jit(gather).plan(meta(64, 32))
    assert [item.note for item in plan.items.collectives] == ["written in a shard_map body"]
    assert not [w for w in plan.warnings if "gather" in w.text]


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:.*has no rule and stays whole")
@pytest.mark.parametrize(
    ("bias", "text", "remedy"),
    [
        ("ff", None, None),
        ("embed", None, None),  # another annotation has it
        ("foo", "no rule for foo: model.layers.*.bias are whole on every device", ""),
        ("embde", "no rule for embde: model.layers.*.bias are whole on every device", ""),
        ("fff", "no rule for fff: model.layers.*.bias are whole on every device", "did you mean 'ff'? Else "),
    ],
)
def test_mistyped_names_of_small_tensors(bias: str, text: str | None, remedy: str | None) -> None:
    """The biases of a training step, under 1 % of the memory; an optimizer's moments have their names, too."""
    with torch.device("meta"):
        model = Biased()
    with Mesh.abstract(data=2, tensor=4, rules=RULES):
        sl.parallelize(model, {"*.weight": "ff embed", "*.bias": bias}, strategy="ddp")
        opt = torch.optim.AdamW(model.parameters())
        plan = sl.jit(train_step, in_specs=(None, None, "batch embed")).plan(model, opt, meta(4096, 64))
    typos = {w.text: w.remedy for w in plan.warnings if w.text.startswith("no rule for")}
    meant = f'Mesh(..., rules={{"{bias}": axis}}), or rules={{"{bias}": None}} if it shall stay whole'
    assert typos == ({} if text is None else {text: f"{remedy}{meant}"})


def test_mistyped_names_beside_sharded_dims() -> None:
    with pytest.warns(UserWarning, match="did you mean 'ff'"):
        plan = planned(lambda x, b: x + b, (meta(16, 64), meta(16, 64)), ("batch embed", "batch fff"))
    (warning,) = (w for w in plan.warnings if w.text.startswith("no rule for"))
    assert warning.text == "no rule for fff: dims of b stay whole"
    assert warning.remedy.startswith("did you mean 'ff'? Else ")


def test_a_good_plan_has_no_warnings() -> None:
    """Tensors may be whole on purpose, and names without a rule may stand beside others."""
    assert planned().warnings == ()
    on_purpose = planned(rules={"batch": "data", "ff": None, "embed": None}).warnings
    assert [w.text.partition(":")[0] for w in on_purpose] == ["redundant work"]
    assert "\nwarnings: none\n" in str(planned())


def test_many_warnings_are_counted() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(3):
            x = spread(x)
        y = spread(x)
        z = spread(y)
        u = spread(z)
        v = spread(u)
        w = spread(v)
        a = spread(w)
        b = spread(a)
        return spread(b)

    lines = str(planned(fn, (meta(8, 8),), ("batch _",))).splitlines()
    at = lines.index("warnings")
    shown = lines[at + 1 : lines.index("", at)]
    assert shown[-1].endswith("more: plan.warnings")
    assert len(shown) <= 10
