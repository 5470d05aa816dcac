"""Collectives between machines on ranks: two ranks on each of two machines, and 2 hosts x 4 ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from shardlib.core.errors import CollectiveError
from shardlib.distributed.consensus import raise_lost_ranks
from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from shardlib.ops.collectives.transport.forms import OPS, choose_form
from shardlib.ops.collectives.transport.groups import GroupHandle, group_for
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import Link, Machine
from shardlib.sharding.mesh.mesh import Mesh
from tests.helpers.hosts import hosts, torchrun
from tests.helpers.ranks import Pool, RankError, only, speak
from tests.helpers.wire_bytes import count_sent

pytestmark = [pytest.mark.ranks, pytest.mark.together]
MODULES: dict[str, Any] = dict(zip(OPS, (all_gather, reduce_scatter, all_reduce, all_to_all), strict=True))
NEAR = 2
# Inside nothing costs anything, so two levels win where they can run.
PAIRS = Machine(Machine.preset("cpu").device, Link(1e12, 1e-9), Link(1e8, 5e-5, NEAR), node=NEAR)
CARDS = replace(PAIRS, inner=Link(1.5e8, 1e-5), outer=Link(1e8, 5e-5))  # a card for each rank: rings win


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool(4)) as pool:
        yield pool


def group(machine: Machine | None = PAIRS) -> GroupHandle:
    speak("pairs")
    mesh = Mesh(x=dist.get_world_size(), machine=machine)
    return group_for(mesh, (mesh.axis("x"),))


def machine_of(rank: int) -> int:
    return rank // NEAR


def arguments(op: str, kind: str, shape: tuple[int, ...], dim: int, n: int) -> tuple[Any, ...]:
    even = [shape[dim] // n] * n
    return {
        "all_gather": (dim, [shape[dim]] * n),
        "reduce_scatter": (dim, even, kind),
        "all_reduce": (kind,),
        "all_to_all": (dim, even, 1 - dim, [shape[1 - dim]] * n),
    }[op]


def tensors(shape: tuple[int, ...], dtype: torch.dtype, n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(n)]
    return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for _ in range(n)]


def run_op(op: str, xs: list[Tensor], args: tuple[Any, ...], machine: Machine) -> tuple[Tensor, int, str]:
    """The result of this rank, the bytes that it sent to the other machine, and the form that it chose."""
    handle = group(machine)
    x, (*head, kind) = xs[handle.position], (*args, "") if "reduce" not in op else args
    more = (kind,) if "reduce" in op else ()
    out, sent = count_sent(lambda: MODULES[op].start(x, *head, handle, *more).finish(), machine_of)
    assert out.is_contiguous()
    assert handle.span is not None
    form = choose_form(op, whole_bytes(op, x, handle.size), True, x.dtype, kind, handle.span)
    return out, sent, f"{form.name} {form.across:.0f}"


def whole_bytes(op: str, x: Tensor, n: int) -> int:
    return x.nbytes * (n if op == "all_gather" else 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (512, 1300)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, "sum"),
        (torch.float32, "max"),
        (torch.bfloat16, "sum"),
        (torch.int64, "sum"),
        (torch.bool, "min"),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_results_and_bytes(pool, op, dtype, kind, dim, shape):
    xs = tensors(shape, dtype, 4)
    args = arguments(op, kind, shape, dim, 4)
    want = MODULES[op].reference(xs, *args)
    results = pool.run(run_op, op, xs, args, PAIRS)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}.get(dtype, 0.0) if kind == "sum" and "reduce" in op else 0.0
    for (out, _, _), expected in zip(results, want, strict=True):
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    if op in ("all_gather", "all_reduce"):
        assert all(torch.equal(out, results[0][0]) for out, _, _ in results)  # replicas, bit by bit
    form, across = only([text for _, _, text in results]).split()
    sent = [sum(n for _, n, _ in results[first : first + NEAR]) for first in (0, 2)]
    assert form == "two_level" or (op, shape) == ("all_to_all", (512, 1300))
    assert sent == [int(across)] * 2


@pytest.mark.parametrize(("op", "form"), [("all_gather", "ring 32768"), ("all_reduce", "ring 16384")])
def test_a_ring_sends_more(pool, op, form):
    """A machine needs (p - k) / p of the bytes, and a ring brings (p - 1) / p."""
    xs = tensors((4096,), torch.float32, 4)
    machine = replace(CARDS, outer=Link(1e8, 1e-9), inner=Link(1.5e8, 1e-9))
    results = pool.run(run_op, op, xs, arguments(op, "sum", (4096, 1), 0, 4), machine)
    whole = whole_bytes(op, xs[0], 4)
    sent = sum(n for _, n, _ in results[:NEAR])
    assert only([text for *_, text in results]) == f"ring {sent}"
    assert sent == whole * 3 / 4 * (2 if op == "all_reduce" else 1)


def shared_result() -> list[float]:
    handle = group()
    x = torch.arange(1 << 18) + handle.position
    out = all_gather.start(x, 0, [len(x)] * 4, handle, shared=True).finish()
    return out.view(4, -1)[:, 0].tolist()


def test_a_result_that_ranks_share(pool):
    assert only(pool.run(shared_result)) == [0, 1, 2, 3]


def uneven() -> list[Any]:
    """Collectives that cannot run in two levels, beside ones of any size that can."""
    handle = group()
    me = handle.position
    gathered = all_gather.start(torch.full((me,), me), 0, [0, 1, 2, 3], handle).finish()
    scattered = reduce_scatter.start(torch.arange(4.0), 0, [1, 0, 3, 0], handle).finish()
    reduced = all_reduce.start(torch.arange(5.0), handle).finish()
    many = all_reduce.start_many([torch.ones(()), torch.ones(3, dtype=torch.int16)], handle).finish()
    return [x.tolist() for x in (gathered, scattered, reduced, *many)]


def test_uneven_sizes(pool):
    for rank, (gathered, scattered, reduced, *many) in enumerate(pool.run(uneven)):
        assert gathered == [1, 2, 2, 3, 3, 3]
        assert scattered == [[0.0], [], [4.0, 8.0, 12.0], []][rank]
        assert reduced == [0.0, 4.0, 8.0, 12.0, 16.0]
        assert many == [4.0, [4, 4, 4]]


def handles() -> list[Any]:
    speak("pairs")
    seen = []
    for axes, machine in (
        ([Axis("a", 2), Axis("b", 2)], PAIRS),  # all ranks
        ([Axis("b", 2), Axis("a", 2)], PAIRS),  # the same in another order
        ([Axis("a", 2)], PAIRS),  # one rank on each machine
        ([Axis("b", 2)], PAIRS),  # inside machines
        ([Axis("a", 2), Axis("b", 2)], None),
        ([Axis("a", 2), Axis("b", 2)], replace(PAIRS, node=1)),
        ([Axis("a", 2), Axis("b", 2)], replace(PAIRS, node=4)),
        ([Axis("a", 2), Axis("b", 2)], replace(PAIRS, inner=PAIRS.outer)),
    ):
        handle = group_for(Mesh(a=2, b=2, machine=machine), tuple(axes))
        levels = handle.levels and [(level.ranks, level.transport) for level in handle.levels]
        seen.append((handle.span and (handle.span.far, handle.span.near), levels, handle.why))
        x = torch.tensor([float(dist.get_rank())])
        assert all_gather.start(x, 0, [1] * handle.size, handle).finish().tolist() == list(map(float, handle.ranks))
    return seen


def test_groups_know_their_machines(pool):
    far = "ranks 0 and 2 are on different machines, or in different containers"
    model = "the machine model has {} of each group on a machine, but ranks 0, 1 share one"
    both = [((0, 1), "shm"), ((0, 2), "gloo")]
    assert pool.run(handles)[0] == [
        ((2, 2), both, far),
        (None, None, f"{far}; ranks of a machine do not follow each other in the group 0, 2, 1, 3"),
        ((2, 1), None, far),
        (None, None, ""),
        (None, None, far),
        (None, None, f"{far}; {model.format(1)}"),
        (None, None, far),
        (None, None, far),
    ]


def program() -> tuple[Tensor, int, list[tuple[str, float]], str]:
    """A step whose gradients are summed over machines: what it sends, and what its plan says."""
    speak("pairs")
    with Mesh(data=4, machine=PAIRS):
        step = sl.jit(sl.value_and_grad(loss), in_specs=("_ _", "batch@data _"), out_specs=("", "_ _"))
        args = sl.shard(torch.ones(16, 8), "_ _"), sl.shard(torch.arange(128.0).view(8, 16), "batch@data _")
        plan = step.plan(*args)
        step(*args)
        (_, grad), sent = count_sent(lambda: step(*args), machine_of)
        return grad.to_local(), sent, [(c.form, c.across) for c in plan.collectives], plan.summary()


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().sum()


def test_a_program_sends_what_its_plan_says(pool):
    results = pool.run(program)
    _, grad = torch.func.grad_and_value(loss)(torch.ones(16, 8), torch.arange(128.0).view(8, 16))[::-1]
    for out, *_ in results:
        torch.testing.assert_close(out, grad)
    planned = only([forms for *_, forms, _ in results])
    assert [form for form, _ in planned] == ["two_level", "two_level"]
    assert sum(sent for _, sent, *_ in results[:NEAR]) == sum(across for _, across in planned)
    assert "torch/two_level" in results[0][3]


def die_between_machines(victim: int) -> None:
    handle = group()
    mesh = Mesh(x=4, machine=PAIRS)
    for step in range(2):
        if step and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            all_reduce.start(torch.ones(1 << 16), handle).finish()
        except CollectiveError as error:
            raise_lost_ranks(mesh, error, 10.0)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named(victim):
    with closing(Pool(4)) as ranks, pytest.raises(RankError) as caught:
        ranks.run(die_between_machines, victim)
    errors = caught.value.errors
    assert errors.pop(victim) == f"died with exit code {-signal.SIGKILL}"
    assert len(errors) == 3
    assert all(f"rank {victim} is dead: its process is gone" in str(error) for error in errors.values())


# On hosts: this file is the script of every rank.


@pytest.mark.long
def test_between_hosts(tmp_path):
    with hosts(2) as members:
        before = [host.sent() for host in members]
        runs = torchrun(members, 4, [__file__, str(tmp_path)], OMP_NUM_THREADS="1", PYTHONPATH=":".join(sys.path))
        texts = [process.communicate(timeout=240)[0] for process in runs]
        wire = [host.sent() - n for host, n in zip(members, before, strict=True)]
    assert [process.returncode for process in runs] == [0, 0], "\n".join(texts)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(8)]
    assert {report["why"] for report in reports} == {
        "ranks 0 and 4 are on different machines, or in different containers"
    }
    assert [report["inner"] for report in reports] == [[[0, 1, 2, 3], "shm"]] * 4 + [[[4, 5, 6, 7], "shm"]] * 4
    for op in OPS:
        sent = [sum(report[op][1] for report in reports[first : first + 4]) for first in (0, 4)]
        assert sent == [only([report[op][0] for report in reports])] * 2, op
    for first, leaving in zip((0, 4), wire, strict=True):
        counted = sum(report[op][1] for report in reports[first : first + 4] for op in OPS)
        assert counted <= leaving <= 1.25 * counted  # with headers, acknowledgements and the rendezvous


def run_rank(folder: Path) -> None:
    """Checks each collective on this rank of a host, and reports the bytes planned and sent."""
    machine = replace(PAIRS, outer=Link(1e8, 5e-5, 4), node=4)
    mesh = Mesh(x=8, machine=machine)
    handle = group_for(mesh, (mesh.axis("x"),))
    assert handle.levels is not None, handle.why
    assert handle.span is not None
    report: dict[str, Any] = {"why": handle.why, "inner": (handle.levels[0].ranks, handle.levels[0].transport)}
    xs = tensors((1024, 1024), torch.float32, 8)
    for op in OPS:
        args = arguments(op, "sum", (1024, 1024), 0, 8)
        x = xs[handle.position]
        head, kind = (args[:-1], args[-1:]) if "reduce" in op else (args, ())
        form = choose_form(op, whole_bytes(op, x, 8), True, x.dtype, *(kind or [""]), handle.span)
        call = MODULES[op].start
        out, sent = count_sent(lambda c=call, h=head, k=kind, x=x: c(x, *h, handle, *k).finish(), lambda r: r // 4)
        torch.testing.assert_close(out, MODULES[op].reference(xs, *args)[handle.position], rtol=1e-5, atol=1e-5)
        report[op] = (int(form.across), sent)
    (folder / f"{handle.position}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
