"""Plans: text, reasons, names, and figures against counts by hand."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib import Mesh, Plan, shard
from shardlib.core.text_tables import Row, fold_names, fold_rows
from shardlib.sharding.mesh.machine import Link, Machine
from tests.models import w1, w1_sharded

RULES = {"batch": "data", "ff": "tensor", "heads": "tensor"}
GRID = Mesh.abstract(data=2, tensor=4, rules=RULES)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan(fn: Callable[..., Any], *args: Any, mesh: Mesh = GRID, **options: Any) -> Plan:
    with mesh:
        planned: Plan = sl.jit(fn, **options).plan(*args)
    return planned


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ up)
    return hidden @ down


MLP = (meta(16, 64), meta(64, 256), meta(256, 64))
SPECS = ("batch embed", "embed ff", "ff embed")
LINE = mlp.__code__.co_firstlineno


def test_golden() -> None:
    """Users' names, the line above what it became, why each collective is there."""
    assert (
        plan(mlp, *MLP, in_specs=SPECS).full
        == f"""\
mlp on data=2, tensor=4 (8 devices, abstract)

inputs
  x     f32[batch=16@data, embed=64]  annotated
  up    f32[embed=64, ff=256@tensor]  annotated
  down  f32[ff=256@tensor, embed=64]  annotated

program (each device; lines with ! communicate)
  tests/compiler/plan/test_plan.py:{LINE + 1}  hidden = torch.relu(x @ up)
      mm = mm(x, up)           f32[batch=16@data, ff=256@tensor]
  tests/compiler/plan/test_plan.py:{LINE + 2}  return hidden @ down
      mm_1 = mm(hidden, down)  f32[batch=16@data, embed=64] +tensor
    ! all_reduce[tensor] mm_1  f32[batch=16@data, embed=64]          3.07 kB  sum over ff; returned as result

outputs
  result  f32[batch=16@data, embed=64]

collective  axes    times  wire bytes per device
all_reduce  tensor  1      3.07 kB
total               1      3.07 kB
per device: 132 kFLOP, peak memory 38.9 kB"""
    )


def test_a_plan_is_the_same_every_time() -> None:
    assert plan(mlp, *MLP, in_specs=SPECS).full == plan(mlp, *MLP, in_specs=SPECS).full


def test_collectives_are_values() -> None:
    (c,) = plan(mlp, *MLP, in_specs=SPECS).collectives
    assert (c.kind, c.axes, c.bytes, c.backward) == ("all_reduce", ("tensor",), 2 * 8 * 64 * 4 * 3 / 4, False)
    assert (c.value, c.line) == ("mm_1", f"tests/compiler/plan/test_plan.py:{LINE + 2}")
    assert c.reason == "mm_1[batch@data embed] +tensor -> [batch@data embed], sum over ff; returned as result"
    assert str(c).startswith(f"all_reduce[tensor] 3.07 kB at tests/compiler/plan/test_plan.py:{LINE + 2}: mm_1[")
    with pytest.raises(AttributeError):
        c.bytes = 0.0  # type: ignore[misc]


# 2 machines of 4 devices, whose links have a tenth of the bandwidth inside.
HOSTS = Machine(Machine.preset("cpu").device, Link(1e9, 1e-5), Link(1e8, 5e-5, sharing=4), node=4)


def test_forms_between_machines() -> None:
    """Over `data`, 8 devices of 2 machines, (p - k) / p of the bytes cross; nothing does over axes inside a machine."""
    planned = plan(
        _gradient,
        *(meta(1024, 512), meta(8192, 1024)),
        mesh=Mesh.abstract(data=8, machine=HOSTS),
        in_specs=("_@data _", "batch@data _"),
        out_specs="_@data _",
    )
    whole = 1024 * 512 * 4
    assert [(c.kind, c.form, c.across) for c in planned.collectives] == [
        ("all_gather", "two_level", whole * 4 / 8),
        ("reduce_scatter", "two_level", whole * 4 / 8),
    ]
    assert planned.summary().startswith("""\
collective      axes  times  wire bytes per device    form       leaves each machine
all_gather      data  1      1.84 MB                  two_level  1.05 MB
reduce_scatter  data  1      1.84 MB                  two_level  1.05 MB
total                 2      3.67 MB                             2.1 MB
""")
    assert "\n  by two_level: 1.05 MB leave each machine (ring 1.84 MB, exchange 4.19 MB)\n" in planned.explain(0)
    assert planned.to_dict()["collectives"][0]["form"] == "two_level"


@pytest.mark.parametrize(
    ("axes", "machine", "form"),
    [
        ({"data": 8}, HOSTS, "two_level"),
        ({"data": 2, "tensor": 4}, HOSTS, "exchange"),  # one device on each machine
        ({"pod": 2, "data": 4}, HOSTS, ""),  # inside
        ({"data": 8}, None, ""),
        ({"data": 8}, "node", ""),  # its links are alike
        ({"data": 8}, replace(HOSTS, links={"data": Link(1e9)}), ""),
    ],
)
@pytest.mark.parametrize("kind", [Mesh, Mesh.abstract])
def test_only_what_leaves_a_machine_has_a_form(kind: Any, axes: Any, machine: Any, form: str) -> None:
    (c,) = plan(torch.sum, meta(8, 64), mesh=kind(axes, machine=machine), in_specs=("batch@data _",)).collectives
    assert (c.form, bool(c.across)) == (form, bool(form))


def _gathers(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0).values


def _gradient(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda w: (x @ w).square().sum())(w)


@pytest.mark.parametrize(
    ("fn", "args", "specs", "kinds", "words"),
    [
        (_gathers, (meta(8, 6),), ("batch _",), ["all_gather"], "batch whole: read by sort(x)"),
        (torch.sum, (meta(8, 6),), ("batch ff",), ["all_reduce"], "sum over batch ff; returned as result"),
        (_gradient, (meta(6, 4), meta(8, 6)), (None, "batch _"), ["all_reduce"], "sum over batch; returned as result"),
        (_gradient, (meta(6, 4), meta(8, 6)), ("_@data _", "batch _"), ["all_gather", "reduce_scatter"], "sum over"),
        (lambda x: shard(x * 2, "_ batch"), (meta(8, 8),), ("batch _",), ["all_to_all"], "data from dim 0 to dim 1"),
    ],
)  # fmt: skip
def test_reasons(fn: Any, args: Any, specs: Any, kinds: list[str], words: str) -> None:
    planned = plan(fn, *args, in_specs=specs)
    assert [c.kind for c in planned.collectives] == kinds
    assert words in planned.collectives[-1].reason, planned.collectives[-1].reason


def test_explain_leads_back_to_the_annotations() -> None:
    planned = plan(mlp, *MLP, in_specs=SPECS)
    text = planned.explain(0)
    assert text == planned.explain(planned.collectives[0])
    assert text.splitlines()[:5] == [
        "all_reduce[tensor] of mm_1: 3.07 kB on the wire per device",
        f"  at tests/compiler/plan/test_plan.py:{LINE + 2}  return hidden @ down",
        "  from f32[batch=16@data, embed=64] +tensor",
        "  to   f32[batch=16@data, embed=64]",
        "  because sum over ff; returned as result",
    ]
    assert "tensor cuts ff here" in text
    assert "asked for by in_specs: up embed ff" in text
    assert "nothing: " in text, "the price of the alternative"
    assert "batch is cut over data, asked for by in_specs: x batch embed" in planned.explain("mm")
    assert planned.explain("up") == "up is f32[embed=64, ff=256@tensor]\n  fixed by in_specs: up embed ff"
    with pytest.raises(KeyError, match="mlp has no value 'w'; its inputs are x, up, down"):
        planned.explain("w")
    with pytest.raises(IndexError, match="mlp has no collective 1: it has 1, counted from 0"):
        planned.explain(1)


def test_a_conflict_shows_who_competed() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    planned = plan(fn, meta(1024, 64), meta(64, 32), in_specs=("batch@data _", "_ out@data"))
    text = planned.explain("mm")
    assert "data cuts batch here" in text
    assert "batch: " in text
    assert "us, asked for by in_specs: x batch@data _" in text
    assert "out: " in text
    assert "us, asked for by in_specs: w _ out@data" in text


def test_names_of_values() -> None:
    planned = plan(lambda p, x: {"y": [x @ p["layer"]["w"]]}, {"layer": {"w": meta(4, 8)}}, meta(2, 4))
    for name in ("p['layer']['w']", "p.layer.w"):
        assert str(planned.layout_of(name)) == "4, 8"
    assert planned.layout_of("result['y'][0]") == planned.layout_of("result.y[0]") == planned.layout_of("mm")
    assert "mm = mm(x, p.layer.w)" in planned.full
    with pytest.raises(KeyError, match="has no value 'z'"):
        planned.layout_of("z")


def test_fused_heads_keep_their_names() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ w).view(2, 16, 3, 8, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v)

    planned = plan(fn, meta(2, 16, 32), meta(32, 96), in_specs=("batch seq embed", "embed (three=3 heads=8 hd)"))
    text = planned.full
    assert "w  f32[embed=32, (three=3 heads=32@tensor)]" in text or "(three=3 heads=8@tensor hd=4)" in text
    assert "f32[batch=2@data, heads=8@tensor, seq=16, hd=4]" in text
    assert not planned.collectives


# --- figures ----------------------------------------------------------------------------------------------------------


def test_flops_of_matmuls() -> None:
    whole = 2 * (2 * 16 * 64 * 256) + 16 * 256  # two products and a relu
    assert plan(mlp, *MLP, in_specs=SPECS).flops == whole / 8
    assert plan(mlp, *MLP).flops == whole, "nothing is cut: every device does everything"


def test_flops_of_attention() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    b, h, s, e = 4, 8, 16, 32
    args = (meta(b, h, s, e),) * 3
    assert plan(fn, *args, in_specs=("batch heads _ _",) * 3).flops == 2 * (2 * b * h * s * s * e) / 8


def test_flops_of_a_gradient() -> None:
    step = torch.func.grad(lambda x, *w: mlp(x, *w).sum(), argnums=(1, 2))
    one = 2 * 16 * 64 * 256
    whole = 4 * one + 2 * 16 * 256  # one product forward (the last is dead), two weights, one activation; relu twice
    assert plan(step, *MLP, in_specs=SPECS).flops == whole / 8


@pytest.mark.parametrize(
    ("fn", "elements"),
    [
        (lambda x: x.sin().cos(), 2),  # the argument, and one for both: cos runs in place
        (lambda x: (x.sin() * x.cos()).sum(), 3),
        (lambda x: x.view(-1).sum(), 1),  # a view is the argument's memory
        (lambda x: x.view(-1), 2),  # which a result does not share
        (lambda x: x.sin(), 2),
        (lambda x: (x.sin(), x.cos(), x.exp()), 4),
    ],
)
def test_peak_memory_by_hand(fn: Any, elements: int) -> None:
    local = 1024 // 2 * 4
    assert plan(fn, meta(1024), in_specs=("batch",)).peak_memory // local == elements


def test_peak_memory_counts_what_softmax_makes() -> None:
    cut = plan(lambda x: x.softmax(-1), meta(64, 1024), in_specs=("_ ff",)).peak_memory
    assert cut >= 2 * 64 * 1024 // 4 * 4


def test_to_dict_survives_json() -> None:
    data = plan(mlp, *MLP, in_specs=SPECS).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["mesh"] == {"data": 2, "tensor": 4}
    assert data["inputs"]["up"] == "f32[embed=64, ff=256@tensor]"
    assert data["collectives"][0]["axes"] == ["tensor"]
    assert data["comm_bytes"] == 3072


@torch.library.custom_op("test_plan::spread", mutates_args=())
def spread(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 1).repeat(1, 8)


spread.register_fake(lambda x: x.new_empty(x.numel(), 8))


@pytest.mark.parametrize("fn", [spread, lambda x: spread(x.sum())], ids=["of much", "of one element"])
def test_what_has_no_rule_is_named(fn: Any) -> None:
    planned = plan(fn, meta(4, 8), in_specs=("batch _",))
    (op,) = planned.replicated_ops
    assert op.startswith("test_plan.spread.default at ")
    assert f"no rule, runs replicated: {op} (1 times)" in planned.summary()


# --- folding ----------------------------------------------------------------------------------------------------------


def _w1(mode: str, layers: int) -> Plan:
    config = w1.Config(layers=layers)
    m = w1.modes(config)[mode]
    with w1_sharded.mesh_of(m, abstract=True):
        planned: Plan = w1_sharded.sharded_step(m, config).plan(*w1.abstract(config))
    return planned


@pytest.mark.long
def test_layers_fold() -> None:
    deep = _w1("tp", 12).full.splitlines()
    assert len(deep) < 320
    assert any("12 times, differing in layers[" in line or "11 times" in line for line in deep)
    assert sum("values, one message" in line for line in deep) == 3, "gradients that travel together are one line"


@pytest.mark.long
def test_a_plan_has_no_paths_of_this_machine() -> None:
    text = _w1("tp_sp", 2).full
    assert "/work" not in text
    assert str(w1.__file__).rsplit("/tests/", maxsplit=1)[0] not in text
    assert "0x" not in text


@pytest.mark.parametrize(
    ("lines", "folded"),
    [
        ("a b c", "a b c"),
        ("mm_1 mm_2", "mm_1 mm_2"),
        ("mm_1 mm_2 mm_3", "3: mm_1"),
        ("a mm_1 add_1 mm_2 add_2 b", "a 2: mm_1 add_1 b"),
        ("w1 w3 w2", "w1 w3 w2"),
        ("p.layers[0].w p.layers[1].w p.layers[2].w x", "3: p.layers[0].w x"),
    ],
)
def test_fold(lines: str, folded: str) -> None:
    rows = fold_rows([Row((name, "f32")) for name in lines.split()])
    texts = [r.cells[0] if len(r.cells) > 1 else r.cells[0].split()[0] + ":" for r in rows]
    assert " ".join(texts) == folded


@pytest.mark.parametrize("figures", [("f32[1]", "f32[2]"), ("2 kB", "3 kB")])
def test_fold_keeps_lines_with_other_figures(figures: tuple[str, str]) -> None:
    a, b = figures
    rows = [Row((f"mm_{i}", figure, "sum over h.0")) for i, figure in enumerate((a, b, a))]
    assert fold_rows(rows) == rows
    assert len(fold_rows([Row((f"mm_{i}", a, f"sum over h.{i}")) for i in range(3)])) == 2


def test_fold_keeps_lines_with_other_sizes() -> None:
    rows = [Row((f"mm_{i}", "2 kB", f"sum over {size}")) for i, size in enumerate((256, 512, 1024))]
    assert fold_rows(rows) == rows


def test_fold_names_stars_only_what_varies() -> None:
    rows = [("r[1].h[0].w", "f32"), ("r[1].h[1].w", "f32"), ("m.h.0.w", "f32"), ("m.h.1.w", "f32")]
    assert fold_names(rows) == [("r[1].h[*].w x 2", "f32"), ("m.h.*.w x 2", "f32")]


def test_a_plan_is_a_value_of_its_process() -> None:
    with GRID:
        plan = sl.jit(torch.sin).plan(torch.ones(4, device="meta"))
    held = copy.deepcopy({"plan": plan})
    assert held["plan"] is plan is copy.copy(plan)
    with pytest.raises(sl.ShardingError, match=r"the plan of sin is pickled(.|\n)*plan\.to_dict"):
        pickle.dumps(held)


def test_nobody_minds_an_op_without_a_rule_of_one_element() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x < 9.0, lambda: "rows below 9")
        return x * 2

    with sl.Mesh(data=2):
        plan = sl.jit(checked, in_specs=("rows@data _",)).plan(torch.ones(4, 4))
    assert plan.replicated_ops == ()
