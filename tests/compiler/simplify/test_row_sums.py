"""What the gradients of rows of log-probabilities add up to is known, or asked for; values are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

N, V = 6, 20


def _chosen(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, i).sin().sum()


def _smoothed(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, label_smoothing=0.2)


def _ignored(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return 2 * F.cross_entropy(x, y, ignore_index=3, reduction="sum") - x.log_softmax(-1).gather(-1, i).mean()


def _planes(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    """Classes in the middle: rows lie along dim 1."""
    scores = x.reshape(N, 2, 2, V // 4).permute(0, 3, 1, 2)
    return F.cross_entropy(scores, i[:, :4].reshape(N, 2, 2) % (V // 4))


def _probabilities(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    target = (3 * x).detach().softmax(-1)
    return -(target * x.log_softmax(-1)).sum(-1).sin().sum()


def _distilled(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    """By log-probabilities, of which the exponentials are probabilities."""
    return F.kl_div((x / 2).log_softmax(-1), (3 * x).detach().log_softmax(-1), log_target=True, reduction="sum")


def _towards(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    """To probabilities: what they are times is one number, of which the sign changes when it is there for each."""
    return F.kl_div(x.log_softmax(-1), (3 * x).detach().softmax(-1), reduction="batchmean")


def _few(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    """Some rows get nothing, and what an index says twice is added twice."""
    return x.log_softmax(-1).gather(-1, i[: N // 2] // 2).square().sum()


def _unknown(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return x.log_softmax(-1).sin().sum()


def _twice(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y) + x.logsumexp(-1).square().mean()


CASES = {_twice: 4, _chosen: 3, _smoothed: 2, _ignored: 4, _planes: 0, _probabilities: 5, _few: 3, _unknown: 3}
CASES |= {_distilled: 4, _towards: 4}


def _args() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, V, dtype=torch.float64), torch.randint(V, (N, 5)), torch.randint(V, (N,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        ({"v": 4}, ("n v@v", "...", "...")),
        ({"v": 3}, ("n v@v", "...", "...")),
        ({"n": 2, "v": 2}, ("n@n v@v", "n@n k", "n@n")),
        ({"n": 4}, ("n@n v", "n@n k", "n@n")),
    ],
)
def test_values(program: Callable[..., Tensor], mesh: dict[str, int], specs: tuple[str, ...]) -> None:
    with sl.Mesh(mesh):
        sl.check(sl.grad(program), *_args(), in_specs=specs)


@pytest.mark.parametrize("program", [p for p in CASES if p is not _planes], ids=lambda f: f.__name__)
def test_messages_of_a_cut_vocabulary(program: Callable[..., Any]) -> None:
    """The largest and the sum of each softmax; what was chosen, where its sine is taken; what gradients add up to only
    where nobody knows it."""
    args = (torch.empty(n, device="meta", dtype=d) for n, d in (((1024, 8192), None), ((1024, 5), torch.int64)))
    targets = torch.empty(1024, device="meta", dtype=torch.int64)
    with sl.Mesh.abstract(v=4):
        plan = sl.jit(sl.grad(program), in_specs=("n v@v", "...", "...")).plan(*args, targets)
    assert len(plan.collectives) == CASES[program]
    assert "no rule" not in plan.full


def test_rows_without_a_largest_number() -> None:
    x = torch.zeros(4, 8, dtype=torch.float64)
    x[0] = -torch.inf
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    with sl.Mesh(v=4):
        sl.check(lambda x: (x.logsumexp(-1), x.log_softmax(-1)), x, in_specs=("n v@v",))


def test_on_one_device_bits_are_torchs() -> None:
    for program in CASES:
        with sl.Mesh(v=1):
            found = sl.jit(sl.grad(program))(*_args()).full_tensor()
        x, *rest = _args()
        program(x.requires_grad_(), *rest).backward()
        assert torch.equal(found, x.grad)
