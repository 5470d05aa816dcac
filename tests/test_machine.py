"""Machines: values that print and parse back, and know which link a group of a mesh uses."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardlib as sl
from shardlib.machine import PRESETS, Device, Link, Machine
from shardlib.meshes.axis import Axis
from tests.ranks import run_ranks


@pytest.mark.parametrize("name", PRESETS)
def test_a_machine_parses_back(name: str) -> None:
    machine = Machine.preset(name)
    assert Machine.parse(name) is machine
    assert Machine.parse(repr(machine)) == machine
    assert str(machine) == name
    other = replace(machine, links={"data": Link(1e9, 1e-6, sharing=4)}, name="")
    assert Machine.parse(str(other)) == other
    assert hash(Machine.parse(str(other))) == hash(other)


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
    assert h100.span([Axis("data", 8, pre=4, of=32)], axes)[:2] == (8, 1)  # the minor part
    assert h100.span([Axis("data", 4, pre=1, of=32)], axes)[:2] == (1, 4)  # the major one


def test_an_axis_may_have_a_link_of_its_own() -> None:
    own = Link(1e9, 1e-4)
    machine = replace(Machine.preset("h100"), links={"data": own})
    mesh = sl.Mesh.abstract(data=4, tensor=2)
    assert machine.span([mesh.axis("data")], mesh.axes) == (1, 4, own, own)
    assert machine.span([mesh.axis("tensor")], mesh.axes)[:2] == (2, 1)


def test_all_that_is_wrong_with_a_device_is_said_at_once() -> None:
    with pytest.raises(sl.ShardingError) as error:
        Device({"bf16": -1.0, "b16": 1.0}, bandwidth=0.0, memory=float("nan"), host=1.0, launch=-1e-6)
    assert str(error.value) == (
        "Device cannot be made:\n"
        "  * flops of 'b16': dtypes are f64, f32, bf16, f16, f8\n"
        "  * flops['bf16'] is -1.0, not a positive number\n"
        "  * bandwidth is 0.0, not a positive number\n"
        "  * memory is nan, not a positive number\n"
        "  * launch is -1e-06, not a number of 0 or more\n"
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
        (lambda: Machine.of(3), ["3 is no machine"]),
        (lambda: replace(Machine.preset("h100"), node=0), ["node is 0"]),
    ],
)
def test_bad_machines_are_refused(make: object, words: list[str]) -> None:
    with pytest.raises(sl.ShardingError) as error:
        make()  # type: ignore[operator]
    assert all(word in str(error.value) for word in words), str(error.value)


def test_this_machine_is_measured() -> None:
    machine = Machine.measure()
    assert set(machine.device.flops) == {"f64", "f32", "bf16"}
    assert machine.node == 1
    assert 1e6 < machine.device.bandwidth < 1e13
    assert Machine.parse(repr(machine)) == machine


def _measured() -> str:
    return repr(Machine.measure())


@pytest.mark.ranks
def test_ranks_measure_one_machine() -> None:
    first, second = run_ranks(_measured, 2)
    machine = Machine.parse(first)
    assert first == second
    assert machine.node == 2
    assert machine.inner.bandwidth < 1e13
