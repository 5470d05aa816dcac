"""Faults that only a GPU would show, planted one mechanism at a time: each is seen, and nothing without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import ShardingError
from shardlib.compiler.codegen import distributed, virtual
from shardlib.compiler.lower.local_forms.local_builder import LocalForm
from shardlib.compiler.program import verify
from shardlib.compiler.program.steps import makes, reads
from shardlib.eager.arg_slots import replace_devices
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.torch_wire import Handle
from tests.validation.fakecuda.gpu import cuda_mesh
from tests.validation.fakecuda.programs import world
from tests.validation.fakecuda.watch import Seen

aten = torch.ops.aten
Plant = AbstractContextManager[Any]


def seen_in(
    fn: Callable[..., Any], specs: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, rank: bool = False
) -> Seen:
    """What is seen of `fn`, jitted on four GPUs, or on one of four ranks."""
    seen = Seen()
    with world(seen, "", (1, 4) if rank else None), cuda_mesh(data=2, tensor=2):
        args = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        try:
            sl.jit(fn, in_specs=specs)(*args)
        except ShardingError:
            raise
        except Exception as error:  # noqa: BLE001 # a raw error is how torch refuses on fake tensors
            seen.fault(f"{type(error).__name__}: {error}")
    return seen


def reads_in_a_local_form() -> Plant:
    write = LocalForm.emit

    def emit(self: LocalForm, target: Any, args: Any, kwargs: Any, made: Any) -> Any:
        out = write(self, target, args, kwargs, made)
        if out:
            write(self, aten._local_scalar_dense.default, out[:1], {}, [None])
        return out

    stack = ExitStack()
    stack.enter_context(mock.patch.object(LocalForm, "emit", emit))
    stack.enter_context(mock.patch.object(verify, "STRICT", False))  # torch refuses it of tensors without values
    return stack


def made_on_the_cpu() -> Plant:
    write = LocalForm.emit

    def emit(self: LocalForm, target: Any, args: Any, kwargs: Any, made: Any) -> Any:
        return write(self, target, args, replace_devices(kwargs, torch.device("cpu")), made)

    return mock.patch.object(LocalForm, "emit", emit)


def on_the_cpu(sources: list[Tensor], kind: str = "sum") -> list[Tensor]:
    return [sources[0].to("cpu")] * len(sources)


def forgetful(x: Tensor, *, group: GroupHandle, kind: str) -> Handle[Tensor]:
    """A start that holds on to nothing of what is sent."""
    buffer = torch.ops._c10d_functional.all_reduce(x, kind, group.name)
    return Handle(lambda: torch.ops._c10d_functional.wait_tensor(buffer))


def freed_too_early(steps: Any) -> Any:
    return {v: i for i, step in enumerate(steps) for v in (*reads(step), *makes(step))}


def given_up_in_flight() -> Plant:
    """Neither the program nor the start keeps what is sent."""
    stack = ExitStack()
    stack.enter_context(mock.patch.dict(distributed._START, all_reduce=forgetful))
    stack.enter_context(mock.patch("shardlib.compiler.passes.memory.free.last_reads", freed_too_early))
    for checks in ("check", "verify"):
        stack.enter_context(mock.patch(f"shardlib.compiler.passes.{checks}", lambda program: program))
    return stack


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))


# fault -> (the mechanism that is taken out or bent, a program that needs it, what is said)
PLANTED: dict[str, tuple[Callable[[], Plant], Callable[[], Seen], str]] = {
    "a constant made on the CPU": (
        made_on_the_cpu,
        lambda: seen_in(lambda x: x + torch.arange(8), ("_ _@data",), (6, 8)),
        "makes a tensor on cpu",
    ),
    "a value read in a local form": (
        reads_in_a_local_form,
        lambda: seen_in(cross_entropy, ("_ _@tensor",), (1, 8)),
        "makes the host wait for values",
    ),
    "a captured tensor on the CPU": (
        lambda: mock.patch("shardlib.compiler.codegen.codegen._place_captured", lambda tensor, mesh: tensor),
        lambda: seen_in(lambda x: x + torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7]), ("_@data _",), (6, 8)),
        "device",  # "two different devices", or "to be on the same device"
    ),
    "a dtype that only the CPU gives": (
        lambda: mock.patch("shardlib.frontend.retarget_device.can_trace_on", return_value=True),
        lambda: seen_in(lambda x: F.layer_norm(x, (8,)), ("_@data _",), (6, 8), dtype=torch.bfloat16),
        "is torch.float32, the program says torch.bfloat16",
    ),
    "a result on another device": (
        lambda: mock.patch.dict(virtual._SHARED, all_reduce=on_the_cpu),
        lambda: seen_in(lambda x: x.sum(), ("_@data _",), (6, 8)),
        "makes a tensor on cpu",
    ),
    "a collective that nobody waits for": (
        lambda: mock.patch("shardlib.ops.collectives.all_reduce.wait", lambda tensor: tensor),
        lambda: seen_in(lambda x: x.sum() * 2, ("_@data _",), (6, 8), rank=True),
        "before it is waited for",
    ),
    "memory given up in flight": (
        given_up_in_flight,
        lambda: seen_in(lambda x: x.sum(0) * 2, ("_@data _",), (8, 8), rank=True),
        "given up while a collective reads it",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_seen(fault: str) -> None:
    plant, run, text = PLANTED[fault]
    sound = run()
    assert not sound.faults
    assert sound.counts["programs"]
    with ExitStack() as stack:
        stack.enter_context(plant())
        found = run().faults
    assert any(text in f for f in found), found
