"""Weights are gathered where arithmetic hides that, though moving activations would be fewer bytes: the faster plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.compiler.plan.plan import Plan
from shardlib.sharding.mesh.machine import PRESETS, Machine

LAYERS, D, WIDE, DEVICES = 4, 256, 1024, 4
NODE = PRESETS["node"]
WAITS = replace(NODE, device=replace(NODE.device, overlaps=False))  # no message flies while a device computes
MATRICES = LAYERS * 2 * D * WIDE * 4  # bytes


def stack() -> nn.Module:
    layers = (nn.Sequential(nn.LayerNorm(D), nn.Linear(D, WIDE), nn.GELU(), nn.Linear(WIDE, D)) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def by_strategy(rows: int, machine: Machine | None = None) -> Plan:
    """Gradients of a stack under `fsdp`, with `rows` a device."""
    with sl.Mesh.abstract(data=DEVICES, machine=machine), torch.device("meta"):
        m = sl.parallelize(stack(), strategy="fsdp")

        def step(m: nn.Module, x: torch.Tensor) -> None:
            m(x).square().mean().backward()

        plan: Plan = sl.jit(step, in_specs=(None, "batch@data _")).plan(m, torch.empty(rows * DEVICES, D))
    return plan


def by_specs(rows: int, machine: Machine | None = None) -> Plan:
    """The same of matrices that are cut, of which nobody says that they are gathered anew."""
    up, down = ([torch.empty(*shape, device="meta")] * LAYERS for shape in ((D, WIDE), (WIDE, D)))

    def loss(up: list[torch.Tensor], down: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for u, d in zip(up, down, strict=True):
            x = torch.tanh(torch.relu(x @ u) @ d)
        return x.square().mean()

    with sl.Mesh.abstract(data=DEVICES, machine=machine):
        step = sl.jit(sl.grad(loss, argnums=(0, 1)), in_specs=("_ wide@data", "wide@data _", "batch@data _"))
        plan: Plan = step.plan(up, down, torch.empty(rows * DEVICES, D, device="meta"))
    return plan


def sent(plan: Plan) -> int:
    return int(sum(c.bytes for c in plan.compiled.program.collectives))


@pytest.mark.long
def test_weights_are_gathered_where_arithmetic_hides_them() -> None:
    ours, least = by_strategy(256), by_strategy(256, WAITS)
    assert 3 * 3 / 4 * MATRICES < sent(ours) == sent(by_strategy(2048)) < 1.01 * 3 * 3 / 4 * MATRICES  # as in ZeRO-3
    assert sent(least) < 0.7 * sent(ours)
    assert ours.simulate(NODE).seconds < 0.9 * least.simulate(NODE).seconds


@pytest.mark.long
def test_the_least_is_sent_where_nothing_hides_it() -> None:
    """Little arithmetic: messages would take longer than it."""
    assert sent(by_strategy(128)) == sent(by_strategy(128, WAITS)) < MATRICES


@pytest.mark.long
def test_of_a_named_machine_all_inputs_may_be_gathered_ahead() -> None:
    named, usual = by_specs(256, NODE), by_specs(256)
    assert sent(usual) == sent(by_specs(256, WAITS)) < sent(named) == 2 * 3 / 4 * MATRICES
    assert named.simulate(NODE).seconds < 0.95 * usual.simulate(NODE).seconds


@pytest.mark.long
def test_whose_messages_are_hidden() -> None:
    """Not those of what is read first, or made last; and of no value inside."""
    problem = by_strategy(256).compiled.propagated.search.problem
    names = {value.name for value in problem.hidden}
    matrices = {f"m_{layer}_{part}_weight" for layer in range(LAYERS) for part in (1, 3)}
    assert matrices - names == {"m_0_1_weight"}
    products = [v for v in problem.hidden if v.op is not None and v.op.kind == "mm"]
    assert len(products) == len(matrices) - 1, "gradients of all matrices but the first"
    assert not names & {"x", "mm", "relu"}


@pytest.mark.long
def test_gradients_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    plain, x = stack(), torch.randn(256 * DEVICES, D)
    ours = stack()
    ours.load_state_dict(plain.state_dict())
    plain(x).square().mean().backward()
    with sl.Mesh(data=DEVICES):
        m = sl.parallelize(ours, strategy="fsdp")
        m(sl.shard(x, "batch@data _")).square().mean().backward()
    for (name, p), q in zip(m.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, sl.ShardedTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-7, msg=name)
