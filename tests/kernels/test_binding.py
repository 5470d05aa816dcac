"""The library of CUDA kernels loads, once, with or without CUDA in torch, and refuses tensors that are elsewhere."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch

from shardlib import build
from shardlib.build import Built
from shardlib.ops import _native
from shardlib.recipe import Missing, Recipe, recipe

WANTED = recipe("cuda")
NO_COMPILER = isinstance(WANTED, Missing) or (isinstance(WANTED, Recipe) and isinstance(WANTED.tool, Missing))
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="no CUDA compiler")


def _ops() -> ModuleType:
    ops = _native.cuda(without_device=True)
    assert isinstance(ops, ModuleType), str(ops)
    return ops


@needs_compiler
def test_it_loads_once_whoever_asks() -> None:
    found: list[ModuleType] = []
    threads = [threading.Thread(target=lambda: found.append(_ops())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [torch.ops.shardlib_cuda] * 3
    major, minor = found[0].version().split(".")
    assert int(major) >= 12
    assert 0 <= int(minor) < 10


@needs_compiler
def test_a_second_library_of_the_name_is_not_loaded() -> None:
    _ops()
    again = _native._cuda.__wrapped__()
    assert str(again) == "another copy of shardlib has loaded its CUDA kernels into this process"


@needs_compiler
def test_a_tensor_on_the_cpu_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(NotImplementedError, match=r"shardlib_cuda::poison_.*'CPU' backend"):
        _ops().poison_(x, 255)
    assert x.tolist() == [0] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> Built | Missing:
        raise AssertionError(name)

    monkeypatch.setattr(build, "library", library)
    assert _native.cuda() == Missing("there is no CUDA device")


@pytest.mark.gpu
@pytest.mark.parametrize("begin", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 33, 1_000_003])
def test_poison_fills_what_it_is_given_and_no_more(begin: int, size: int) -> None:
    whole = torch.zeros(begin + size + 40, dtype=torch.uint8, device="cuda")
    _ops().poison_(whole[begin : begin + size], 255)
    expected = torch.zeros_like(whole)
    expected[begin : begin + size] = 255
    assert torch.equal(whole, expected)


@pytest.mark.gpu
def test_poisoned_floats_are_nan_and_bad_arguments_are_refused() -> None:
    x = torch.zeros(8, 8, device="cuda", dtype=torch.bfloat16)
    _ops().poison_(x, 255)
    assert x.isnan().all()
    with pytest.raises(RuntimeError, match="x must be contiguous"):
        _ops().poison_(x[:, ::2], 255)
    with pytest.raises(RuntimeError, match=r"byte must be in 0\.\.255, not 256"):
        _ops().poison_(x, 256)
