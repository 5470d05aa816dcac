"""attention_sm80_{forward,backward}.cu on emulated threads: every variant against float64, and planted bugs."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.ops.attention import math as attention_math
from shardlib.ops.attention.variant import Variant, heads_last
from tests.kernels import emulate
from tests.kernels.attention_args import (
    AttentionArgs,
    AttentionBackwardArgs,
    attention_args,
    broadcast_strides,
    pointer,
)
from tests.kernels.bugs import Bug
from tests.kernels.emulate import Build, EmulationError, Patch
from tests.ops.attention import attention_cases
from tests.ops.attention.attention_cases import CASES, Case

FORWARD, BACKWARD, HEADER = "attention_sm80_forward.cu", "attention_sm80_backward.cu", "attention_sm80.cuh"
TURNS = "attention_turns.cuh"
INCLUDE = '#include "attention_rows.cuh"'  # in HEADER


def _mask(c: Case) -> Tensor:
    return torch.rand(c.b, 1, c.s, c.t) < 0.3


# Several tiles of queries and of keys, the last ones not full; the cases of every backend are within one or two.
TILES: dict[str, Case] = {
    "sm80 tiles": Case(1, 2, 1, 140, 150, 64),
    "sm80 causal tiles": Case(2, 1, 1, 150, 140, 72, lambda _: {"causal": True, "q_offset": 20}),
    "sm80 window of tiles": Case(1, 2, 1, 200, 180, 128, lambda _: {"window": 50, "q_offset": 7}),
    "sm80 tiles of a wide head": Case(1, 2, 1, 70, 100, 256, lambda _: {"causal": True, "q_offset": 40}),
    "sm80 tiles that see nothing": Case(1, 2, 2, 140, 70, 64, lambda _: {"causal": True, "k_offset": 75}),
    "sm80 masked tiles": Case(1, 2, 1, 80, 140, 112, lambda c: {"mask": _mask(c), "causal": True, "q_offset": 60}),
    "sm80 a wide head with a bias": Case(
        1, 1, 1, 40, 70, 200, lambda c: {"bias": torch.randn(1, 1, c.s, c.t).double()}
    ),
    "sm80 dropout in tiles": Case(
        1, 2, 1, 90, 75, 64, lambda _: {"dropout": 0.25, "key": torch.tensor([11, 2**40 + 3]), "k_offset": 2}
    ),
}

# A bug is a statement or an expression that takes the place of another one.
BUGS: dict[str, list[Bug]] = {
    FORWARD: [
        Bug("cp_async_wait<0>();", "", "sm80 tiles"),
        Bug("__syncthreads();", "", "sm80 tiles"),
        Bug("load_keys(n + 1, ~n & 1);", "load_keys(n + 1, n & 1);", "sm80 tiles"),
        Bug("n % 2 * 2 + 1", "n % 2 * 2", "full"),
        Bug(
            "scale_rows(flat(o[m]), softmax(flat(s[m]), rows[m], unit));",
            "softmax(flat(s[m]), rows[m], unit);",
            "sm80 tiles",
        ),
        Bug("finish_rows(rows[m]);", "", "full"),
        Bug("p.extras.keep_scale / rows[m].sum[r]", "1.0f / rows[m].sum[r]", "dropout"),
        Bug("hide(s[m], visible);", "", "causal"),
        Bug("h / (a.heads / a.kv_heads)", "h % a.kv_heads", "grouped"),
        Bug(
            "ldmatrix_x4_transposed(b, down_first(b_tile, 16 * k, column + 8 * n));",
            "ldmatrix_x4(b, down_first(b_tile, 16 * k, column + 8 * n));",
            "full",
            HEADER,
        ),
        Bug(
            "ldmatrix_x4(b, along_first(b_tile, 8 * n, k));",
            "ldmatrix_x4(b, down_first(b_tile, 8 * n, k));",
            "full",
            HEADER,
        ),
        Bug("mma_16816<T>(right, a, second);", "mma_16816<T>(right, a, first);", "full", HEADER),
        Bug("row < rows && column < columns", "row < rows + 1 && column < columns", "sm80 tiles", HEADER),
        Bug("j < sight.end(i)", "j <= sight.end(i)", "causal", HEADER),
        Bug("j >= sight.end(i + rows - 1)", "j >= sight.end(i)", "sm80 causal tiles", HEADER),
        Bug("r + 8 < rows", "r + 8 < rows + 1", "sm80 tiles", HEADER),
        Bug("(skip ? 2u : 1u)", "1u", "sm80 dropout in tiles", HEADER),
    ],
    BACKWARD: [
        Bug("cp_async_wait<0>();", "", "sm80 tiles"),
        Bug("__syncthreads();  // this step's tiles are here for all", "//", "sm80 tiles"),
        Bug("__syncthreads();  // all of dS is there", "", "full"),
        Bug("if (C::kStages == 1 && step + 1 < steps) load_queries(step + 1);", "", "sm80 tiles of a wide head"),
        Bug("store_row(step + 1, next_row);", "store_row(step, next_row);", "sm80 tiles"),
        Bug(
            "ldmatrix_x4_transposed(ds_rows[0][k], along_first(ds_tile, 16 * k, dq_row));",
            "ldmatrix_x4(ds_rows[0][k], along_first(ds_tile, 16 * k, dq_row));",
            "full",
        ),
        Bug("i % 2 * 8", "i / 2 * 8", "full", HEADER),
        Bug("gradient - row[8 * n + e % 2 + C::kQueries]", "gradient", "full"),
        Bug(
            "lse == SHARDLIB_MINUS_INFINITY ? -SHARDLIB_MINUS_INFINITY : lse * kLog2E",
            "lse * kLog2E",
            "nothing to see",
        ),
        Bug("keeps ? dp[0][n][e] * p.extras.keep_scale : 0.0f", "dp[0][n][e]", "dropout"),
        Bug("keeps ? probability : 0.0f", "probability", "dropout"),
        Bug("column + row / 4 * 8", "column", "dropout", HEADER),
        Bug("int64_t(i) * dim + c", "int64_t(i) * dim + (c ^ 1)", "head 40"),
        Bug("(b * a.heads + h) * queries + i", "(b * a.heads + kv_head) * queries + i", "grouped"),
        Bug("p.args.dbias && part == 0", "p.args.dbias != nullptr", "sm80 a wide head with a bias"),
        Bug("accumulate<T>(dk, ds, q_tile, part * kColumns);", "accumulate<T>(dk, ds, q_tile, 0);", "head 256"),
        Bug("p.sight.last_query(j0 + keys - 1)", "p.sight.last_query(j0)", "sm80 window of tiles"),
        Bug("wait_for_turn(p.turns, tile, j0 / C::kKeys - p.sight.begin(i0) / C::kKeys);", "", "repeatable"),
        Bug("end_turn(p.turns, tile);", "", "repeatable"),
        Bug("words ? *place : blockIdx.x", "blockIdx.x", "repeatable", TURNS),
    ],
}


def forward(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, library: ctypes.CDLL | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel's o and lse; fails when it writes anything else."""
    memory = emulate.Memory()
    args, o, lse = _arguments(memory, q, k, v, variant)
    emulate.call(library or emulate.library(FORWARD), "shardlib_attention_sm80_forward", args, None)
    memory.check()
    return o, lse


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    variant: Variant,
    need_bias: bool,
    *,
    repeatable: bool = False,
    library: ctypes.CDLL | None = None,
    sums: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The kernels' dq, dk, dv and dbias, and the sums of dq behind `sums`; fails when they write anything else."""
    library = library or emulate.library(BACKWARD)
    memory = emulate.Memory()
    args = AttentionBackwardArgs(repeatable=repeatable)
    args.forward, _, _ = _arguments(memory, q, k, v, variant, lse)
    delta = attention_math.compute_delta(grad_o, grad_lse, o, torch.float32)
    dq, dk, dv = (_output(memory, x, name) for x, name in ((q, "dq"), (k, "dk"), (v, "dv")))
    tensors = {"grad_o": memory.tensor(heads_last(grad_o), "grad_o"), "dq": dq, "dk": dk, "dv": dv}
    for name, x in tensors.items():
        setattr(args, name, pointer(x))
        setattr(args, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    dbias = None
    if need_bias and variant.bias is not None:
        dbias = memory.tensor(torch.zeros_like(variant.bias, dtype=torch.float32), "dbias")
        strides = broadcast_strides(dbias, (*q.shape[:3], k.shape[2]))
        args.dbias, args.dbias_strides = pointer(dbias), (ctypes.c_int64 * 4)(*strides)
    size = library.shardlib_attention_sm80_backward_workspace
    size.restype = ctypes.c_int64
    workspace = memory.tensor(torch.zeros(size(ctypes.byref(args)), dtype=torch.uint8), "the workspace")
    args.delta, args.workspace = pointer(memory.tensor(delta, "delta")), pointer(workspace)
    emulate.call(library, "shardlib_attention_sm80_backward", args, None)
    memory.check()
    if sums is not None:
        sums.append(workspace)
    return dq, dk, dv, dbias if dbias is None else dbias.to(q.dtype)


def _arguments(
    memory: emulate.Memory, q: Tensor, k: Tensor, v: Tensor, variant: Variant, lse: Tensor | None = None
) -> tuple[AttentionArgs, Tensor, Tensor]:
    """The forward's arguments, its o and its lse. k and v are dense, q and o in memory [B, S, H, D]."""
    how: dict[str, Any] = variant._asdict() | {"part": variant.part or ()}
    how |= {name: memory.tensor(x, name) for name, x in how.items() if isinstance(x, Tensor)}
    q, k, v = (memory.tensor(x, name) for x, name in ((heads_last(q), "q"), (k, "k"), (v, "v")))
    o = _output(memory, q, "o")
    lse = memory.empty(*q.shape[:3], dtype=torch.float32, name="lse") if lse is None else memory.tensor(lse, "lse")
    return attention_args(q, k, v, o, lse, **how), o, lse


def _output(memory: emulate.Memory, x: Tensor, name: str) -> Tensor:
    b, h, s, d = x.shape
    return memory.empty(b, s, h, d, dtype=x.dtype, name=name).transpose(1, 2)


def check(
    case: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    forward: attention_cases.Forward = forward,
    backward: attention_cases.Backward = backward,
) -> None:
    """All results of one case; every other case has a gradient of lse too."""
    measured = attention_cases.errors(case, forward, backward, dtype, lse_gradient=len(case) % 2 == 0)
    for name, error, allowed in measured:
        assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> Iterator[None]:
    """All libraries of this file, compiled side by side; and its own cases among the others."""
    emulate.prepare([Build(FORWARD), Build(BACKWARD), *(_with_bugs(source) for source in (FORWARD, BACKWARD))])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention_cases, "CASES", CASES | TILES)
        yield


@pytest.mark.sampled(11)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_variant_against_float64(case: str, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", TILES)
def test_many_tiles_against_float64(case: str) -> None:
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_bias_of_any_type(dtype: torch.dtype, kind: torch.dtype) -> None:
    """Numbers that all three types hold give the same bits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16).to(dtype) for _ in range(3))
    bias = torch.randint(-8, 8, (1, 2, 20, 20)) / 4
    found, want = (forward(q, k, v, Variant(bias=bias.to(x), scale=0.25)) for x in (kind, dtype))
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("sizes", [(0, 2, 5, 6), (2, 0, 5, 6), (1, 2, 0, 6), (1, 2, 5, 0), (1, 2, 0, 0)], ids=str)
def test_empty(sizes: tuple[int, int, int, int]) -> None:
    """What has no queries or keys gives zeros, and -inf for lse."""
    b, h, s, t = sizes
    q, k = torch.ones(b, h, s, 16, dtype=torch.bfloat16), torch.ones(b, max(h, 1), t, 16, dtype=torch.bfloat16)
    o, lse = forward(q, k, k, Variant(causal=True))
    assert torch.equal(o, torch.zeros_like(q))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    dq, dk, dv, _ = backward(q, None, q, k, k, o, lse, Variant(causal=True), False)
    assert all(torch.equal(x, torch.zeros_like(y)) for x, y in ((dq, q), (dk, k), (dv, k)))


def test_not_a_number_is_not_hidden() -> None:
    q = torch.full((1, 1, 3, 16), math.nan, dtype=torch.bfloat16)
    o, _ = forward(q, torch.ones_like(q), torch.ones_like(q), Variant())
    assert o.isnan().all()


@pytest.mark.long
def test_the_order_of_events_does_not_show() -> None:
    """The same bits whatever runs first: in o, lse, dk and dv always, in dq when it shall be repeatable."""
    check_repeatable(emulate.library(FORWARD), emulate.library(BACKWARD))


def check_repeatable(first: ctypes.CDLL, second: ctypes.CDLL) -> None:
    q, k, v, grad_o, _ = (x.bfloat16() for x in Case(1, 2, 1, 64, 300, 64).operands())
    variant = Variant(causal=True, scale=0.1, q_offset=250)
    results: list[Tensor] = []
    for seed in range(3):
        for library in (first, second):
            emulate.configure(library, seed=seed, resident=1 + 4 * seed)
        o, lse = forward(q, k, v, variant, first)
        sums: list[Tensor] = []  # dq itself is rounded, which would hide most of what another order makes of it
        _, dk, dv, _ = backward(
            grad_o, None, q, k, v, o, lse, variant, False, repeatable=True, library=second, sums=sums
        )
        results.append(torch.cat([x.contiguous().flatten().view(torch.uint8) for x in (o, lse, dk, dv, *sums)]))
    for library in (first, second):
        emulate.configure(library)
    assert all(torch.equal(x, results[0]) for x in results[1:])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, None),
        ({"grad_o": 8}, "attention: grad_o must begin at, and step by, multiples of 16 bytes"),
        (
            {"dv_strides": (48, 24, 12)},
            "attention: dv must begin at, and step by, multiples of 16 bytes",
        ),
        ({"forward.k": 8}, "attention: k must begin at, and step by, multiples of 16 bytes"),
        ({"forward.head_dim": 264}, "attention: head dim 264; the kernels take multiples of 8 up to 256"),
        ({"forward.head_dim": 20}, "attention: head dim 20; the kernels take multiples of 8 up to 256"),
        ({"forward.dtype": 2}, "attention: q, k and v must be bf16 or fp16"),
        ({"forward.heads": 3}, "attention: 3 query heads do not divide into 2 key heads"),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], text: str | None) -> None:
    """What the kernels cannot take is named, and nothing runs; no row is wrong that is not said to be."""
    args = AttentionBackwardArgs()
    q = torch.zeros(2, 2, 0, 16, dtype=torch.bfloat16)
    args.forward = attention_args(q, q, q, q, torch.zeros(2, 2, 0))
    for name, value in fields.items():
        holder = args.forward if name.startswith("forward.") else args
        value = (ctypes.c_int64 * len(value))(*value) if isinstance(value, tuple) else value
        setattr(holder, name.removeprefix("forward."), value)
    if "dv_strides" in fields:
        args.forward.keys, args.dk_strides = 2, (ctypes.c_int64 * 3)(64, 32, 16)
        args.forward.k_strides = args.forward.v_strides = args.dk_strides
    calls = [(BACKWARD, "shardlib_attention_sm80_backward", args)]
    if all(name.startswith("forward.") for name in fields):
        calls.append((FORWARD, "shardlib_attention_sm80_forward", args.forward))
    for source, entry, arguments in calls:
        if text is None:
            emulate.call(emulate.library(source), entry, arguments, None)
        else:
            with pytest.raises(EmulationError, match=f"^{re.escape(text)}$"):
                emulate.call(emulate.library(source), entry, arguments, None)


# --- planted bugs -----------------------------------------------------------------------------------------------------


def _with_bugs(source: str) -> Build:
    """A source with all its bugs, each behind a switch: `shardlib_planted` is the number of the one that is on."""
    patches = [Patch(HEADER, INCLUDE, f'{INCLUDE}\nextern "C" {{ int shardlib_planted = 0; }}')]
    for number, bug in enumerate(BUGS[source], 1):
        on = f"shardlib_planted == {number}"
        statement, expression = (
            f"if ({on}) {{\n{bug.new}\n}} else {{\n{bug.old}\n}}//",
            f"({on} ? {bug.new} : {bug.old})",
        )
        patches.append(Patch(bug.file or source, bug.old, statement if ";" in bug.old else expression))
    return Build(source, tuple(patches))


def _check(name: str, source: str, number: int) -> None:
    """A check with the bug `number` of a source switched on; 0: none."""
    library = emulate.library(source, patches=_with_bugs(source).patches)
    planted = ctypes.c_int.in_dll(library, "shardlib_planted")
    planted.value = number
    try:
        if name == "repeatable":
            check_repeatable(emulate.library(FORWARD), library)
        elif source == FORWARD:
            check(name, forward=functools.partial(forward, library=library), backward=attention_math.backward)
        else:
            check(name, forward=attention_math.forward, backward=functools.partial(backward, library=library))
    finally:
        planted.value = 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("source", "number"), [(s, n) for s in BUGS for n in range(1, len(BUGS[s]) + 1)])
def test_planted_bugs_are_caught(source: str, number: int) -> None:
    with pytest.raises(AssertionError):
        _check(BUGS[source][number - 1].check, source, number)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("source", "name"), sorted({(s, bug.check) for s in BUGS for bug in BUGS[s]}))
def test_without_a_planted_bug_nothing_is_found(source: str, name: str) -> None:
    _check(name, source, 0)
