"""Machines: values that print and parse back, and know which link a group of a mesh uses."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import shardlib as sl
from shardlib.compiler.plan.plan import Plan
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import PRESETS, Device, Link, Machine
from shardlib.testing import measure_machine
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("name", PRESETS)
def test_a_machine_parses_back(name: str) -> None:
    machine = Machine.preset(name)
    assert Machine.parse(name) is machine
    assert Machine.parse(repr(machine)) == machine
    assert str(machine) == name
    other = replace(machine, links={"data": Link(1e9, 1e-6, sharing=4)}, name="")
    assert Machine.parse(str(other)) == other
    assert hash(Machine.parse(str(other))) == hash(other)


def test_a_machine_may_be_copied_and_pickled() -> None:
    h100 = Machine.preset("h100")
    machine = replace(h100, links={"data": h100.outer}, device=replace(h100.device, flops={"f32": 1e13}))
    for x in (machine, machine.device):
        assert copy.deepcopy(x) == x
        assert pickle.loads(pickle.dumps(x)) == x


def test_functions_of_a_device_print_and_parse_back() -> None:
    device = Device({"f32": 1e12}, bandwidth=1e12, memory=1e9, host=1e9, attention=0.5, special=3e9, tile=64)
    assert repr(device).endswith("attention=0.5, special=3e9, tile=64)")
    machine = Machine(device, Link(1e9), Link(1e9))
    assert Machine.parse(repr(machine)).device == device
    silent = replace(machine, device=replace(device, special=float("inf"), tile=1))  # what never waits is not said
    assert "special" not in repr(silent)
    assert silent.device.special == Machine.preset("node").device.special  # as of a mesh that names no machine
    assert silent.device.tile == Machine.preset("node").device.tile
    assert Machine.parse(repr(silent)) == silent


@pytest.mark.parametrize(
    ("axes", "group", "near", "far"),
    [
        ({"data": 4, "tensor": 8}, ("tensor",), 8, 1),
        ({"data": 4, "tensor": 8}, ("data",), 1, 4),
        ({"data": 4, "tensor": 8}, ("data", "tensor"), 8, 4),
        ({"data": 8, "tensor": 4}, ("data",), 2, 4),  # two of a node's eight devices
        ({"tensor": 8, "data": 4}, ("tensor",), 2, 4),  # the same devices, the other axis inside
        ({"data": 2, "tensor": 3}, ("tensor",), 1, 3),  # 3 does not divide 8: some groups leave the node
        ({"data": 16}, ("data",), 8, 2),
    ],
)
def test_where_the_members_of_a_group_are(axes: dict[str, int], group: tuple[str, ...], near: int, far: int) -> None:
    mesh = sl.Mesh.abstract(axes)
    assert Machine.preset("h100").span([mesh.axis(name) for name in group], mesh.axes)[:2] == (near, far)


def test_parts_of_an_axis_are_near_or_far() -> None:
    h100, axes = Machine.preset("h100"), {"data": 32}
    assert h100.span([Axis("data", 8, pre=4, axis_size=32)], axes)[:2] == (8, 1)  # the minor part
    assert h100.span([Axis("data", 4, pre=1, axis_size=32)], axes)[:2] == (1, 4)  # the major one


def test_an_axis_may_have_a_link_of_its_own() -> None:
    own = Link(1e9, 1e-4)
    machine = replace(Machine.preset("h100"), links={"data": own})
    mesh = sl.Mesh.abstract(data=4, tensor=2)
    assert machine.span([mesh.axis("data")], mesh.axes) == (1, 4, own, own)
    assert machine.span([mesh.axis("tensor")], mesh.axes)[:2] == (2, 1)


def test_all_that_is_wrong_with_a_device_is_said_at_once() -> None:
    with pytest.raises(sl.ShardingError) as error:
        Device(
            {"bf16": -1.0, "b16": 1.0},
            bandwidth=0.0,
            memory=float("nan"),
            host=1.0,
            launch=-1e-6,
            attention=0.0,
            special=0.0,
            tile=0,
            spread=-0.1,
        )
    assert str(error.value) == (
        "Device cannot be made:\n"
        "  * flops of 'b16': dtypes are f64, f32, bf16, f16, f8\n"
        "  * flops['bf16'] is -1.0, not a positive, finite number\n"
        "  * bandwidth is 0.0, not a positive, finite number\n"
        "  * memory is nan, not a positive, finite number\n"
        "  * special is 0.0, not a positive, finite number\n"
        "  * tile is 0, not a positive, finite number\n"
        "  * attention is 0.0, not a positive, finite number\n"
        "  * launch is -1e-06, not a number of 0 or more\n"
        "  * spread is -0.1, not a number of 0 or more\n"
        "Rule: rates are per second, in bytes or FLOPs, and positive"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(-3e9), ["Link cannot be made", "bandwidth is -3000000000.0"]),
        (lambda: Machine.preset("h10"), ["'h10' is no machine; did you mean 'h100'?", "a100-40"]),
        (
            lambda: Machine.parse("Machine(device=open('x'))"),
            ["cannot be read as", "open('x') is no Machine"],
        ),
        (lambda: Machine.parse("Machine(node=8)"), ["cannot be read as a machine", "missing"]),
        (lambda: Machine.parse("Machine(Link(1.0))"), ["fields by name"]),
        (lambda: Machine.convert(3), ["3 is no machine"]),
        (lambda: replace(Machine.preset("h100"), node=0), ["node is 0"]),
        (lambda: replace(Machine.preset("h100"), node=2.5), ["node is 2.5"]),
        (lambda: Machine("h100", 3, None), ["device is 'h100', no Device", "inner is 3, no Link", "outer is None"]),
        (lambda: replace(Machine.preset("h100"), links={"data": 3}), ["links['data'] is 3, no Link"]),
        (lambda: replace(Machine.preset("h100"), links=["data"]), ["links is ['data'], no Link"]),
        (lambda: Device({}, bandwidth=1.0, memory=1.0, host=1.0), ["flops names no dtype"]),
        (lambda: Link(float("inf")), ["bandwidth is inf"]),
        (lambda: replace(PRESETS["h100"].device, flops=1e12), ["flops is 1000000000000.0, no FLOP/s by dtype (f64, "]),
        (lambda: replace(PRESETS["h100"].device, efficiency=1.2), ["efficiency is 1.2, more than all"]),
        (lambda: replace(PRESETS["h100"].device, overlaps="no"), ["overlaps is 'no', not True or False"]),
        (lambda: replace(PRESETS["h100"], links={0: Link(1e9)}), ["links names 0, no axis"]),
        (lambda: replace(PRESETS["h100"], name=None), ["name is None, no text"]),
        (lambda: Machine.preset(["h100"]), ["['h100'] is no machine"]),
        (lambda: Machine.parse(None), ["None is no machine"]),
        (
            lambda: Machine.parse("Machine(device=Device(flops={'f32': -1.0}, bandwidth=1.0, memory=1.0, host=1.0))"),
            ["flops['f32'] is -1.0"],
        ),
    ],
)
def test_bad_machines_are_refused(make: object, words: list[str]) -> None:
    with pytest.raises(sl.ShardingError) as error:
        make()  # type: ignore[operator]
    assert all(word in str(error.value) for word in words), str(error.value)


SHORT = {"_SECONDS": 1e-3, "_SIDE": {"cpu": 64}}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes less time, and is less exact."""
    for name, value in SHORT.items():
        monkeypatch.setattr(measure_machine, name, value)


@pytest.mark.usefixtures("_short")
def test_this_machine_is_measured() -> None:
    machine = Machine.measure()
    assert set(machine.device.flops) == {"f64", "f32", "bf16"}
    assert machine.node == 1
    assert 1e6 < machine.device.bandwidth < 1e13
    assert 1e5 < machine.device.special < 1e12
    assert Machine.parse(repr(machine)) == machine


@pytest.mark.usefixtures("_short")
def test_devices_that_are_only_planned_for_are_not_measured() -> None:
    with sl.Mesh.abstract(data=8, device="cuda"):
        assert not Machine.measure().device.overlaps  # this machine's


def _measured() -> str:
    with mock.patch.multiple(measure_machine, **SHORT):
        return repr(Machine.measure())


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_measure_one_machine() -> None:
    first, second = run_ranks(_measured, 2)
    machine = Machine.parse(first)
    assert first == second
    assert machine.node == 2
    assert machine.inner.bandwidth < 1e13


# --- of a mesh --------------------------------------------------------------------------------------------------------


def product(mesh: sl.Mesh, n: int = 4096) -> Plan:
    """A product of which each axis cuts two dims, and whose result goes elsewhere; as a whole."""
    x = torch.empty(n, n, device="meta", dtype=torch.bfloat16)
    specs = ("i@data k@tensor", "k@data j@tensor")
    with mesh:
        whole = sl.Schedule(parts=1)
        fn = sl.jit(lambda x, w: (x @ w).relu(), in_specs=specs, out_specs="i j@(data tensor)", schedule=whole)
        return fn.plan(x, x)


def sent(plan: Plan, axis: str) -> float:
    return sum(c.bytes for c in plan.compiled.program.collectives if axis in {a.name for a in c.axes})


def test_decisions_follow_the_machine() -> None:
    """Between nodes less is sent then; where all links are alike a machine changes nothing."""
    alike, told = (product(sl.Mesh.abstract(data=4, tensor=8, machine=name)) for name in (None, "h100"))
    assert sent(told, "data") < sent(alike, "data")
    assert told.simulate("h100").seconds < 0.9 * alike.simulate("h100").seconds
    assert told.simulate().machine is Machine.preset("h100")
    assert alike.simulate().machine is Machine.preset("node")
    same = product(sl.Mesh.abstract(data=4, tensor=8, machine="node"))
    assert [(str(c), c.bytes) for c in same.compiled.program.collectives] == [
        (str(c), c.bytes) for c in alike.compiled.program.collectives
    ]


def test_an_axis_with_a_slow_link_is_spared() -> None:
    fast = Machine.preset("node")
    for slow, other in (("data", "tensor"), ("tensor", "data")):
        mesh = sl.Mesh.abstract(data=4, tensor=4, machine=replace(fast, links={slow: Link(1e9)}))
        plan = product(mesh)
        assert sent(plan, slow) < sent(plan, other)


@pytest.mark.long
def test_numbers_are_those_of_any_machine() -> None:
    x, w, v = torch.randn(8, 16), torch.randn(16, 12), torch.randn(12, 8)

    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x @ w).relu() @ v, -1).sum(0)

    want = step(x, w, v)
    for name in (None, *PRESETS):
        with sl.Mesh(data=2, tensor=4, machine=name):
            got = sl.jit(step, in_specs=("i@data k@tensor", "k@data j@tensor", "j@tensor l@data"))(x, w, v)
        torch.testing.assert_close(got.full_tensor(), want)


def test_a_mesh_says_its_machine() -> None:
    own = replace(Machine.preset("h100"), node=4, name="")
    for machine in ("a100-40", own):
        mesh = sl.Mesh.abstract(data=4, tensor=8, machine=machine)
        assert mesh.machine == Machine.convert(machine)
        assert sl.Mesh.parse(str(mesh)) == mesh
        assert pickle.loads(pickle.dumps(mesh)).machine == mesh.machine
        assert mesh != sl.Mesh.abstract(data=4, tensor=8)
    assert str(sl.Mesh.abstract(data=4, machine="h100")) == "Mesh.abstract(data=4, machine='h100')"


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (replace(Machine.preset("h100"), links={"tensr": Link(1e9)}), "has a link for axis 'tensr', the mesh (data=2)"),
        ("h10", "'h10' is no machine; did you mean 'h100'?"),
        (8, "8 is no machine"),
    ],
)
def test_machines_that_no_mesh_has_are_refused(machine: Any, words: str) -> None:
    with pytest.raises(sl.ShardingError, match=re.escape(words)):
        sl.Mesh(data=2, machine=machine)


def test_machines_of_other_axes_are_refused_at_once() -> None:
    with sl.Mesh(data=2):
        plan = sl.jit(lambda x: x * 2).plan(torch.ones(4))
    other = replace(Machine.preset("h100"), links={"seq": Link(1e9)})
    with pytest.raises(sl.ShardingError, match=re.escape("has a link for axis 'seq', the mesh (data=2) has none")):
        plan.simulate(other)
