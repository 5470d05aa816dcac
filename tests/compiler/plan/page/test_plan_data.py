"""The data of a page: its figures are those of the plan, whatever is folded."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.compiler.plan.page.write_page import page_data
from shardlib.compiler.program.buffers import alive, lifetimes, peak_bytes
from shardlib.compiler.program.steps import Compute, Start
from shardlib.core.source_lines import format_path_line

from .plans import PLANS, plan_module, read_table


@cache
def planned(name: str) -> tuple[sl.Plan, dict[str, Any]]:
    """A plan, and its page's data."""
    plan = PLANS[name]()
    return plan, page_data([plan], "h100")


def tables(name: str) -> tuple[sl.Plan, dict[str, Any]]:
    """A plan, and the tables of its data as records."""
    plan, data = planned(name)
    own = data["plans"][0]
    names = ["program", "messages", "alternatives", "inputs", "outputs", "redundant", "lines"]
    records: dict[str, Any] = {key: read_table(data, own[key]) for key in names}
    return plan, records | {"raw": own, "values": read_table(data, own["memory"]["values"])}


every_plan = pytest.mark.parametrize("name", PLANS)


@every_plan
def test_messages_are_the_collectives_of_the_plan(name: str) -> None:
    plan, data = tables(name)
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    for m in data["messages"]:
        line = data["lines"][m["line"]]
        place = f"{line['file']}:{line['number']}" if line["number"] else line["file"]
        counts[m["kind"], m["axes"], place] += m["total"]
    assert counts == Counter((c.kind, " ".join(c.axes), c.line) for c in plan.collectives)
    assert sum(m["bytes"] * m["total"] for m in data["messages"]) == pytest.approx(
        sum(c.bytes for c in plan.collectives), rel=1e-12
    )


@every_plan
def test_rows_are_the_steps_of_the_program(name: str) -> None:
    plan, data = tables(name)
    leaves = [row for row in data["program"] if row["kind"] != "group"]
    kinds: Counter[str] = Counter()
    for row in leaves:
        kinds["call" if row["kind"] == "small" else row["kind"]] += row["total"]
    steps = plan.compiled.program.steps
    moves = sum(len(s.moves) for s in steps if isinstance(s, Start))
    assert kinds["call"] == sum(isinstance(s, Compute) for s in steps)
    assert (kinds["message"], kinds["copy"]) == (len(plan.collectives), moves - len(plan.collectives))
    work = sum(s.flops for s in steps if isinstance(s, Compute))
    assert sum(row["flops"] * row["total"] for row in leaves) == pytest.approx(work, rel=1e-12)
    for position, row in enumerate(data["program"]):
        above = data["program"][row["parent"]]["total"] if row["parent"] >= 0 else 1
        assert row["parent"] < position
        assert row["total"] == above * row["times"]


@every_plan
def test_memory_is_what_the_plan_counts(name: str) -> None:
    plan, data = tables(name)
    steps = data["raw"]["memory"]["steps"]
    levels = [sum(v["bytes"] for v in data["values"] if v["start"] <= i <= v["end"]) for i in range(max(steps, 1))]
    assert max(levels) == plan.peak_memory
    for program in plan.programs:
        spans = lifetimes(program)
        summed = [sum(x.var.nbytes for x in spans if x.start <= i <= x.end) for i in range(len(program.steps))]
        assert summed == list(alive(program))


@every_plan
def test_repeated_work_stands_on_its_line(name: str) -> None:
    plan, data = tables(name)
    assert [(r["op"], r["flops"], r["bytes"]) for r in data["redundant"]] == [
        (r.op, r.flops, r.bytes) for r in plan.redundant
    ]
    assert all(r["line"] >= 0 for r in data["redundant"])


@every_plan
def test_every_collective_has_its_reasons(name: str) -> None:
    plan, data = tables(name)
    for m in data["messages"]:
        assert m["reason"] in {c.reason for c in plan.collectives}
        assert m["explain"].startswith(f"{m['kind']}[{m['axes']}] of {m['value']}: ")
        assert "\n  because " in m["explain"]
    choices: Counter[tuple[int, str, str]] = Counter()
    for a in data["alternatives"]:
        choices[a["message"], a["op"], a["axis"]] += a["chosen"]
    assert set(choices.values()) <= {1}


@pytest.mark.parametrize("name", ["mlp", "pipeline"])
def test_reasons_are_those_of_explain(name: str) -> None:
    plan, data = tables(name)
    for m in data["messages"]:
        index = next(i for i, c in enumerate(plan.collectives) if (c.value, c.reason) == (m["value"], m["reason"]))
        lines = [line for line in m["explain"].splitlines() if " shards " not in line]
        assert set(lines) <= {*plan.explain(index).splitlines()}


@every_plan
def test_every_value_has_a_layout_and_a_reason(name: str) -> None:
    plan, data = tables(name)
    layouts = [layout["text"] for layout in data["raw"]["layouts"]]
    inputs = plan.to_dict()["inputs"]
    assert sum(v["times"] for v in data["inputs"]) == len(inputs)
    assert {v["type"] for v in data["inputs"]} == set(inputs.values())
    assert all(layouts[v["layout"]] == v["type"] for v in data["inputs"])
    assert sum(v["bytes"] for v in data["inputs"]) == sum(v.nbytes for v in plan.compiled.program.inputs)
    assert all(v["why"] for v in data["values"])


@every_plan
def test_the_data_is_json_and_names_only_known_texts(name: str) -> None:
    plan, data = planned(name)
    assert json.loads(json.dumps(data))["plans"][0]["heading"] == plan.heading
    assert len(set(data["strings"])) == len(data["strings"])


def test_lines_show_the_source_around_them() -> None:
    plan, data = tables("mlp")
    (own,) = [file for file in data["raw"]["files"] if file["file"].endswith("plans.py")]
    shown = {first + i: text for first, texts in own["stretches"] for i, text in enumerate(texts)}
    for step in plan.compiled.program.steps:
        if isinstance(step, Compute) and step.line is not None:
            assert shown[step.line.lineno].strip() == step.line.text
            assert format_path_line(step.line) == f"{own['file']}:{step.line.lineno}"
    assert any("def mlp" in text for text in shown.values())


def test_repeated_layers_are_stored_once() -> None:
    few, many = (page_data([plan_module(layers)])["plans"][0]["program"]["rows"] for layers in (6, 12))
    assert len(few) == len(many)
    assert max(row[4] for row in many) >= 10


def test_phases_follow_the_training_step() -> None:
    _, data = tables("module")
    phases: dict[str, set[str]] = {}
    for message in data["messages"]:
        phases.setdefault(message["kind"], set()).add(message["phase"])
    assert phases == {"all_gather": {"forward", "backward"}, "reduce_scatter": {"backward"}, "all_reduce": {"forward"}}
    runs = [phase for _, phase in data["raw"]["memory"]["phases"]]
    assert runs == ["forward", "backward"] * 3 + [
        "optimizer"
    ]  # two constants of the backward pass stand in front of it
    assert [row["text"] for row in data["program"] if row["parent"] < 0][-1] == "optimizer"


def test_returned_views_are_results() -> None:
    """The memory of a result may first have had another name."""
    with sl.Mesh(data=2):
        plan = sl.jit(lambda x: (x * 2).T, in_specs=("rows@data _",)).plan(torch.ones(4, 3))
    data = page_data([plan])
    values = read_table(data, data["plans"][0]["memory"]["values"])
    assert [v["why"] for v in values] == ["an argument, or captured: kept for the whole call", "returned as result"]


def test_pipelines_have_the_seconds_of_messages_and_the_stages_that_are_shown() -> None:
    plan, data = tables("pipeline")
    assert [m["exposed"] for m in data["messages"]] == [None] * len(data["messages"])
    assert all(m["seconds"] > 0 for m in data["messages"])
    peaks = [peak_bytes(program) for program in plan.programs]
    simulated = plan.simulate("h100").program
    assert data["raw"]["memory"]["stage"] == peaks.index(max(peaks))
    assert plan.programs[data["raw"]["clock"]["stage"]] is simulated
    _, alone = tables("mlp")
    assert (alone["raw"]["memory"]["stage"], alone["raw"]["clock"]["stage"]) == (None, None)
    assert all(m["exposed"] is not None for m in alone["messages"])


def test_without_a_machine_nothing_is_simulated() -> None:
    plan, _ = planned("mlp")
    own = page_data([plan])["plans"][0]
    assert own["clock"] is None
    assert "simulated step" not in [name for name, *_ in own["totals"]]


@every_plan
def test_events_are_those_of_the_simulation(name: str) -> None:
    plan, data = planned(name)
    clock = data["plans"][0]["clock"]
    events, simulated = read_table(data, clock["events"]), plan.simulate("h100")
    line = simulated.timeline
    assert [e["name"] for e in events] == [e.name for e in line.events]
    assert sum(e["duration"] for e in events) == pytest.approx(1e6 * sum(e.seconds for e in line.events), abs=1e-2)
    assert sum(e["exposed"] for e in events) == pytest.approx(1e6 * line.exposed, abs=1e-2)


def test_alternatives_count_the_bytes_that_the_other_choice_sends() -> None:
    """An output that is left to the compiler: rows of both operands over data, or one of them gathered."""
    x, w = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    with sl.Mesh.abstract(data=4):
        plan = sl.jit(lambda x, w: x @ w, in_specs=("m@data _", "_ n@data")).plan(x, w)
        data = page_data([plan])
        options = {a["dim"]: a for a in read_table(data, data["plans"][0]["alternatives"])}
        chosen = next(dim for dim, a in options.items() if a["chosen"])
        assert {dim: round(a["bytes"]) for dim, a in options.items() if dim in ("m", "n")} == {
            "m": 32 * 16 * 4 * 3 // 4,  # w is gathered
            "n": 64 * 32 * 4 * 3 // 4,  # x is gathered
        }
        assert (chosen, round(options[chosen]["bytes"])) == ("m", plan.comm_bytes)
