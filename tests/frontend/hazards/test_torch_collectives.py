"""Calls of torch.distributed that communicate, inside a traced function: refused with the user's line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce as imported_by_name

import shardlib as sl
from tests.helpers.ranks import run_ranks


def world() -> int:
    return dist.get_world_size()


def gathered_objects(x: Tensor) -> Any:
    dist.all_gather_object([None] * world(), 3)


def caught(x: Tensor) -> Any:
    with contextlib.suppress(sl.ShardingError):
        dist.barrier()


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x.clone()),
    "all_reduce of a constant": lambda x: dist.all_reduce(torch.tensor(2.0)),
    "all_reduce by name": lambda x: imported_by_name(x.clone()),
    "all_reduce async": lambda x: dist.all_reduce(x.clone(), async_op=True),
    "reduce": lambda x: dist.reduce(x.clone(), 0),
    "barrier": lambda x: dist.barrier(),
    "monitored_barrier": lambda x: dist.monitored_barrier(),
    "broadcast": lambda x: dist.broadcast(x.clone(), 0),
    "all_gather": lambda x: dist.all_gather([x.clone() for _ in range(world())], x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x.new_empty(world() * len(x), 5), x),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x.new_empty(len(x) // world(), 5), x),
    "all_to_all_single": lambda x: dist.all_to_all_single(x.clone(), x),
    "scatter": lambda x: dist.scatter(x.clone(), [x] * world()),
    "send": lambda x: dist.send(x, 0),
    "recv": lambda x: dist.recv(x.clone(), 0),
    "isend": lambda x: dist.isend(x, 0),
    "P2POp": lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, world() - 1 - dist.get_rank())]),
    "all_gather_object": gathered_objects,
    "gather_object": lambda x: dist.gather_object(1, [None] * world() if dist.get_rank() == 0 else None),
    "broadcast_object_list": lambda x: dist.broadcast_object_list([1], 0),
    "scatter_object_list": lambda x: dist.scatter_object_list([None], [1] * world()),
    "send_object_list": lambda x: dist.send_object_list([1], 0),
    "recv_object_list": lambda x: dist.recv_object_list([None], 0),
    "new_group": lambda x: dist.new_group([0]),
    "new_subgroups": lambda x: dist.new_subgroups(1),
    "caught": caught,
    "allreduce_": lambda x: dist.group.WORLD.allreduce([x.clone()]),  # type: ignore[union-attr]
    "c10d.barrier": lambda x: dist.group.WORLD.barrier(),  # type: ignore[union-attr]
    "_c10d_functional.all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "dist.nn": lambda x: torch.distributed.nn.functional.all_reduce(x),
}
NAMES = {"all_reduce of a constant": "all_reduce", "all_reduce by name": "all_reduce", "all_reduce async": "all_reduce"}
NAMES |= {"caught": "barrier", "dist.nn": "test_torch_collectives.py"}


class Calls(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(5, 5), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x))


def returning(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The call's result, if it is a tensor, else its argument."""

    def fn(x: Tensor) -> Tensor:
        out = call(x)
        return out if isinstance(out, Tensor) else x

    return fn


def refusals() -> list[str]:
    """What is wrong with the errors for all these calls."""
    wrong = []

    def note(name: str, door: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except sl.ShardingError as error:
            text = str(error)
            first, second, *_, last = text.splitlines()
            line = "test_torch_collectives.py:" in second or "_functional_collectives" in text
            ok = "calls collectives of torch.distributed" in first and "sl.psum" in last and line
            if not ok or NAMES.get(name, name) not in second:
                wrong.append(f"{name}, {door}: {text}")
        else:
            wrong.append(f"{name}, {door}: ran")

    with sl.Mesh(data=world()):
        for name, call in CALLS.items():
            fn = returning(call)
            note(name, "jit", lambda fn=fn: sl.jit(fn, in_specs="n@data _")(torch.ones(8, 5)))
            note(name, "module", lambda fn=fn: sl.parallelize(Calls(fn), strategy="ddp")(torch.ones(8, 5)))
    return wrong


def answers() -> tuple[float, float]:
    """Questions are answered, and calls outside a trace communicate."""

    def scaled(x: Tensor) -> Tensor:
        return x * (dist.get_world_size() + dist.is_initialized() + len(dist.get_process_group_ranks(dist.group.WORLD)))

    with sl.Mesh(data=world()):
        out = sl.jit(scaled)(torch.ones(2)).full_tensor()
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    dist.all_gather_object(objects := [None] * world(), 3)
    assert objects == [3] * world()
    dist.barrier()
    return float(out[0]), float(total)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("n", [1, 2])
def test_collectives_of_torch_are_refused_in_traces(n: int) -> None:
    assert run_ranks(refusals, n) == [[]] * n
    assert run_ranks(answers, n) == [(2.0 * n + 1, n)] * n
