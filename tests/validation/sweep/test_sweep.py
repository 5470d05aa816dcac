"""A fixed part of the OpInfo sweep, and the sweep itself: what it tries, and that it sees what goes wrong."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from unittest import mock

import pytest

from shardlib.rules import table as rules
from shardlib.rules.patterns import pattern
from tests.validation.sweep import __main__ as command
from tests.validation.sweep import report
from tests.validation.sweep.cell import MESHES, Cell, Result, run_cell
from tests.validation.sweep.entries import SIZES, cases, entries
from tests.validation.sweep.placements import cuts, placements
from tests.validation.sweep.trial import MODES
from tests.validation.sweep.workers import Lost, run_all

# Every family of ops once or more; `python -m tests.validation.sweep` runs them all, and more of each.
# fmt: off
SUBSET = [
    "add", "where", "clamp", "std.unbiased", "sum", "amax", "linalg.vector_norm", "logsumexp", "cumsum", "cumprod",
    "bmm", "addmm", "einsum", "nn.functional.linear", "nn.functional.conv2d", "nn.functional.avg_pool2d",
    "nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.cross_entropy", "nn.functional.mse_loss",
    "nn.functional.softmin", "nn.functional.gelu", "nn.functional.embedding", "nn.functional.pad.constant",
    "nn.functional.interpolate.nearest", "nn.functional.scaled_dot_product_attention", "sort", "topk", "argmax",
    "gather", "scatter_add", "masked_scatter", "index_select", "masked_fill", "roll", "flip", "reshape", "cat",
    "unfold_copy", "cholesky", "linalg.qr", "fft.fft", "full",
]
# fmt: on
RIGHT = json.loads((report.HERE / "right.json").read_text())
COMBINED = [(s, m, mode) for s in SIZES for m in MESHES for mode in MODES]


def shown(result: Result) -> str:
    return "\n".join([f"{' '.join(result.key)}: {result.outcome}", *result.notes])


@pytest.mark.long
@pytest.mark.sampled(43)
@pytest.mark.parametrize("turn", [0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUBSET)
def test_what_is_listed_as_right_is_right(name, turn):
    sizes, mesh, mode = COMBINED[(SUBSET.index(name) + turn) % 8]
    result = run_cell(Cell(name, sizes, mesh, mode, cap=4, samples=2, seconds=60))
    assert result.outcome in ("right", "refused", "untestable"), shown(result)
    if name in RIGHT[sizes]:
        assert result.outcome != "refused", shown(result)


def test_the_subset_is_listed_as_right():
    assert [n for n in SUBSET if n not in RIGHT["even"] or n not in RIGHT["uneven"]] == []


@pytest.mark.slow  # about an hour on one core
def test_everything_that_is_listed_as_right_is_right():
    named = [(name, sizes) for sizes in SIZES for name in RIGHT[sizes]]
    cells = [Cell(name, sizes, mesh, mode) for name, sizes in named for mesh in MESHES for mode in MODES]
    command._warm_up()
    done = run_all(run_cell, cells, workers=os.cpu_count() or 1, seconds=Cell.seconds)
    wrong = [
        f"{cell.key}: {r.reason}" for cell, r in done if isinstance(r, Lost) or r.outcome not in ("right", "untestable")
    ]
    assert wrong == []


# --- what is tried ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_entries_are_those_of_torch():
    assert len(entries()) > 600
    assert {"add", "std.unbiased", "linalg.norm.subgradients_at_zero"} <= entries().keys()
    assert set(SUBSET) <= entries().keys()


@pytest.mark.long
def test_sizes():
    even, uneven = ({n for c in cases("mul", s, 5)[0] for x in c.tensors for n in x.shape} for s in SIZES)
    assert even - {0, 1, 2} == {4, 12}
    assert uneven - {0, 1, 3} == {5, 10}
    assert {n for c in cases("mul", "uneven", 5)[0] for x in c.tensors for n in x.shape} == uneven


def test_cuts():
    one, two = MESHES["4"], MESHES["2x2"]
    assert cuts((8, 5), one, even=False) == [((), ()), (("x",), ()), ((), ("x",))]
    assert cuts((8, 5), one, even=True) == [((), ()), (("x",), ())]
    assert cuts((), two, even=False) == [()]
    both = cuts((8, 6), two, even=True)
    assert ((("x", "y"), ()) in both, (("y", "x"), ()) in both, ((), ("x", "y")) in both) == (True, True, False)
    assert (("x",), ("y",)) in both
    assert len(cuts((8, 8), two, even=True)) == len(set(cuts((8, 8), two, even=False))) == 9 + 2


@pytest.mark.parametrize("mesh", MESHES)
def test_placements_are_all_different_and_all_there(mesh):
    shapes = [(8, 4), (4,)]
    found = list(placements(shapes, MESHES[mesh], True, "seed"))
    assert len(found) == len(set(found)) == math.prod(len(cuts(s, MESHES[mesh], True)) for s in shapes)
    assert found == list(placements(shapes, MESHES[mesh], True, "seed"))
    assert found[0] == (((), ()), ((),))
    assert ((("x",), ()), (("x",),)) in found[:4] or mesh == "2x2"


def test_samples_have_in_place_and_out_forms():
    plain, others = cases("add", "even", 3)
    assert len(plain) == 3
    assert {c.label.partition(", ")[2] for c in others} == {"in place", "out="}
    written, same = others[0].fn(*(x.clone() for x in others[0].tensors))
    assert written is same


# --- what it sees -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "op", "wrong", "what"),
    [
        ("cumsum", "aten::cumsum", "... -> ...", "result 0"),
        ("mm", "aten::mm", "m k, k n -> m n | k:none", "result 0"),
        ("log_softmax", "aten::_log_softmax_backward_data", "..., ... -> ...", "result 1"),
    ],
)
def test_a_wrong_rule_is_seen(name, op, wrong, what):
    cell = Cell(name, "uneven", "4", "jit", cap=12, samples=4)
    assert run_cell(cell).outcome == "right"
    with mock.patch.dict(rules.TABLE, {op: pattern(wrong)}), mock.patch.dict(rules._CACHE, clear=True):
        result = run_cell(cell)
    assert result.outcome == "wrong"
    assert any(f"wrong: {what}" in note for note in result.notes)


def test_refusals_and_missing_rules_are_named():
    refused = run_cell(Cell("nonzero", "even", "4", "jit", cap=2, samples=2))
    assert refused.outcome == "refused"
    assert "makes a shape that depends on values" in refused.reason
    with mock.patch.object(rules, "row", return_value=None), mock.patch.dict(rules._CACHE, clear=True):
        result = run_cell(Cell("sin", "uneven", "4", "jit", cap=2, samples=2))
    assert result.outcome == "right"
    assert "sin" in " ".join(result.replicated)


def job(what):
    if what == "crash":
        os.abort()
    if what == "hang":
        time.sleep(600)
    return what


@pytest.mark.long
def test_crashes_and_hangs_are_outcomes():
    done = dict(run_all(job, ["one", "crash", "hang", "two"], workers=2, seconds=10))
    assert done == {
        "one": "one",
        "two": "two",
        "crash": Lost("crash", "the process died of SIGABRT"),
        "hang": Lost("timeout", "not done after 10 s"),
    }


@pytest.mark.long
def test_the_command_goes_on_where_it_was_stopped(tmp_path, capsys):
    out = tmp_path / "sweep.jsonl"
    call = ["--only", "isnan", "--mesh", "4", "--cap", "2", "--samples", "2", "--out", str(out)]
    assert command.main(call) == 0
    lines = out.read_text().splitlines()
    assert len(lines) == 4
    assert "| all right | 1 (100.0%) | 1 (100.0%) |" in capsys.readouterr().out
    out.write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])  # stopped in the middle of a line
    assert command.main(call) == 0
    assert sorted(r.key for r in report.read(out)) == sorted(Result(**json.loads(line)).key for line in lines)
    assert out.read_text().startswith("\n".join(lines[:2]))
    with pytest.raises(SystemExit, match="no entry of op_db is called nothing"):
        command.main(["--only", "nothing"])


@pytest.mark.long
def test_the_worst_cell_counts(tmp_path):
    results = [
        Result("a", "even", "4", "jit", "right", trials={"right": 2}),
        Result("a", "even", "4", "eager", "wrong", "differs", {"wrong": 1}),
        Result("a", "uneven", "4", "jit", "right", replicated=["aten.a"]),
        Result("b", "even", "4", "jit", "untestable", "no samples"),
        Result("b", "even", "4", "eager", "right"),
        Result("c", "even", "4", "eager", "untestable", "no samples"),
    ]
    assert {n: r.outcome for n, r in report.verdicts(results, "even").items()} == {
        "a": "wrong",
        "b": "right",
        "c": "untestable",
    }
    text = report.table(results)
    for row in (
        "| entries | 3 | 1 |",
        "| testable | 2 | 1 |",
        "| all right | 1 (50.0%) | 1 (100.0%) |",
        "| silently wrong | 1 (50.0%) | 0 (0.0%) |",
        "| some op replicated for want of a rule | 0 (0.0%) | 1 (100.0%) |",
    ):
        assert row in text
    assert "* `a` (even 4 eager): differs" in report.faults(results)
    assert report.without_rules(results) == ["* `aten.a`: a"]
    with mock.patch.object(report, "HERE", tmp_path):
        report.report(results, "python -m tests.validation.sweep")
    assert json.loads((tmp_path / "right.json").read_text())["uneven"] == ["a"]
    assert text in (tmp_path / "REPORT.md").read_text()
    path = tmp_path / "x.jsonl"
    for r in results:
        report.write(path, r)
    assert [asdict(r) for r in report.read(path)] == [asdict(r) for r in results]
