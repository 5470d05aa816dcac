"""attention_forward.cu on emulated threads: every variant against float64, any order of events, and planted bugs."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.ops.attention.op import Variant, reference
from tests.kernels import bugs, emulate
from tests.kernels.attention_args import AttentionArgs, AttentionBackwardArgs, attention_args
from tests.kernels.attention_forward_bugs import BUGS, ONLY, SOURCE
from tests.kernels.emulate import BuildError, EmulationError, Patch
from tests.ops.attention.attention_cases import CASES, Case, cast


def _key() -> Tensor:
    return torch.tensor([11, 2**40 + 3])


# Several tiles of queries and of keys, none of them full; CASES are within one or two.
LARGE: dict[str, Case] = {
    "tiles": Case(1, 2, 1, 200, 300, 64),
    "causal tiles": Case(2, 1, 1, 270, 300, 72, lambda _: {"causal": True, "q_offset": 30}),
    "causal tiles, many queries": Case(1, 2, 1, 400, 150, 128, lambda _: {"causal": True}),
    "window of tiles": Case(1, 2, 2, 300, 320, 128, lambda _: {"window": 70, "q_offset": 7}),
    "causal window of tiles": Case(1, 1, 1, 390, 390, 96, lambda _: {"window": 100, "causal": True}),
    "tiles of a wide head": Case(1, 2, 1, 140, 200, 256, lambda _: {"causal": True, "q_offset": 60}),
    "tiles that see nothing": Case(1, 2, 1, 260, 140, 128, lambda _: {"causal": True, "k_offset": 150}),
    "masked tiles": Case(2, 2, 1, 150, 210, 112, lambda c: {"mask": torch.rand(c.b, 1, c.s, c.t) < 0.3}),
    "a wide head with a bias": Case(1, 2, 2, 130, 110, 200, lambda c: {"bias": torch.randn(1, c.h, c.s, c.t).double()}),
    "alibi in tiles": Case(1, 3, 1, 140, 200, 64, lambda _: {"alibi": torch.tensor([0.5, 0.1, 0.02]), "causal": True}),
    "dropout in tiles": Case(1, 2, 1, 150, 203, 64, lambda _: {"dropout": 0.25, "key": _key(), "window": 120}),
    "a negative scale": Case(1, 1, 1, 70, 90, 64, lambda _: {"scale": -0.2}),
    "sharp tiles": Case(1, 2, 1, 150, 300, 128, lambda _: {"scale": 1.0}),
    "far apart": Case(1, 1, 1, 70, 90, 64, lambda _: {"causal": True, "window": 2**20, "k_offset": -(2**40)}),
    "far behind": Case(1, 1, 1, 70, 90, 64, lambda _: {"causal": True, "q_offset": 2**40}),
    "no scale": Case(1, 1, 1, 70, 90, 64, lambda _: {"scale": 0.0}),
}


def run(q: Tensor, k: Tensor, v: Tensor, variant: Variant, library: ctypes.CDLL | None = None) -> tuple[Tensor, Tensor]:
    """The kernel's o and lse; fails when it writes anything else."""
    memory = emulate.Memory()
    how: dict[str, Any] = variant._asdict() | {"part": variant.part or ()}
    tensors = {name: memory.tensor(x, name) for name, x in how.items() if isinstance(x, Tensor)}
    q, k, v = (memory.tensor(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    o = memory.empty(*q.shape, dtype=q.dtype, name="o")
    lse = memory.empty(*q.shape[:3], dtype=torch.float32, name="lse")
    library = library or emulate.library(SOURCE)
    emulate.call(library, "shardlib_attention_forward", attention_args(q, k, v, o, lse, **how | tensors), None)
    memory.check()
    return o, lse


def check(case: str, dtype: torch.dtype, library: ctypes.CDLL | None = None) -> None:
    """The errors of o and lse against float64 are at most twice torch's in the same dtype, and a rounding."""
    sizes = (CASES | LARGE)[case]
    q, k, v = (x.to(dtype) for x in sizes.operands()[:3])
    variant = cast(sizes.variant(), dtype)
    exact = reference(q.double(), k.double(), v.double(), cast(variant, torch.float64))
    torchs = reference(q, k, v, variant)
    found = run(q, k, v, variant.explicit(q, k), library)
    for name, x, want, other in zip(("o", "lse"), found, exact, torchs, strict=True):
        size = max(1.0, want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0)
        rounding = torch.finfo(x.dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps
        error, allowed = _distance(x, want), 2 * _distance(other, want) + rounding * size
        assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


def _distance(x: Tensor, want: Tensor) -> float:
    return torch.where(x == want, 0.0, (x.double() - want).abs()).nan_to_num(nan=math.inf).max().item()


# fp16 differs in its instructions only, but for numbers that it does not hold.
FP16 = [*LARGE, "everything", "bias with infinities", "bias with lowest numbers", "scale 1"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_bf16_against_float64(case: str) -> None:
    check(case, torch.bfloat16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", FP16)
def test_fp16_against_float64(case: str) -> None:
    check(case, torch.float16)


def _operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.bfloat16() for x in case.operands()[:3])
    return q, k, v


@pytest.mark.parametrize("case", ["causal tiles", "window of tiles", "masked tiles"])
def test_any_order_of_events_gives_the_same_bits(case: str) -> None:
    q, k, v = _operands(LARGE[case])
    variant, library = cast(LARGE[case].variant(), torch.bfloat16).explicit(q, k), emulate.library(SOURCE)
    found = []
    for seed, multiprocessors in ((1, 1), (2, 2), (3, 5), (4, 132)):
        emulate.configure(library, seed=seed, resident=seed, multiprocessors=multiprocessors)
        found.append(run(q, k, v, variant, library))
    emulate.configure(library)
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])


def test_strides() -> None:
    """Parts of a fused projection, heads behind the sequence; o and lse likewise; an expanded key."""
    torch.manual_seed(0)
    batch, s, heads, d = 2, 70, 3, 64
    fused = torch.randn(batch, s, 3, heads, d).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    k = k[:, :1].expand(-1, heads, -1, -1)
    memory = emulate.Memory()
    q, k, v = (memory.tensor(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    o = memory.tensor(torch.zeros(batch, s, heads, d).bfloat16().transpose(1, 2), "o")
    lse = memory.tensor(torch.zeros(batch, s, heads).transpose(1, 2), "lse")
    args = attention_args(q, k, v, o, lse, causal=True)
    emulate.call(emulate.library(SOURCE), "shardlib_attention_forward", args, None)
    memory.check()
    dense = run(q.contiguous(), k.contiguous(), v.contiguous(), Variant(causal=True, scale=d**-0.5))
    assert torch.equal(o, dense[0])
    assert torch.equal(lse, dense[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_of_any_dtype(dtype: torch.dtype) -> None:
    case = Case(1, 2, 1, 70, 90, 64)
    q, k, v = _operands(case)
    bias = torch.randn(1, 2, 70, 90).to(dtype)
    o, _ = run(q, k, v, Variant(bias=bias, scale=0.125))
    exact, _ = reference(q.double(), k.double(), v.double(), Variant(bias=bias.double(), scale=0.125))
    torch.testing.assert_close(o.double(), exact, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("b", "s", "t"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty(b: int, s: int, t: int) -> None:
    q, k = torch.zeros(b, 2, s, 64).bfloat16(), torch.zeros(b, 2, t, 64).bfloat16()
    o, lse = run(q, k, k, Variant())
    assert o.eq(0).all()
    assert lse.isneginf().all()


def _arguments(q: Tensor, lse: Tensor, **changed: Any) -> AttentionArgs:
    args = attention_args(q, q, q, q, lse)
    for name, value in changed.items():
        setattr(args, name, value)
    return args


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": 2}, "q, k and v must be bf16 or fp16"),
    ({"kv_heads": 4}, "6 query heads do not divide into 4 key heads"),
    ({"head_dim": 60}, "head dim 60; the kernels take multiples of 8 up to 256"),
    ({"head_dim": 264}, "head dim 264"),
    ({"queries": 2**28}, r"a sequence of 2\^28 or more"),
    ({"window": -1}, "window -1 is negative"),
    ({"dropout": 1.0}, r"dropout 1 is not in \[0, 1\)"),
    ({"dropout": 0.5}, "dropout without a key"),
    ({"k_strides": (ctypes.c_int64 * 3)(3072, 512, 60)}, "k must begin at, and step by, multiples of 16 bytes"),
    ({"o": 8}, "o must begin at, and step by, multiples of 16 bytes"),
    ({"alibi": 16, "q_offset": 2**31}, r"ALiBi or a window of 2\^28 over a distance of more than 2\^29"),
    ({"window": 2**28, "k_offset": 2**31}, "ALiBi or a window"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refused(changed: dict[str, Any], message: str) -> None:
    library, q, lse = emulate.library(SOURCE), torch.zeros(1, 6, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 6, 8)
    emulate.call(library, "shardlib_attention_forward", _arguments(q, lse), None)  # without the change it is taken
    with pytest.raises(EmulationError, match=message):
        emulate.call(library, "shardlib_attention_forward", _arguments(q, lse, **changed), None)


def test_the_structures_are_laid_out_alike() -> None:
    driver = """extern "C" void sizes(int64_t* out) {
      out[0] = sizeof(AttentionArgs), out[1] = offsetof(AttentionArgs, batch), out[2] = offsetof(AttentionArgs, causal);
      out[3] = sizeof(AttentionBackwardArgs), out[4] = offsetof(AttentionBackwardArgs, dbias_strides);
    }"""
    found = (ctypes.c_int64 * 5)()
    emulate.library("attention_args.h", driver="#include <stddef.h>\n" + driver).sizes(found)
    args, backward = AttentionArgs, AttentionBackwardArgs
    assert list(found) == [
        ctypes.sizeof(args),
        args.batch.offset,
        args.causal.offset,
        ctypes.sizeof(backward),
        backward.dbias_strides.offset,
    ]


# What the compiler refuses: a CTA that has not the room, or not the registers.
TOO_MUCH = {
    "shared memory": ("attention_forward_tiles.h", "<256, false> = 80;", "<256, false> = 96;"),
    "registers of consumers": (SOURCE, "Consumers == 3 ? 160 : 240", "Consumers == 3 ? 168 : 240"),
    "registers of the producer": (SOURCE, "Consumers == 3 ? 32 : 24", "Consumers == 3 ? 32 : 32"),
}


@pytest.mark.long
@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_no_cta_can_have_does_not_compile(what: str) -> None:
    with pytest.raises(BuildError, match="static assertion failed"):
        emulate.library(SOURCE, patches=[Patch(*TOO_MUCH[what])])


# --- planted bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    mutant = bugs.build(SOURCE, bug, ONLY[bug.check])
    bugs.must_be_caught(mutant, lambda library: check(bug.check, torch.bfloat16, library))


@pytest.mark.parametrize("case", sorted({bug.check for bug in BUGS.values()}))
def test_what_mutants_are_checked_by_passes(case: str) -> None:
    check(case, torch.bfloat16, emulate.library(SOURCE, patches=ONLY[case]))
