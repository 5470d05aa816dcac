"""Attention on every backend against its definition in float64, for all variants, dtypes, strides and sizes."""

import itertools
import types

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlib.core.errors import ShardingError
from shardlib.ops.attention import aten as attention_aten
from shardlib.ops.attention import math as attention_math
from shardlib.ops.attention import op, torch_kernels
from shardlib.ops.attention.op import BACKENDS, Choice, Variant, attention, choose, reference
from shardlib.ops.attention.variant import heads_last, split_blocks
from tests.ops.attention.attention_cases import CASES, COLUMNS, DTYPES, able, cast, errors

F64 = torch.float64


def backward(column):
    """The backend's backward, or written out in torch where only that knows a bias's gradient: what the op does."""

    def run(*args):
        *rest, variant, need_bias = args
        return BACKENDS[column if able(column, variant, need_bias) else "math"].backward(*rest, variant, need_bias)

    return run


CELLS = [(c, n) for c in COLUMNS for n in CASES if able(c, CASES[n].variant())]


def too_far(column, name, dtypes=DTYPES):
    runs = [(dtype, False) for dtype in dtypes] + [(dtype, True) for dtype in dtypes if dtype in (F64, torch.bfloat16)]
    for dtype, lse_gradient in runs:
        found = errors(name, BACKENDS[column].forward, backward(column), dtype, lse_gradient=lse_gradient)
        for result, error, allowed in found:
            if not error <= allowed:
                yield f"{result} in {dtype}, {lse_gradient=}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("column", "name"), CELLS)
def test_errors_are_at_most_twice_those_of_torch(column, name):
    assert not list(too_far(column, name))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("column", "name"), CELLS)
def test_small_blocks(column, name, monkeypatch):
    for module in (attention_math, torch_kernels):
        monkeypatch.setattr(module, "_ELEMENTS", 300)
    monkeypatch.setattr(torch_kernels, "_HIDING_ROWS", 5)
    assert not list(too_far(column, name, (F64,)))


def test_every_variant_has_a_backend():
    assert {n for _, n in CELLS} == set(CASES)
    assert sum(c == "torch" for c, _ in CELLS) == sum(not CASES[n].variant().dropout for n in CASES)


@pytest.mark.parametrize("column", COLUMNS)
def test_many_blocks_add_up_in_full_precision(column, monkeypatch):
    torch.manual_seed(4)
    q, grad_o = (torch.randn(1, 1, 400, 8).bfloat16() for _ in range(2))
    k = torch.randn(1, 1, 16, 8).bfloat16()
    variant = Variant(mask=torch.ones(1, 1, 400, 16) > 0, scale=0.3)
    o, lse = BACKENDS[column].forward(q, k, k, variant)
    gradients = lambda: BACKENDS[column].backward(grad_o, None, q, k, k, o, lse, variant, False)[:3]
    whole = gradients()
    for module in (attention_math, torch_kernels):
        monkeypatch.setattr(module, "_ELEMENTS", 1)
    for a, b in zip(gradients(), whole, strict=True):
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()  # the last rounding


@pytest.mark.parametrize("column", COLUMNS)
def test_a_logit_of_zero_is_not_nothing(column):
    """torch's kernel gives lse = 0 also to rows that see no key."""
    q = torch.zeros(1, 1, 3, 8)
    see = torch.tensor([[True], [False], [True]])[None, None]
    o, lse = BACKENDS[column].forward(q, q[:, :, :1], q[:, :, :1] + 1, Variant(mask=see))
    assert lse.flatten().tolist() == [0.0, float("-inf"), 0.0]
    assert o[0, 0, :, 0].tolist() == [1.0, 0.0, 1.0]


# --- strides and sizes ------------------------------------------------------------------------------------------------

STRIDES = {
    "heads first": lambda x: x,
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "column by column": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack([x, x * 0 + 7], -1).flatten(-2)[..., ::2],
    "a slice of more": lambda x: torch.cat([x * 0 + 7, x, x * 0 + 7], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("column", COLUMNS)
def test_strides(column, strides, monkeypatch):
    monkeypatch.setattr(op, "choose", lambda *_: Choice(column, "", "test"))
    for how in ({}, {"causal": True, "q_offset": 1}, {"mask": torch.rand(2, 1, 6, 7).mT.contiguous().mT > 0.4}):
        torch.manual_seed(0)
        shapes = ((4, 6), (2, 7), (2, 7), (4, 6))
        dense = [torch.randn(2, n, m, 8, dtype=F64) for n, m in shapes]
        given = [STRIDES[strides](x) for x in dense]
        dense = [x.contiguous() for x in given]
        variant = Variant(**how, scale=0.3)
        grad_lse = torch.randn(4, 2, 6, dtype=F64).transpose(0, 1)
        arguments = (torch.ops.shardlib.attention, torch.ops.shardlib.attention_backward)
        results = []
        for q, k, v, grad_o in (dense, given):
            o, lse = arguments[0](q, k, v, *variant)
            results.append((o, lse, *arguments[1](grad_o, grad_lse, q, k, v, o, lse, *variant)[:3]))
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(arguments[0].default, (q, k, v, *variant), test_utils=checks)
            gradient = (grad_o, grad_lse, q, k, v, o, lse, *variant)
            torch.library.opcheck(arguments[1].default, gradient, test_utils=checks)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(4, 1, 7), (6, 7), (1, 1, 1, 7), (2, 4, 6, 7), ()])
def test_the_gradient_of_a_bias_has_its_shape_and_dtype(shape):
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8)
    for dtype in (torch.float32, torch.bfloat16):
        variant = Variant(bias=torch.randn(shape).to(dtype))
        o, lse = torch.ops.shardlib.attention(q, k, k, *variant)
        arguments = (q, None, q, k, k, o, lse, *variant)
        dbias = torch.ops.shardlib.attention_backward(*arguments, need_bias=True)[3]
        assert (dbias.shape, dbias.dtype) == (shape, dtype)
        assert torch.ops.shardlib.attention_backward(*arguments)[3] is None
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch.ops.shardlib.attention_backward.default, arguments, {"need_bias": True}, test_utils=checks
        )


@pytest.mark.parametrize("sizes", ["B", "H", "KV H", "S", "T", "S T", "D"])
def test_empty_sizes(sizes):
    n = {"B": 2, "H": 4, "KV": 2, "S": 5, "T": 7, "D": 8} | dict.fromkeys(sizes.split(), 0)
    torch.manual_seed(0)
    q, grad_o = (torch.randn(n["B"], n["H"], n["S"], n["D"], dtype=F64) for _ in range(2))
    k, v = (torch.randn(n["B"], n["KV"], n["T"], n["D"], dtype=F64) for _ in range(2))
    heads = {"alibi": torch.ones(n["H"]), "bias": torch.randn(n["H"], 1, n["T"], dtype=F64)}
    dropout = {"key": torch.tensor([1, 2]), "dropout": 0.5, "window": 2}
    for how in ({}, {"causal": True}, heads, dropout, heads | dropout):
        variant = Variant(**how)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *([variant.bias] if variant.bias is not None else []))]
        changed = variant if variant.bias is None else variant._replace(bias=leaves[3])
        o, lse = reference(*leaves[:3], changed)
        grads = torch.autograd.grad((o * grad_o).sum(), leaves, allow_unused=True)
        got, got_lse = torch.ops.shardlib.attention(q, k, v, *variant)
        torch.testing.assert_close((got, got_lse), (o.detach(), lse.detach()))
        need = variant.bias is not None
        mine = torch.ops.shardlib.attention_backward(
            grad_o, got_lse * 0, q, k, v, got, got_lse, *variant, need_bias=need
        )
        for x, leaf, grad in zip(mine, leaves, grads, strict=False):
            torch.testing.assert_close(x, torch.zeros_like(leaf) if grad is None else grad)


def test_blocks_see_all_that_is_visible():
    for (s, t), shift, causal, window in itertools.product(
        ((5, 7), (7, 5), (1, 6), (6, 1)), range(-9, 10), (False, True), (0, 1, 3, 20)
    ):
        variant = Variant(causal=causal, window=window, q_offset=max(shift, 0), k_offset=max(-shift, 0))
        want = variant.visible(s, t, torch.device("cpu"))
        assert variant.hides(s, t) == (not want.all())
        for rows in (1, 3, 10):
            got = torch.zeros(s, t, dtype=torch.bool)
            for r, c, here in split_blocks(variant, s, t, rows):
                assert r.stop - r.start <= rows
                seen = here.visible(r.stop - r.start, c.stop - c.start, got.device)
                assert seen[0].any() or seen[-1].any()
                got[r, c] |= seen
            assert torch.equal(got, want)


# --- what it costs ----------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest new tensor had, and which kernels ran with a mask."""

    elements, masks, calls = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        if "flash_attention_for_cpu" in str(func):
            self.calls += 1
            self.masks += (kwargs or {}).get("attn_mask") is not None
        return out


def measured(variant, s, t, backend):
    q, k = torch.randn(1, 2, s, 8), torch.randn(1, 1, t, 8)
    variant = variant.explicit(q, k)
    with Largest() as seen:
        o, lse = BACKENDS[backend].forward(q, k, k, variant)
        BACKENDS[backend].backward(o, None, q, k, k, o, lse, variant, False)
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("column", COLUMNS)
def test_memory_is_linear_in_the_sequence(column, monkeypatch):
    bound = 1 << 15
    monkeypatch.setattr(attention_math, "_ELEMENTS", bound)
    monkeypatch.setattr(torch_kernels, "_ELEMENTS", bound)
    for how in ({"causal": True, "q_offset": 300}, {"window": 64}, {"mask": torch.rand(1, 1, 1200, 1) > 0.1}):
        seen = measured(Variant(**how), 1200, 1300, column)
        assert seen.elements <= 2 * bound < 1200 * 1300, how


def test_torchs_kernel_gets_no_mask_where_it_needs_none():
    plain = {"full": {}, "causal": {"causal": True}, "behind": {"causal": True, "q_offset": 99}}
    plain |= {"ahead": {"causal": True, "k_offset": 7}, "wide": {"window": 99, "causal": True}}
    for name, how in plain.items():
        seen = measured(Variant(**how), 40, 50, "torch")
        assert (seen.calls, seen.masks) == (2, 0), name
    seen = measured(Variant(causal=True, q_offset=3), 40, 50, "torch")
    assert (seen.calls, seen.masks) == (4, 0)  # three keys for all, and a triangle
    for how in ({"causal": True, "q_offset": 3, "window": 9}, {"window": 9}, {"mask": torch.ones(50) > 0}):
        seen = measured(Variant(**how), 40, 50, "torch")
        assert (seen.calls, seen.masks) == (2, 2)
    nothing = ({"causal": True, "k_offset": 40}, {"window": 9, "k_offset": 60}, {"window": 9, "q_offset": 90})
    for column, how in itertools.product(COLUMNS, nothing):
        seen = measured(Variant(**how), 40, 50, column)
        assert seen.calls == 0
        assert seen.elements <= 2 * 50 * 8


# --- choice -----------------------------------------------------------------------------------------------------------


def test_reasons_are_printable(monkeypatch):
    monkeypatch.delenv("SHARDLIB_OPS", raising=False)
    q, k = torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 7, 8)
    assert str(choose(q, k, Variant())) == "torch/flash for CPU: torch's own kernel"
    assert str(choose(q[:0], k[:0], Variant())) == "math: a size is 0"
    assert str(choose(q.to("meta"), k.to("meta"), Variant())) == "math: torch has no kernel for meta here"
    dropout = Variant(dropout=0.1, key=torch.tensor([1, 2]))
    assert str(choose(q, k, dropout)) == "math: torch's kernels drop out by a generator, not by a key"
    bias = Variant(bias=torch.zeros(7))
    assert choose(q, k, bias).backend == "torch"
    assert str(choose(q, k, bias, True)) == "math: torch's kernels give no gradient of a bias as it is broadcast here"


def test_the_environment_chooses(monkeypatch):
    q = torch.zeros(2, 2, 5, 8)
    dropout = Variant(dropout=0.1, key=torch.tensor([1, 2]))
    monkeypatch.setenv("SHARDLIB_OPS", "attention=math")
    assert str(choose(q, q, Variant())) == "math: written out in torch"
    for text in ("torch", "attention=torch"):
        monkeypatch.setenv("SHARDLIB_OPS", text)
        assert choose(q, q, Variant()).backend == "torch"
        assert choose(q, q, dropout).backend == "math"  # torch's plain ops
    monkeypatch.setenv("SHARDLIB_OPS", "attention=cuda")
    with pytest.raises(ShardingError, match="SHARDLIB_OPS asks for attention=cuda, which cannot run here"):
        choose(q, q, Variant())
    with pytest.raises(ShardingError, match="SHARDLIB_OPS asks for attention=cuda"):
        attention(q, q, q)


def test_the_op_runs_what_is_chosen(monkeypatch):
    q, ran = torch.randn(1, 2, 5, 8), []
    spy = lambda name, run: lambda *a: (ran.append(name), run(*a))[1]
    for name, b in BACKENDS.items():
        changed = b._replace(forward=spy(name, b.forward), backward=spy(name, b.backward))
        monkeypatch.setitem(BACKENDS, name, changed)
    for text, want in (("", "torch"), ("attention=math", "math")):
        monkeypatch.setenv("SHARDLIB_OPS", text)
        attention(q.clone().requires_grad_(), q, q)[0].sum().backward()
        assert ran[-2:] == [want, want]


# --- torch's kernels for CUDA, their arguments as on a GPU ------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in CASES if not CASES[n].variant().dropout])
@pytest.mark.parametrize("column", COLUMNS)
def test_on_a_gpu(column, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        variant = cast(CASES[name].variant(), dtype, "cuda")
        q = torch.empty(1, 1, 1, CASES[name].d, dtype=dtype, device="cuda")
        if BACKENDS[column].find_fault(q, q, variant, False) is None:
            found = errors(name, BACKENDS[column].forward, backward(column), dtype, device="cuda")
            assert not [f"{r} in {dtype}: {e:.2e} > {a:.2e}" for r, e, a in found if not e <= a]


def test_cuda_takes_the_kernel_that_can(monkeypatch):
    class Cuda(torch.Tensor):
        device = torch.device("cuda")

    def kernel(how, dtype=torch.bfloat16, s=16, t=16, d=64):
        q, k = (torch.empty(1, 2, n, d, dtype=dtype).as_subclass(Cuda) for n in (s, t))
        variant = Variant(**how)
        return torch_kernels.find_fault(q, k, variant, False) or torch_kernels.way(q, k, variant)

    assert kernel({}) == kernel({"causal": True}) == kernel({"causal": True, "window": 16}) == "flash"
    assert kernel({"causal": True, "q_offset": 15}, t=16) == "flash"
    others = ({"causal": True, "q_offset": 1}, {"window": 3}, {"mask": torch.ones(16) > 0}, {"alibi": torch.ones(2)})
    assert {kernel(how) for how in others} == {"memory-efficient"}
    assert kernel({"causal": True}, t=17) == kernel({}, dtype=torch.float32) == "memory-efficient"
    assert kernel({}, dtype=F64) == "torch has no kernel for torch.float64 heads of 64 on CUDA"
    assert kernel({}, d=36) == "torch has no kernel for torch.bfloat16 heads of 36 on CUDA"


def test_masks_for_cuda_are_aligned():
    q, k = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 7, 8)
    for shape in ((1, 1, 1, 1), (2, 1, 1, 7), (1, 4, 5, 7)):
        mask = torch.randn(shape)
        aligned = attention_aten._align_mask(mask, q, k)
        assert torch.equal(aligned, mask.expand(2, 4, 5, 7))
        assert all(n == 0 or n % 16 == 0 for n in aligned.stride()[:-1])
        assert aligned.stride(-1) == 1


@pytest.mark.parametrize("laid_out", [heads_last, Tensor.contiguous])
@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5)])
def test_the_kernel_for_cuda_gets_o_as_it_steps_through_it(laid_out, rows, monkeypatch):
    """In half precision it goes from row to row by all heads' columns: by another layout dq and dk would be wrong."""
    q, o = torch.randn(2, 2, 4, 6, 8).unbind()
    given = laid_out(o)[:, :, rows]

    def kernel(grad_o, q, k, v, mask, o, *rest, **more):
        stepped = o.as_strided(o.shape, (o.stride(0), o.stride(1), o.shape[1] * o.shape[3], 1), o.storage_offset())
        assert torch.equal(stepped, given)
        return q, k, v, None

    aten = types.SimpleNamespace(_scaled_dot_product_efficient_attention_backward=kernel)
    monkeypatch.setattr(attention_aten, "_aten", aten)
    part = q[:, :, rows]
    attention_aten.EFFICIENT.backward(part, part, q, q, given, torch.zeros(part.shape[:3]), None, False, 1.0)
