"""Replicas that drift apart are named: the value, the ranks that are wrong, and both digests."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.tensor.replicas import _find_drift, digest_bits
from tests.helpers.ranks import only, run_ranks


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (4, 4)])
def test_a_digest_sees_every_bit_and_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 2, shape).to(dtype)
    own = int(digest_bits(x))
    assert own == int(digest_bits(x.clone())) == int(digest_bits(torch.stack([x, x])[1]))
    others = set()
    for bit in range(8 * x.itemsize * x.numel()) if dtype is not torch.bool else ():
        other = x.clone().contiguous()
        flat = other.view(-1).view(torch.uint8)
        flat[bit // 8] ^= 1 << bit % 8
        others.add(int(digest_bits(other)))
    assert own not in others
    assert len(others) == (8 * x.itemsize * x.numel() if dtype is not torch.bool else 0)
    if x.dtype.is_floating_point and x.numel() > 1:  # an even number of signs
        y = x.flatten()
        y[:2] *= -1
        assert int(digest_bits(y)) != own
    if x.numel() > 1:
        flipped = x.flatten().flip(0)
        assert (int(digest_bits(flipped)) == int(digest_bits(x.flatten()))) == torch.equal(flipped, x.flatten())


def test_a_digest_of_many_words() -> None:
    x = torch.zeros((1 << 15) + 5, dtype=torch.int32)
    digests = {int(digest_bits(x))}
    for i in range(len(x)):
        x[i] = 1
        digests.add(int(digest_bits(x)))
        x[i] = 0
    assert len(digests) == len(x) + 1


@pytest.mark.parametrize(
    ("digests", "first", "lines"),
    [
        ([5, 5, 5], [0, 0, 0], []),
        ([5, 6, 5], [0, 0, 0], ["rank 1 has 6, ranks 0 and 2 have 5"]),
        ([5, 6], [0, 0], ["rank 1 has 6, rank 0 has 5; as many ranks have the one as the other"]),
        ([5, 7, 5, 9, 5, 7], [0, 1, 0, 1, 0, 1], ["rank 3 has 9, ranks 1 and 5 have 7"]),
        ([1, 2, 3, 1], [0, 0, 0, 0], ["rank 1 has 2, ranks 0 and 3 have 1", "rank 2 has 3, ranks 0 and 3 have 1"]),
        ([-1, -1, 4], [0, 0, 0], ["rank 2 has 4, ranks 0 and 1 have ffffffffffffffff"]),
    ],
)
def test_most_ranks_are_right(digests: list[int], first: list[int], lines: list[str]) -> None:
    assert [re.sub(r"\b0+(?=\d)", "", line) for line in _find_drift(digests, first)] == lines


def _module(strategy: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    sl.parallelize(module, {}, strategy=strategy, **options)
    return module, torch.optim.Adam(module.parameters())


def _step(module: nn.Module, opt: torch.optim.Optimizer, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(rows).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


NAMES = {
    "jit": {"weight": "module.0.weight", "buffer": "module.1.running_mean", "moment": "exp_avg"},
    "parallelize": {"weight": "0.weight", "buffer": "1.running_mean", "moment": "exp_avg of 2.bias"},
}


def _drift(door: str, what: str, strategy: str) -> list[str]:
    """On a rank: the errors of the calls after a value got other bits on rank 2, and retraces."""
    errors = []
    with sl.Mesh(data=2, tensor=2, rules={"batch": "data"}):
        module, opt = _module(strategy, verify_every=2 if door == "parallelize" else None)
        step = sl.jit(_step, verify_every=2) if door == "jit" else _step
        torch.manual_seed(1)
        for call in range(1, 5):
            rows = torch.randn(8, 8)
            if call == 4 and dist.get_rank() == 2:
                x = {"weight": module[0].weight, "buffer": module[1].running_mean}.get(what)
                x = opt.state[module[2].bias]["exp_avg"] if x is None else x
                (x._locals[0] if isinstance(x, sl.ShardedTensor) else x).view(-1)[0] += 1
            try:
                step(module, opt, rows)
            except sl.ShardingError as error:
                errors.append(f"{call}: {error}")
        retraces = step.retraces if door == "jit" else module.forward.retraces
    return [*errors, *retraces]


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    ("door", "what", "strategy"),
    [
        ("parallelize", "weight", "ddp"),
        ("parallelize", "buffer", "fsdp"),
        ("parallelize", "moment", "fsdp"),
        ("jit", "weight", "fsdp"),
        ("jit", "buffer", "ddp"),
        ("jit", "moment", "ddp"),
    ],
)
def test_the_value_and_the_rank_that_drifted_are_named(door: str, what: str, strategy: str) -> None:
    (error,) = only(run_ranks(_drift, 4, door, what, strategy))
    assert re.match(rf"4: .*the replicas of .*{re.escape(NAMES[door][what])}.* are not equal before call 4:\n", error)
    text = r"rank 2 has ([0-9a-f]{16}), ranks 0, 1 and 3 have ([0-9a-f]{16})\n"
    if strategy == "fsdp" and what != "buffer":  # rank 3 alone has the same shard
        text = r"rank 3 has ([0-9a-f]{16}), rank 2 has ([0-9a-f]{16}); as many ranks have the one as the other\n"
    match = re.search(rf"\n  \* {text}", error)
    assert match, error
    assert match[1] != match[2]


def _do_not_drift() -> list[str]:
    """On a rank: a run whose replicas are equal, on a mesh with shards and replicas."""
    with sl.Mesh(data=2, tensor=2, rules={"batch": "data"}):
        module, opt = _module("zero1", verify_every=1)
        step = sl.jit(_step, verify_every=1)
        for call in range(3):
            torch.manual_seed(call)
            _step(module, opt, torch.randn(8, 8))
            step(module, opt, torch.randn(8, 8))
    return [*step.retraces, *module.forward.retraces]


@pytest.mark.ranks
def test_equal_replicas_pass() -> None:
    assert only(run_ranks(_do_not_drift, 4)) == []


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "2"])
def test_other_numbers_are_refused_before_anything_is_placed(every: Any) -> None:
    module = nn.Linear(4, 4)
    with sl.Mesh(data=2):
        for make in (
            lambda: sl.parallelize(module, strategy="ddp", verify_every=every),
            lambda: sl.jit(_step, verify_every=every),
        ):
            with pytest.raises(sl.ShardingError, match=re.escape(f"verify_every={every!r} is no number of calls")):
                make()
    assert type(module.weight) is nn.Parameter


def test_options_stay_and_copies_count_for_themselves() -> None:
    with sl.Mesh(data=2):
        module, opt = _module("ddp", verify_every=3)
        module = sl.parallelize(module)
        _step(module, opt, torch.randn(8, 8))  # virtual devices: nothing to compare
        again = copy.deepcopy(module)
    assert module.forward.verify_every == again.forward.verify_every == 3
    step = copy.deepcopy(sl.jit(_step, verify_every=5))
    assert step.verify_every == 5
