"""`print` shows values and never communicates; pictures are `visualize`'s and the notebook's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError, shard
from shardlib.jit.call.inputs import Gone
from tests.helpers.ranks import run_ranks

X = torch.linspace(-3, 3, 24).view(4, 6)


@pytest.mark.parametrize(
    ("x", "spec"),
    [
        (X, "b@data f@tensor"),
        (X[:3, :5], "b@data f@tensor"),  # uneven
        (torch.arange(3), "_@(data tensor)"),  # with an empty piece
        (torch.zeros(0, 4), "b@data f@tensor"),
        (torch.arange(4000.0).view(40, 100), "b@data f@tensor"),  # torch leaves most of it out
        (X.to(torch.bfloat16), "b (three f@tensor)"),
        (X > 0, "b@data f"),
        (torch.complex(X, X), "b@data f"),
        (torch.tensor([1.0, torch.nan, torch.inf]), "_"),
        (torch.tensor(2.5), ""),
    ],
    ids=lambda x: str(tuple(x.shape)) if isinstance(x, torch.Tensor) else "",
)
def test_values_are_those_of_torch(x: torch.Tensor, spec: str) -> None:
    with Mesh(data=2, tensor=2):
        y = shard(x, spec, **({"three": 3} if "three" in spec else {}))
    lines = str(y).split("\n", 2)
    assert lines[0] == f"ShardedTensor {sl.typeof(y)} on Mesh(data=2, tensor=2)"
    assert lines[1] == f"spec: {y.spec}"
    assert lines[2] == repr(x)


def test_options_of_torch_hold() -> None:
    with Mesh(data=2):
        x = shard(X, "b@data _")
    with torch._tensor_str.printoptions(precision=1, sci_mode=False):  # type: ignore[attr-defined]
        assert str(x).endswith(repr(X))
        assert "-3.0," in str(x)


def test_formats() -> None:
    with Mesh(data=2):
        x = shard(X, "b@data _")
        loss = shard(torch.tensor(2.5), "")
    assert f"{x}" == f"{x!s}" == "{}".format(x) == str(x)  # noqa: UP032 # what is tested
    assert (f"{loss}", f"{loss:.2f}", f"{loss:>6}") == ("2.5", "2.50", "   2.5")
    assert "%.1f" % loss == "2.5"  # noqa: UP031
    with pytest.raises(TypeError, match="unsupported format string passed to ShardedTensor"):
        f"{x:.2f}"


def test_repr_is_short_and_pictures_stay_in_visualize() -> None:
    with Mesh(data=2, tensor=2):
        x = shard(X, "b@data f@tensor")
    assert repr(x) == f"{x!r}" == "ShardedTensor(f32[4@data, 6@tensor] on Mesh(data=2, tensor=2))"
    assert "│" not in str(x)
    assert "│ 2 │ 3 │" in str(sl.visualize(x))
    assert "<svg" in x._repr_html_()


def test_a_tensor_with_history() -> None:
    with Mesh(data=2):
        x = shard(X, "b@data _").requires_grad_()
    for y in (x, x * 1):
        assert str(y).split("\n")[0] == "ShardedTensor f32[4@data, 6] on Mesh(data=2) (requires_grad)"
        assert str(y).endswith(repr(X))


def test_a_pending_sum_shows_its_sum() -> None:
    with Mesh(data=2) as mesh:
        x = ShardedTensor([X, X], sl.shard(X, "_ _").sharding.parse("4, 6 +data", mesh.axes), mesh)
    assert str(x).endswith(repr(2 * X))


def test_a_donated_tensor_says_so() -> None:
    with Mesh(data=2):
        x = shard(X, "b@data _")
    x._locals = Gone("update")  # as a call leaves it that took the memory over
    assert str(x).endswith("a tensor is read after it was donated to update")
    assert repr(x) == "ShardedTensor(f32[4@data, 6] on Mesh(data=2))"


def test_printing_a_captured_tensor_while_tracing(capsys: Any) -> None:
    with Mesh(data=2):
        x = shard(X, "b@data _")

        def step(y: torch.Tensor) -> torch.Tensor:
            print(x)
            return y + 1

        sl.jit(step).plan(X)
    assert repr(X) in capsys.readouterr().out


def _alone(rank: int) -> list[str]:
    with Mesh(data=2) as mesh:
        x = shard(X, "b@data _")
        loss = (x * x).sum()
        whole = float(loss)
        pending = ShardedTensor([X], x.sharding.parse("4, 6 +data", mesh.axes), mesh)
        part = ShardedTensor([X[0, 0]], x.sharding.parse("+data", mesh.axes), mesh)
        stale = shard(X, "b@data _") * 1
        row = stale[0]
        stale.add_(1)
        texts = []
        if mesh.rank == rank:  # one rank alone, and nobody waits
            texts = [str(x), repr(x), f"{loss:.4f}", str(pending), f"{part:.1f}", str(row), repr(row)]
        assert whole == float(loss)
        assert torch.equal(row.full_tensor(), X[0] + 1)
        return texts


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_prints_alone(rank: int) -> None:
    results = run_ranks(_alone, 2, rank)
    assert results[1 - rank] == []
    text, short, loss, pending, part, row, row_short = results[rank]
    piece = X[2 * rank : 2 * rank + 2]
    start = f"ShardedTensor f32[4@data, 6] on Mesh(data=2)\nspec: b@data _@()\nrank {rank} holds "
    assert text == f"{start}[{2 * rank}:{2 * rank + 2}, 0:6]:\n{piece!r}"
    assert short == "ShardedTensor(f32[4@data, 6] on Mesh(data=2))"
    assert loss == f"{(X * X).sum():.4f}"
    assert pending.split("\n", 2)[2] == f"rank {rank} holds part of a sum in [0:4, 0:6]:\n{X!r}"
    assert part == f"-3.0 (rank {rank}'s part of a sum)"
    assert row_short.startswith("ShardedTensor(f32[6] on")
    assert "ranks" in row or repr(X[0] + 1) in row


def test_errors_name_the_short_form() -> None:
    with Mesh(data=2):
        x = shard(X, "b@data _")
    with Mesh(data=3), pytest.raises(ShardingError) as error:
        sl.jit(torch.sin)(x)
    assert "tensor([" not in str(error.value)
