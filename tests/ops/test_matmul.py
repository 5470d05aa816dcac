"""Products on pieces: oneDNN's and torch's say the same, whatever the operands look like in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib.ops import matmul

pytestmark = pytest.mark.skipif("not torch.backends.mkldnn.is_available()", reason="torch is built without oneDNN")
M, K, N = 140, 130, 144


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", "matmul=onednn")


class Called(TorchDispatchMode):
    """The ops that run, and the matrices that oneDNN is given."""

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        self.operands += args[:2] if str(op) == ONEDNN else ()
        return op(*args, **(kwargs or {}))

    @property
    def products(self) -> list[str]:
        return [name for name in self.names if "mm" in name or "linear" in name]


LINEAR = matmul.linear
ONEDNN = "mkldnn._linear_pointwise.default"
MEMORY: dict[str, Callable[[int, int], Tensor]] = {
    "in rows": torch.randn,
    "in columns": lambda m, n: torch.randn(n, m).t(),
    "part of rows": lambda m, n: torch.randn(m, n + 7)[:, 3 : n + 3],
    "every other": lambda m, n: torch.randn(2 * m, 2 * n)[::2, ::2],
    "one row": lambda m, n: torch.randn(1, n).expand(m, n),
    "one column": lambda m, n: torch.randn(m, 1).expand(m, n),
    "one number": lambda m, n: torch.randn(()).expand(m, n),
    "rows that overlap": lambda m, n: torch.randn(3 * m + n).as_strided((m, n), (3, 1)),
}


@pytest.mark.parametrize("second", MEMORY)
@pytest.mark.parametrize("first", MEMORY)
def test_products_are_those_of_float64(first: str, second: str) -> None:
    a, b = MEMORY[first](M, K), MEMORY[second](K, N)
    with Called() as called:
        found = matmul.mm(a, b)
    assert called.products == [ONEDNN]
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
    assert found.is_contiguous()
    for x in called.operands:
        assert x.is_contiguous() or x.t().is_contiguous(), "others take a thousand times as long"


@pytest.mark.parametrize("row", [torch.randn(N), torch.randn(2 * N)[::2], torch.randn(1).expand(N)])
def test_a_row_is_added(row: Tensor) -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    with Called() as called:
        found = matmul.addmm(row, a, b)
    assert called.products == [ONEDNN]
    torch.testing.assert_close(found, torch.addmm(row, a, b), rtol=1e-5, atol=1e-4)


def test_matrix_by_matrix() -> None:
    a, b = torch.randn(3, M, K), torch.randn(3, N, K).mT
    with Called() as called:
        found = matmul.bmm(a, b)
    assert called.products == [ONEDNN] * 3
    torch.testing.assert_close(found, torch.bmm(a, b), rtol=1e-5, atol=1e-4)


f64 = torch.float64
TORCHS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, Any]]] = {
    "wider": (matmul.mm, (torch.randn(M, K, dtype=f64), torch.randn(K, N, dtype=f64)), {}),
    "whole numbers": (matmul.mm, (torch.ones(M, K, dtype=torch.int64), torch.ones(K, N, dtype=torch.int64)), {}),
    "small": (matmul.mm, (torch.randn(8, 8), torch.randn(8, 8)), {}),
    "thin": (matmul.mm, (torch.randn(4096, 4096), torch.randn(4096, 1)), {}),
    "nothing to add": (matmul.mm, (torch.randn(M, 0), torch.randn(0, N)), {}),
    "a matrix added": (matmul.addmm, (torch.randn(M, N), torch.randn(M, K), torch.randn(K, N)), {}),
    "a number added": (matmul.addmm, (torch.randn(1), torch.randn(M, K), torch.randn(K, N)), {}),
    "factors": (matmul.addmm, (torch.randn(N), torch.randn(M, K), torch.randn(K, N)), {"alpha": 2.0}),
    "no matrices": (matmul.bmm, (torch.randn(0, M, K), torch.randn(0, K, N)), {}),
}


@pytest.mark.parametrize("case", TORCHS)
def test_torchs_own(case: str) -> None:
    function, args, kwargs = TORCHS[case]
    with Called() as called:
        found = function(*args, **kwargs)
    assert ONEDNN not in called.names
    assert torch.equal(found, getattr(torch, function.__name__)(*args, **kwargs))


def test_programs_and_eager_ops_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2 * M, K), torch.randn(K, N)
    with sl.Mesh(data=2):
        placed = sl.shard(a, "m@data k")
    for product in (sl.jit(lambda a, b: a @ b), lambda a, b: a @ b):
        for backend in ("onednn", "torch"):
            monkeypatch.setenv("SHARDLIB_OPS", f"matmul={backend}")
            made: list[Tensor] = []
            monkeypatch.setattr(matmul, "linear", lambda *args, made=made: made.append(LINEAR(*args)) or made[-1])
            found = product(placed, b)
            assert len(made) == (2 if backend == "onednn" else 0), "one a device"
            torch.testing.assert_close(found.full_tensor(), a @ b, rtol=1e-5, atol=1e-4)


def test_counters_count_it() -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    with FlopCounterMode(display=False) as counter:
        matmul.mm(a, b)
    assert counter.get_total_flops() == 2 * M * K * N


def test_whose_products_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(matmul.choose()) == "onednn: SHARDLIB_OPS asks for it"
    with monkeypatch.context() as off:
        off.setattr(matmul, "has_onednn", lambda: False)
        with pytest.raises(sl.ShardingError, match=r"matmul=onednn, which cannot run here:\n.*switched off"):
            matmul.mm(torch.ones(M, K), torch.ones(K, N))
        off.delenv("SHARDLIB_OPS")
        assert str(matmul.choose()) == "torch: oneDNN is not built in, or switched off"
    monkeypatch.delenv("SHARDLIB_OPS")
    monkeypatch.setattr(matmul, "_has_wide_vectors", lambda: True)
    assert matmul.choose().backend == "onednn"
    monkeypatch.setattr(matmul, "_has_wide_vectors", lambda: False)
    assert matmul.choose().backend == "torch"
    monkeypatch.setenv("SHARDLIB_OPS", "torch")
    assert str(matmul.choose()) == "torch: SHARDLIB_OPS asks for it"
