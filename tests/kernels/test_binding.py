"""binding.cpp: loads once, with or without CUDA in torch; refuses what would leave memory; hands launchers what it got.

The last is tested with launchers that only keep their arguments (recorded_launchers.cpp), on CPU tensors.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.build import build_recipe
from shardlib.build import library as build_library
from shardlib.build.build_recipe import Missing, Recipe
from shardlib.build.library import Built
from shardlib.ops import native_libs
from shardlib.ops.collectives.transport import cuda_args as plans
from tests.kernels.attention_args import AttentionArgs, AttentionBackwardArgs, attention_args, broadcast_strides

HERE = Path(__file__).parent
WANTED = build_recipe.make_recipe("cuda")
NO_COMPILER = isinstance(WANTED, Missing) or isinstance(WANTED.tool, Missing)
HOST = build_recipe.make_recipe("host")
NO_HOST_COMPILER = isinstance(HOST, Missing) or isinstance(HOST.tool, Missing)

needs_nvcc = pytest.mark.skipif(NO_COMPILER, reason="no CUDA compiler")
needs_compiler = pytest.mark.skipif(NO_HOST_COMPILER, reason="no C++ compiler")


def _ops() -> ModuleType:
    ops = native_libs.cuda(without_device=True)
    assert isinstance(ops, ModuleType), str(ops)
    return ops


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@needs_nvcc
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


@pytest.mark.long
@needs_nvcc
def test_a_second_library_of_the_name_is_not_loaded() -> None:
    _ops()
    again = native_libs._cuda.__wrapped__()
    assert str(again) == "another copy of shardlib has loaded its CUDA kernels into this process"


@needs_nvcc
def test_a_tensor_on_the_cpu_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(NotImplementedError, match=r"shardlib_cuda::all_gather.*'CPU' backend"):
        _ops().all_gather(x, x, torch.zeros(1, dtype=torch.int64))
    assert x.tolist() == [0] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> Built | Missing:
        raise AssertionError(name)

    monkeypatch.setattr(build_library, "get_library", library)
    assert native_libs.cuda() == Missing("there is no CUDA device")


# --- what launchers get -----------------------------------------------------------------------------------------------


@functools.cache
def _recorded() -> tuple[Any, ctypes.CDLL]:
    """The ops over launchers that keep their arguments, and those launchers."""
    home = Path(torch.__file__).parent
    flags = ("-std=c++17", "-O1", "-fPIC", "-DSHARDLIB_EMULATED", build_recipe.STABLE_ABI, f"-I{home / 'include'}")
    assert isinstance(HOST, Recipe)
    compiler = list(HOST.link[: HOST.link.index("-std=c++17")])
    sources = [(build_recipe.SOURCES / "binding.cpp", flags), (HERE / "recorded_launchers.cpp", flags)]
    link = ("-shared", f"-L{home / 'lib'}", "-Wl,--no-as-needed")
    wanted = build_recipe.assemble("recorded", HERE, sources, compiler, link, ("-ltorch",))
    assert isinstance(wanted, Recipe)
    built = build_library.build_or_load(wanted)
    assert isinstance(built, Built), str(built)
    torch.ops.load_library(str(built.path))
    launchers = ctypes.CDLL(str(built.path))
    launchers.recorded_call.restype = ctypes.c_char_p
    launchers.recorded_args.restype = ctypes.c_void_p
    return torch.ops.shardlib_emulated, launchers


B, H, KV, S, T, D = 2, 4, 2, 3, 5, 8
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("mask", "bias", "alibi", "key")),
    "causal": False,
    "scale": 0.5,
    "window": 0,
    "dropout": 0.0,
    "q_offset": 0,
    "k_offset": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 7, "k_offset": 2, "window": 3, "scale": 1.0},
    "mask": {"mask": torch.ones(B, 1, 1, T, dtype=torch.bool)},
    "bias": {"bias": torch.zeros(1, H, S, T)},
    "bias of q's type": {"bias": torch.zeros(B, H, T, S, dtype=torch.bfloat16).transpose(2, 3)},
    "alibi": {"alibi": torch.ones(H)},
    "dropout": {"key": torch.tensor([3, 4]), "dropout": 0.25, "part": [1, 2, 30, 40, 50]},
}


def _tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """q as models have it, [B, S, H, D] in memory; k and v in one tensor."""
    kv = torch.randn(B, KV, T, 2, D).to(dtype)
    q = torch.randn(B, S, H, D).to(dtype).transpose(1, 2)
    return {"q": q, "k": kv[:, :, :, 0], "v": kv[:, :, :, 1], "o": torch.empty_like(q), "lse": torch.empty(B, H, S)}


def _kept(launchers: ctypes.CDLL, kind: type[ctypes.Structure]) -> dict[str, Any]:
    return _plain(kind.from_address(launchers.recorded_args()))


def _plain(args: ctypes.Structure) -> dict[str, Any]:
    plain = {}
    for name, *_ in args._fields_:
        value = getattr(args, name)
        plain[name] = _plain(value) if isinstance(value, ctypes.Structure) else value
        if isinstance(value, ctypes.Array):
            plain[name] = list(value)
    return plain


@pytest.mark.long
@pytest.mark.sampled(3)
@needs_compiler
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["attention_forward", "attention_sm80_forward"])
def test_forward_launchers_get_the_arguments(name: str, case: str) -> None:
    ops, launchers = _recorded()
    tensors, how = _tensors(), {**PLAIN, "part": [0, 0, H, S, T], **CASES[case]}
    getattr(ops, name)(*tensors.values(), *how.values())
    assert launchers.recorded_call().decode() == f"shardlib_{name}"
    assert _kept(launchers, AttentionArgs) == _plain(attention_args(*tensors.values(), **how))


@needs_compiler
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["attention_backward", "attention_sm80_backward"])
@pytest.mark.parametrize("extra", [False, True])
def test_backward_launchers_get_the_arguments(name: str, case: str, extra: bool) -> None:
    ops, launchers = _recorded()
    tensors, how = _tensors(torch.float16), {**PLAIN, "part": [0, 0, H, S, T], **CASES[case]}
    q, v = tensors["q"], tensors["v"]
    dk = torch.empty(B, KV, T, D + 8, dtype=q.dtype)[..., :D]
    results = {"dq": torch.empty_like(q), "dk": dk, "dv": torch.empty_like(v)}
    grad_o, grad_lse = torch.ones_like(q), torch.ones(B, S, H).transpose(1, 2) if extra else None
    dbias = torch.zeros(B, 1, S, T) if extra else None
    getattr(ops, name)(grad_o, grad_lse, *tensors.values(), *results.values(), dbias, extra, *how.values())
    assert launchers.recorded_call().decode() == f"shardlib_{name}"
    kept = _kept(launchers, AttentionBackwardArgs)
    assert kept.pop("forward") == _plain(attention_args(*tensors.values(), **how))
    assert kept.pop("delta")
    assert bool(kept.pop("workspace")) == (name == "attention_backward")
    assert kept == {
        **{key: x.data_ptr() for key, x in ({"grad_o": grad_o} | results).items()},
        **{f"{key}_strides": list(x.stride()[:3]) for key, x in ({"grad_o": grad_o} | results).items()},
        "grad_lse": None if grad_lse is None else grad_lse.data_ptr(),
        "grad_lse_strides": [0, 0, 0] if grad_lse is None else list(grad_lse.stride()),
        "dbias": None if dbias is None else dbias.data_ptr(),
        "dbias_strides": list(broadcast_strides(dbias, (B, H, S, T))),
        "repeatable": int(extra),
    }


@needs_compiler
def test_without_a_part_the_tensors_are_the_end_of_the_whole() -> None:
    ops, launchers = _recorded()
    ops.attention_forward(*_tensors().values(), *{**PLAIN, "q_offset": 7, "k_offset": 2}.values(), None)
    kept = _kept(launchers, AttentionArgs)
    assert (kept["first_batch"], kept["first_head"]) == (0, 0)
    assert (kept["global_heads"], kept["global_queries"], kept["global_keys"]) == (H, 7 + S, 2 + T)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "k's batch": (lambda a: a.update(k=torch.zeros(1, KV, T, D).bfloat16()), "q and k differ in batch or head dim"),
    "k's width": (lambda a: a.update(k=torch.zeros(B, KV, T, 16).bfloat16()), "q and k differ in batch or head dim"),
    "q's dims": (lambda a: a.update(q=a["q"][0]), "q and k must have 4 dims"),
    "v's length": (lambda a: a.update(v=a["v"][:, :, :4]), r"v must be BFloat16 \[2, 2, 5, 8\]"),
    "v's dtype": (lambda a: a.update(v=a["v"].half()), r"v must be BFloat16 \[2, 2, 5, 8\]"),
    "o's sizes": (lambda a: a.update(o=a["o"][:, :3]), r"o must be BFloat16 \[2, 4, 3, 8\]"),
    "lse's dtype": (lambda a: a.update(lse=a["lse"].double()), r"lse must be Float \[2, 4, 3\]"),
    "q's rows": (lambda a: a.update(q=torch.zeros(B, H, D, S).bfloat16().mT), "the last dim of q must be dense"),
    "fp64": (lambda a: a.update(_tensors(torch.float64)), "attention takes bf16 and fp16"),
    "mask's sizes": (lambda a: a.update(mask=torch.ones(B, 2, S, T).bool()), r"mask must be Bool \[2, 4, 3, 5\]"),
    "mask's dims": (lambda a: a.update(mask=torch.ones(S, T).bool()), r"mask must be Bool \["),
    "mask's dtype": (lambda a: a.update(mask=torch.ones(B, H, S, T)), r"mask must be Bool \[2, 4, 3, 5\]"),
    "bias's dtype": (
        lambda a: a.update(bias=torch.ones(B, H, S, T).double()),
        "attention takes bf16 and fp16, and a bias of fp32 too",
    ),
    "alibi's size": (lambda a: a.update(alibi=torch.ones(H + 1)), r"alibi must be Float \[4\]"),
    "alibi's step": (lambda a: a.update(alibi=torch.ones(2 * H)[::2]), "alibi must be contiguous"),
    "key's size": (lambda a: a.update(key=torch.tensor([1])), r"key must be Long \[2\]"),
    "part's size": (lambda a: a.update(part=[1, 2]), "part has 2 numbers, not 5"),
}


@needs_compiler
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_leave_a_tensor_is_refused(case: str) -> None:
    ops, launchers = _recorded()
    arguments = {**_tensors(), **PLAIN, "part": None}
    ops.attention_forward(*arguments.values())  # the valid twin
    launchers.forget()
    change, said = REFUSED[case]
    change(arguments)
    with pytest.raises(RuntimeError, match=f"shardlib_cuda: {said}"):
        ops.attention_forward(*arguments.values())
    assert launchers.recorded_call() == b""  # nothing was launched


@needs_compiler
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_collectives_get_the_plan(name: str) -> None:
    ops, launchers = _recorded()
    group = plans.Group(ranks=3, rank=1, present=2)
    zeros: dict[str, plans.Plan] = {
        "all_gather": plans.all_gather(group, "staged", [4, 5, 6]),
        "all_to_all": plans.all_to_all(group, "direct", [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        "reduce_scatter": plans.reduce_scatter(group, "packets", [1, 2, 3], torch.bfloat16),
    }
    plan, x = zeros[name], torch.zeros(2)
    plan.input[1], plan.output[2] = 11, 22
    getattr(ops, name)(x, x, plan.words)
    assert launchers.recorded_call().decode() == f"shardlib_{name}"
    assert ctypes.string_at(launchers.recorded_args(), ctypes.sizeof(plan)) == bytes(plan)
    for wrong in (plan.words[:-1], plan.words.double(), torch.zeros(2 * plan.words.numel()).long()[::2]):
        with pytest.raises(RuntimeError, match=rf"the plan must be {plan.words.numel()} dense int64 words on the CPU"):
            getattr(ops, name)(x, x, wrong)


@needs_compiler
def test_what_a_launcher_says_is_raised() -> None:
    ops, launchers = _recorded()
    launchers.refuse(1)
    with pytest.raises(RuntimeError, match="shardlib_cuda: refused, said the launcher"):
        ops.attention_forward(*_tensors().values(), *PLAIN.values(), None)
    ops.attention_forward(*_tensors().values(), *PLAIN.values(), None)
