"""attention_backward.cu and attention_delta.cu on emulated threads: gradients against float64, and planted bugs."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.ops.attention.op import Variant, reference
from tests.kernels import bugs, emulate
from tests.kernels.attention_args import AttentionBackwardArgs, attention_args, broadcast_strides, pointer
from tests.kernels.bugs import Bug
from tests.kernels.emulate import BuildError, EmulationError, Patch
from tests.ops.attention.attention_cases import CASES, Case, cast

SOURCE, DELTA = "attention_backward.cu", "attention_delta.cu"
BF16, FP16 = torch.bfloat16, torch.float16
Results = dict[str, Tensor]  # dq, dk, dv, dbias


def _key() -> Tensor:
    return torch.tensor([11, 2**40 + 3])


def _slopes(c: Case) -> Tensor:
    return torch.linspace(0.5, 0.05, c.h)


def _dropout(p: float) -> dict[str, Any]:
    return {"dropout": p, "key": _key()}


# Several tiles of queries and of keys, none of them full; most of CASES are within one.
LARGE: dict[str, Case] = {
    "tiles": Case(1, 2, 1, 150, 200, 64),
    "causal tiles": Case(1, 2, 1, 150, 180, 72, lambda _: {"causal": True, "q_offset": 30}),
    "causal tiles, many queries": Case(1, 1, 1, 300, 150, 64, lambda _: {"causal": True}),
    "window of tiles": Case(1, 2, 2, 200, 220, 128, lambda _: {"window": 40, "q_offset": 7}),
    "causal window of tiles": Case(1, 1, 1, 270, 270, 96, lambda _: {"window": 60, "causal": True}),
    "tiles of a wide head": Case(1, 2, 1, 100, 140, 256, lambda _: {"causal": True, "q_offset": 40}),
    "tiles that see nothing": Case(1, 2, 1, 140, 140, 128, lambda _: {"causal": True, "k_offset": 90}),
    "masked tiles": Case(2, 2, 1, 70, 140, 112, lambda c: {"mask": torch.rand(c.b, 1, c.s, c.t) < 0.3}),
    "bias of tiles": Case(2, 2, 1, 70, 140, 64, lambda c: {"bias": torch.randn(1, c.h, c.s, c.t).double()}),
    "bias of many keys": Case(2, 2, 2, 70, 140, 128, lambda c: {"bias": torch.randn(c.b, 1, 1, c.t).double()}),
    "bias, wide head": Case(1, 2, 2, 70, 80, 200, lambda c: {"bias": torch.randn(c.s, c.t).double(), **_dropout(0.2)}),
    "alibi in tiles": Case(1, 3, 1, 70, 140, 64, lambda c: {"alibi": _slopes(c), "causal": True, "q_offset": 70}),
    "dropout in tiles": Case(1, 2, 1, 70, 143, 128, lambda _: {"window": 120, **_dropout(0.25)}),
    "dropout out of step": Case(1, 2, 1, 70, 80, 64, lambda _: {"k_offset": 3, "q_offset": 1, **_dropout(0.5)}),
    "a negative scale": Case(1, 1, 1, 70, 90, 64, lambda _: {"scale": -0.2}),
    "many tiles of keys": Case(1, 2, 1, 70, 420, 64),
    "a steep scale": Case(1, 6, 6, 100, 90, 64, lambda _: {"scale": 20.0, "window": 2}),
    "no scale": Case(1, 1, 1, 70, 90, 64, lambda _: {"scale": 0.0}),
}
ALL = CASES | LARGE


@functools.lru_cache(maxsize=128)
def _yardsticks(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Results, Results]:
    """o and lse for the kernel, the gradients in float64, and what torch makes of them in `dtype`."""
    variant, operands = cast(ALL[case].variant(), dtype), [x.to(dtype) for x in ALL[case].operands()]
    exact = cast(variant, torch.float64)
    o, lse = reference(*(x.double() for x in operands[:3]), exact)
    wanted, torchs = _gradients([x.double() for x in operands], exact), _gradients(operands, variant)
    return o.to(dtype), lse.float(), wanted, torchs


def _gradients(operands: list[Tensor], variant: Variant) -> Results:
    leaves = {n: x.clone().requires_grad_() for n, x in zip(("dq", "dk", "dv"), operands[:3], strict=True)}
    if variant.bias is not None:
        leaves["dbias"] = variant.bias.clone().requires_grad_()
        variant = variant._replace(bias=leaves["dbias"])
    o, lse = reference(leaves["dq"], leaves["dk"], leaves["dv"], variant)
    total = (o * operands[3]).sum() + (lse.masked_fill(lse.isneginf(), 0) * operands[4]).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}


def run(
    operands: list[Tensor],
    o: Tensor,
    lse: Tensor,
    variant: Variant,
    library: ctypes.CDLL | None = None,
    *,
    repeatable: bool = False,
    sums: list[Tensor] | None = None,
) -> Results:
    """The kernels' gradients for q, k, v, grad_o, grad_lse, and the workspace behind `sums`.

    Fails when they write anything else.
    """
    memory = emulate.Memory()
    how: dict[str, Any] = variant._asdict() | {"part": variant.part or ()}
    how |= {name: memory.tensor(x, name) for name, x in how.items() if isinstance(x, Tensor)}
    names = ("q", "k", "v", "grad_o", "grad_lse", "o", "lse")
    given = {n: memory.tensor(x, n) for n, x in zip(names, (*operands, o, lse), strict=True)}
    q, k, v = (given[n] for n in names[:3])
    delta = memory.empty(*lse.shape, dtype=torch.float32, name="delta")
    out = {f"d{n}": memory.empty(*given[n].shape, dtype=q.dtype, name=f"d{n}") for n in "qkv"}
    args = AttentionBackwardArgs(attention_args(q, k, v, given["o"], given["lse"], **how), repeatable=int(repeatable))
    if variant.bias is not None:
        out["dbias"] = memory.tensor(torch.zeros(variant.bias.shape), "dbias")
        shape = (*q.shape[:3], k.shape[2])
        args.dbias_strides = (ctypes.c_int64 * 4)(*broadcast_strides(out["dbias"], shape))
    for name, x in (given | out | {"delta": delta}).items():
        if name in dict(AttentionBackwardArgs._fields_):
            setattr(args, name, pointer(x))
        if f"{name}_strides" in dict(AttentionBackwardArgs._fields_) and name != "dbias":
            setattr(args, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    library = library or emulate.library(SOURCE)
    size = library.shardlib_attention_backward_workspace
    size.restype = ctypes.c_int64
    workspace = memory.tensor(torch.zeros(size(ctypes.byref(args)), dtype=torch.uint8), "workspace")
    args.workspace = pointer(workspace)
    emulate.call(emulate.library(DELTA), "shardlib_attention_delta", args, None)
    emulate.call(library, "shardlib_attention_backward", args, None)
    memory.check()
    if sums is not None:
        sums.append(workspace)
    return out


def _run_case(
    case: str,
    dtype: torch.dtype,
    library: ctypes.CDLL | None,
    repeatable: bool = False,
    sums: list[Tensor] | None = None,
) -> Results:
    operands = [x.to(dtype) for x in ALL[case].operands()]
    operands[4] = operands[4].float()
    variant = cast(ALL[case].variant(), dtype).explicit(operands[0], operands[1])
    o, lse, *_ = _yardsticks(case, dtype)
    return run(operands, o, lse, variant, library, repeatable=repeatable, sums=sums)


def check(case: str, dtype: torch.dtype, library: ctypes.CDLL | None = None, *, repeatable: bool = False) -> None:
    """The errors of the gradients against float64 are at most twice torch's in the same dtype, and a rounding."""
    found = _run_case(case, dtype, library, repeatable)
    _, _, wanted, torchs = _yardsticks(case, dtype)
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        # A bias that is broadcast collects the roundings of many elements.
        addends = ALL[case].b * ALL[case].h * ALL[case].s * ALL[case].t / x.numel() if name == "dbias" else 1.0
        error, allowed = _distance(x.to(dtype), wanted[name]), _allowed(torchs[name], wanted[name], addends)
        assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


def _distance(x: Tensor, want: Tensor) -> float:
    x = x.double().reshape(want.shape)
    return torch.where(x == want, 0.0, (x - want).abs()).nan_to_num(nan=math.inf).max().item()


def _allowed(torchs: Tensor, want: Tensor, addends: float) -> float:
    rounding = torch.finfo(torchs.dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps
    return 2 * _distance(torchs, want) + rounding * max(1.0, want.abs().max().item()) * math.sqrt(addends)


# fp16 differs in its instructions only, but for numbers that it does not hold.
OTHER = [*LARGE, "everything", "bias with infinities", "bias with lowest numbers", "scale 1"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", ALL)
def test_bf16_against_float64(case: str) -> None:
    check(case, BF16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", OTHER)
def test_fp16_against_float64(case: str) -> None:
    check(case, FP16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["causal tiles", "window of tiles", "tiles of a wide head", "alibi in tiles"])
def test_any_order_of_events_gives_the_same_bits_when_repeatable(case: str) -> None:
    library, found = emulate.library(SOURCE), []
    check(case, BF16, repeatable=True)
    for seed in (1, 2, 3, 4):
        emulate.configure(library, seed=seed, resident=seed)
        found.append(_run_case(case, BF16, library, repeatable=True))
    emulate.configure(library)
    for results in found[1:]:
        assert all(torch.equal(x, found[0][name]) for name, x in results.items())


def check_turns(library: ctypes.CDLL | None = None) -> None:
    """CTAs that wait for others come to their turns in whatever order they begin, one at a time or many."""
    library = library or emulate.library(SOURCE)
    sums: list[Tensor] = []  # dq itself is rounded, which would hide most of what another order makes of it
    try:
        for seed in (1, 2, 3):
            emulate.configure(library, seed=seed, resident=2 * seed - 1)
            _run_case(TURNS, BF16, library, repeatable=True, sums=sums)
    finally:
        emulate.configure(library)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_turns() -> None:
    check_turns()


def test_strides() -> None:
    """Parts of a fused projection, heads behind the sequence; a row's numbers likewise."""
    torch.manual_seed(0)
    batch, s, heads, d = 2, 70, 3, 64
    fused = torch.randn(batch, s, 4, heads, d).bfloat16()
    q, k, v, grad_o = (x.transpose(1, 2) for x in fused.unbind(2))
    variant = Variant(causal=True, scale=d**-0.5)
    o, lse = reference(q.double(), k.double(), v.double(), variant)
    heads_last = torch.randn(batch, s, heads).transpose(1, 2)
    views = run([q, k, v, grad_o, heads_last], o.bfloat16(), torch.empty_like(heads_last).copy_(lse), variant)
    dense = [x.contiguous() for x in (q, k, v, grad_o, heads_last)]
    for name, x in run(dense, o.bfloat16().contiguous(), lse.float().contiguous(), variant).items():
        assert torch.equal(x, views[name])


@pytest.mark.parametrize("d", [8, 24, 64, 112, 256])
@pytest.mark.parametrize("with_lse", [False, True])
def test_delta(d: int, with_lse: bool) -> None:
    torch.manual_seed(d)
    memory = emulate.Memory()
    o, grad_o = (memory.tensor(torch.randn(2, 7, 3, d).half().transpose(1, 2)) for _ in range(2))
    grad_lse, delta = torch.randn(2, 3, 7), memory.empty(2, 3, 7, dtype=torch.float32)
    args = AttentionBackwardArgs(attention_args(o, o, o, o, delta), grad_o=pointer(grad_o), delta=pointer(delta))
    args.grad_o_strides = (ctypes.c_int64 * 3)(*grad_o.stride()[:3])
    if with_lse:
        args.grad_lse, args.grad_lse_strides = pointer(grad_lse), (ctypes.c_int64 * 3)(*grad_lse.stride())
    emulate.call(emulate.library(DELTA), "shardlib_attention_delta", args, None)
    memory.check()
    want = (o.double() * grad_o).sum(-1) - (grad_lse if with_lse else 0)
    torch.testing.assert_close(delta.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("b", "s", "t"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty(b: int, s: int, t: int) -> None:
    q, k, rows = torch.zeros(b, 2, s, 64).bfloat16(), torch.zeros(b, 2, t, 64).bfloat16(), torch.zeros(b, 2, s)
    found = run([q, k, k, q, rows], q, rows, Variant())
    assert [name for name, x in found.items() if not x.eq(0).all()] == []


_Q, _OUT, _ROWS, _SUMS = (
    *(torch.zeros(1, 2, 8, 64).bfloat16() for _ in "qo"),
    torch.zeros(1, 2, 8),
    torch.zeros(2, 128, 64),
)


def _arguments(**changed: Any) -> AttentionBackwardArgs:
    args = AttentionBackwardArgs(attention_args(_Q, _Q, _Q, _Q, _ROWS))
    args.delta, args.workspace = pointer(_ROWS), pointer(_SUMS)
    for name in ("grad_o", "dq", "dk", "dv"):
        setattr(args, name, pointer(_OUT))
        setattr(args, f"{name}_strides", (ctypes.c_int64 * 3)(*_Q.stride()[:3]))
    for name, value in changed.items():
        setattr(args, name, value)
    return args


ODD = (ctypes.c_int64 * 3)(1024, 512, 60)
REFUSED = [({name: 8}, name) for name in ("grad_o", "dq", "dk", "dv")] + [({"grad_o_strides": ODD}, "grad_o")]


@pytest.mark.parametrize(("changed", "name"), REFUSED)
def test_refused(changed: dict[str, Any], name: str) -> None:
    emulate.call(emulate.library(SOURCE), "shardlib_attention_backward", _arguments(), None)  # without the change
    for source in (SOURCE, DELTA) if name == "grad_o" else (SOURCE,):
        with pytest.raises(EmulationError, match=f"{name} must begin at, and step by, multiples of 16 bytes"):
            emulate.call(emulate.library(source), f"shardlib_{source.removesuffix('.cu')}", _arguments(**changed), None)


def test_refused_as_the_forward_is() -> None:
    args = _arguments()
    args.forward.head_dim = 60
    for source in (SOURCE, DELTA):
        with pytest.raises(EmulationError, match="head dim 60; the kernels take multiples of 8 up to 256"):
            emulate.call(emulate.library(source), f"shardlib_{source.removesuffix('.cu')}", args, None)


# --- planted bugs -----------------------------------------------------------------------------------------------------

# What a mutant is compiled for: one kernel instead of twelve.
_ENTRY = "return a.dtype == SHARDLIB_BF16 ? of_type(bf16()) : of_type(fp16());"
_NARROW = {
    kernel: [Patch(SOURCE, _ENTRY, f"return what.template run<bf16, {kernel}>();")]
    for kernel in ("64, false", "128, false", "256, false", "128, true", "64, true")
}
ONLY = {
    "causal tiles, many queries": _NARROW["64, false"],
    "grouped": _NARROW["64, false"],
    "a steep scale": _NARROW["64, false"],
    "many tiles of keys": _NARROW["64, false"],
    "causal tiles": _NARROW["128, false"],
    "tiles of a wide head": _NARROW["256, false"],
    "bias of many keys": _NARROW["128, true"],
    "dropout in tiles": _NARROW["128, true"],
    "bias with infinities": _NARROW["64, true"],
}
TILES, MANY, WIDE = "causal tiles", "causal tiles, many queries", "tiles of a wide head"
GROUPED, STEEP, TURNS = "grouped", "a steep scale", "many tiles of keys"
PARTS, FEED = "attention_backward.cuh", "attention_backward_feed.cuh"
SCORES, PRODUCTS = "attention_backward_scores.cuh", "attention_backward_products.cuh"
SHARED, ORDER = "attention.cuh", "attention_turns.cuh"
BUGS: dict[str, Bug] = {
    # waiting
    "dP is read before it is there": Bug("wgmma_wait<C::EarlyDv && !C::General ? 1 : 0>();", "", MANY),
    "dq is read before it is there": Bug("wgmma_wait<C::Ahead ? 2 : 1>();", "", TILES),
    "grad_o is not waited for": Bug(
        "barrier_wait(&s.grad_full[ring.stage], ring.phase);\n    issue_scores", "issue_scores", MANY
    ),
    "q is refilled while dk still reads it": Bug(
        "barrier_wait(&s.q_empty[i], ring.phase ^ 1);\n    barrier_arrive_expect", "barrier_arrive_expect",
        MANY, FEED,
    ),
    "the producer waits for the wrong phase": Bug(
        "&s.grad_empty[i], ring.phase ^ 1);", "&s.grad_empty[i], ring.phase);", TILES, FEED
    ),
    "the phase never flips": Bug("stage = 0, phase ^= 1;", "stage = 0;", TILES, PARTS),
    "dS is read before the other half is there": Bug(
        "0, grad_columns + stage);\n      named_barrier_sync(kScores, 128 * C::Groups);", "0, grad_columns + stage);",
        MANY,
    ),
    "dq is written over while it is added": Bug(
        "bulk_commit();\n    bulk_wait_read<0>();\n    barrier_arrive", "bulk_commit();\n    barrier_arrive",
        TILES, FEED,
    ),
    "dq is added before it is written": Bug("barrier_wait(&s.dq_full[group], phase);", "", TILES, FEED),
    "the probabilities are not pinned": Bug("if constexpr (!C::Halved) wgmma_pin(scores);", "", TILES, PRODUCTS),
    "the sums are not pinned": Bug("wgmma_pin(sum);", "", TILES, PRODUCTS),
    # turns
    "CTAs have the order of their blocks": Bug("words ? *place : blockIdx.x", "blockIdx.x", TURNS, ORDER),
    "no CTA waits for its turn": Bug(
        "p.turns.wait(run, kOneRun ? C::Groups * before + group : before);", "", TURNS, FEED
    ),
    "a turn is not passed on": Bug("p.turns.pass(run);", "", TURNS, FEED),
    # addresses
    "k's panels are taken for one": Bug(
        "dq_panel * C::KeyPanel + dq_key * 128, C::KeyPanel);", "dq_panel * C::KeyPanel + dq_key * 128, 128);", WIDE
    ),
    "the queries' descriptor does not advance": Bug(
        "const uint64_t rows = b + ((step * 2048) >> 4);", "const uint64_t rows = b;", TILES, PRODUCTS
    ),
    "k is not transposed": Bug(
        "wgmma<T, C::DqColumns, Major::mn, Major::mn>", "wgmma<T, C::DqColumns, Major::mn, Major::k>", TILES, PRODUCTS
    ),
    "the query heads of another key head": Bug(
        "int head = work.kv_head * group; head < (work.kv_head + 1) * group;",
        "int head = work.kv_head; head < work.kv_head + group;", GROUPED, PARTS,
    ),
    "one head of the group": Bug(
        "int left = (work.last - work.first) * (p.heads / p.kv_heads);", "int left = work.last - work.first;", GROUPED
    ),
    "a tile of queries is left out": Bug(
        "work.first = first / C::Queries", "work.first = first / C::Queries + 1", TILES, PARTS
    ),
    # numbers
    "no delta": Bug("(dp[4 * i + e] - (e % 2 ? two.y : two.x))", "dp[4 * i + e]", TILES, SCORES),
    "dk without the scale": Bug("dk[i] *= p.scale;", "", TILES),
    "rows that see nothing": Bug(
        "nothing ? -SHARDLIB_MINUS_INFINITY : sum * kLog2E", "sum * kLog2E", "bias with infinities", FEED
    ),
    # sight and features
    "keys beyond the last": Bug("end = j < sight.keys ? sight", "end = true ? sight", STEEP, SCORES),
    "causal by one query": Bug("first = j - shift;", "first = j - shift + 1;", TILES, SHARED),
    "dP without dropout": Bug("drop(dp, dp, kept, p.extras.keep_scale);", "", "dropout in tiles"),
    "the lanes swap the wrong words": Bug("odd ? w.x : w.y, 4", "odd ? w.y : w.x, 4", "dropout in tiles", SCORES),
    "a bias of keys, from two lanes": Bug(
        "sum += __shfl_xor_sync(kFullMask, sum, 2);", "", "bias of many keys", SCORES
    ),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    mutant = bugs.build(SOURCE, bug, ONLY[bug.check])
    bugs.must_be_caught(mutant, functools.partial(_checked, bug.check))


@pytest.mark.parametrize("case", sorted({bug.check for bug in BUGS.values()}))
def test_what_mutants_are_checked_by_passes(case: str) -> None:
    _checked(case, emulate.library(SOURCE, patches=ONLY[case]))


def _checked(name: str, library: ctypes.CDLL) -> None:
    if name == TURNS:
        check_turns(library)
    else:
        check(name, BF16, library)


# What the compiler refuses: a CTA that has not the room, or not the registers.
TOO_MUCH = {
    "shared memory": (PARTS, "Stages = Halved ? 1 : 2;", "Stages = Halved ? 2 : 3;"),
    "registers of consumers": (PARTS, "ConsumerRegisters = 240;", "ConsumerRegisters = 248;"),
    "registers of the producer": (PARTS, "ProducerRegisters = 24,", "ProducerRegisters = 32,"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_no_cta_can_have_does_not_compile(what: str) -> None:
    with pytest.raises(BuildError, match="static assertion failed"):
        emulate.library(SOURCE, patches=[Patch(*TOO_MUCH[what]), *_NARROW["256, false"]])
