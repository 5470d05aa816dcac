"""The CUDA attention backend without a GPU: what it refuses and why, and what it hands to the (emulated) kernels."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import ShardingError
from shardlib.ops import native_libs, tuning
from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention import math as attention_math
from shardlib.ops.attention.op import Variant, attention, choose
from shardlib.ops.tuning import Attention
from tests.ops.attention.attention_cases import CASES, cast, errors
from tests.validation.gpu.kernels import deterministic, find

BF16 = torch.bfloat16
CARDS = ("sm_90a", "sm_80")


class Cuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


def _on_gpu(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype).as_subclass(Cuda)


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that there is a GPU."""

    def put(name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0), library: Any = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(native_libs, "cuda", lambda: library)

    monkeypatch.delenv("SHARDLIB_OPS", raising=False)
    return put


def test_the_default_is_torchs_until_it_is_measured(card: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched() -> None:
        raise AssertionError("the library was asked for")

    card()
    monkeypatch.setattr(tuning, "ATTENTION", {})
    monkeypatch.setattr(native_libs, "cuda", untouched)
    q = _on_gpu(1, 2, tuning.SHORTEST, 64)
    why = (
        "shardlib's own kernels are not yet measured on NVIDIA H100 80GB HBM3 (SHARDLIB_OPS=attention=cuda takes them)"
    )
    assert str(choose(q, q, Variant())) == f"torch/flash: {why}"
    dropout = Variant(dropout=0.5, key=torch.tensor([1, 2]))
    assert str(choose(q, q, dropout)) == "math: torch's kernels drop out by a generator, not by a key"
    card()
    name, one_head = "NVIDIA H100 80GB HBM3", _on_gpu(1, 1, tuning.SHORTEST, 64)
    both = {Attention(name, way, 64, extras, False): 1.5 for way in ("forward", "backward") for extras in (False, True)}
    monkeypatch.setattr(tuning, "ATTENTION", both)
    assert str(choose(q, q, Variant())) == "cuda/sm_90a: shardlib's own kernel"
    assert str(choose(q, q, dropout)) == "cuda/sm_90a: shardlib's own kernel"
    assert choose(q, one_head, Variant()).backend == "torch"  # grouped: not timed
    narrow, short = _on_gpu(1, 2, tuning.SHORTEST, 40), _on_gpu(1, 2, tuning.SHORTEST - 1, 64)
    assert choose(narrow, narrow, Variant()).backend == "cuda"  # as 64
    assert "not measured below 2,048 queries" in str(choose(short, q, Variant()))
    assert choose(_on_gpu(1, 2, 16, 72), _on_gpu(1, 2, 16, 72), Variant()).backend == "torch"
    monkeypatch.setattr(tuning, "ATTENTION", both | {Attention(name, "backward", 64, False, False): 0.9})
    why = f"torch's own kernels are faster for this on {name} (SHARDLIB_OPS=attention=cuda takes them)"
    assert str(choose(q, q, Variant())) == f"torch/flash: {why}"
    assert choose(q, q, dropout).backend == "cuda"
    card("NVIDIA A100-SXM4-80GB", (8, 0))
    assert choose(q, q, Variant()).backend == "torch"


def test_no_card_is_trusted_without_a_report() -> None:
    from tests.validation.gpu.test_gpu_session import REPORT

    report = REPORT.read_text()
    cards = {key.card for key in tuning.ATTENTION} | set(tuning.TUNING)
    assert [card for card in cards if f"| {card}, 20" not in report] == []  # a row is of it


def test_by_name_it_is_taken(card: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", "attention=cuda")
    q = _on_gpu(1, 2, 16, 64)
    ways = {(9, 0): "sm_90a", (8, 0): "sm_80", (8, 9): "sm_80", (10, 0): "sm_80", (12, 0): "sm_80"}
    for capability, way in ways.items():
        card(capability=capability)
        assert str(choose(q, q, Variant(), True)) == f"cuda/{way}: shardlib's own kernel"


REFUSED: dict[str, tuple[tuple[Tensor, Tensor], dict[str, Any], str]] = {
    "cpu": ((torch.zeros(1, 2, 4, 64),) * 2, {}, "shardlib's CUDA kernels take no tensors on cpu"),
    "size": ((_on_gpu(1, 2, 16, 64), _on_gpu(1, 2, 0, 64)), {}, "a size is 0"),
    "dtype": ((_on_gpu(1, 2, 4, 64, dtype=torch.float32),) * 2, {}, "take bfloat16 and float16, not float32"),
    "odd head": ((_on_gpu(1, 2, 4, 60),) * 2, {}, "take head sizes of a multiple of 8, up to 256, not 60"),
    "wide head": ((_on_gpu(1, 2, 4, 264),) * 2, {}, "take head sizes of a multiple of 8, up to 256, not 264"),
    "old card": (
        (_on_gpu(1, 2, 4, 64),) * 2,
        {"name": "Tesla T4", "capability": (7, 5)},
        "Tesla T4 is older than sm_80, for which shardlib's kernels are",
    ),
    "no library": (
        (_on_gpu(1, 2, tuning.SHORTEST, 64),) * 2,
        {"library": Missing("no CUDA compiler: none")},
        "no CUDA compiler: none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_reasons(case: str, card: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k), machine, said = REFUSED[case]
    card(**machine)
    monkeypatch.setenv("SHARDLIB_OPS", "attention=cuda")
    with pytest.raises(ShardingError) as error:
        choose(q, k, Variant())
    assert said in str(error.value)
    monkeypatch.setenv("SHARDLIB_OPS", "")
    monkeypatch.setattr(tuning, "find_speed_fault", lambda *_, **__: "")
    other = choose(q, k, Variant())
    assert other.backend in ("torch", "math")
    if case == "cpu":  # nobody expects it there, so it is not spoken of
        assert str(other) == "torch/flash for CPU: torch's own kernel"
    elif other.backend == "torch":
        assert said in other.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu() -> None:
    q = _on_gpu(1, 2, 4, 64)
    assert attention_cuda.find_fault(q, q, Variant(), False) == "there is no CUDA device"


# --- what kernels get -------------------------------------------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulation needs g++")
    monkeypatch.setattr(attention_cuda, "get_kernel", attention_cuda.get_kernel)  # restored by that
    kernels = find(rehearsal=True)
    assert not isinstance(kernels, str)
    kernels.install(poison=True)


def _run(card: str, name: str, dtype: torch.dtype) -> list[str]:
    forward = functools.partial(attention_cuda.forward, card=card)
    backward = functools.partial(attention_cuda.backward, card=card)
    found = errors(name, forward, backward, dtype, lse_gradient=True)
    return [f"{result}: {error:.2e} > {allowed:.2e}" for result, error, allowed in found if not error <= allowed]


NAMES = (
    "grouped",
    "head 40",
    "causal padding",
    "mask of heads",
    "bias of keys",
    "one bias",
    "dropout of a part",
    "everything",
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("card", CARDS)
def test_variants(card: str, name: str, emulated: None) -> None:
    assert _run(card, name, BF16) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["bias", "bias of keys", "one bias", "everything"])
@pytest.mark.parametrize("card", CARDS)
def test_a_bias_repeatable(card: str, name: str, emulated: None) -> None:
    with deterministic():
        assert _run(card, name, torch.float16) == []


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x,
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "column by column": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack([x, x * 0 + 7], -1).flatten(-2)[..., ::2],
    "rows of 20 bytes": lambda x: torch.cat([x, x[..., :2]], -1)[..., :-2],
    "off by one": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
    "one head for all": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("card", CARDS)
def test_strides(card: str, strides: str, emulated: None) -> None:
    change = STRIDES[strides]
    variant = Variant(causal=True, scale=0.3, mask=(torch.rand(2, 1, 7, 6) > 0.2).mT)
    dense = [torch.randn(2, 2, n, 8).to(BF16) for n in (6, 7, 7, 6)]
    q, k, v, grad_o = given = [change(x) for x in dense]
    assert all(torch.equal(change(x), x) for x in dense) or strides in ("expanded", "one head for all")
    o, lse = attention_cuda.forward(q, k, v, variant, card)
    assert o.stride() == torch.empty_like(q).stride()
    grads = attention_cuda.backward(grad_o, None, q, k, v, o, lse, variant, False, card)
    exact = [x.double() for x in given]
    want_o, want_lse = attention_math.forward(*exact[:3], variant)
    want = attention_math.backward(exact[3], None, *exact[:3], want_o, want_lse, variant, False)
    for x, y in zip((o, lse, *grads[:3]), (want_o, want_lse, *want[:3]), strict=True):
        assert torch.allclose(x.double(), y, atol=0.03, rtol=0.02)
    for x, like in zip(grads[:3], (q, k, v), strict=True):  # as the op's fake has them
        assert x.stride() == torch.empty(2, like.shape[2], 2, 8).transpose(1, 2).stride()


def test_only_what_does_not_fit_is_copied() -> None:
    x = torch.randn(2, 2, 6, 8).to(BF16)
    for name, change in STRIDES.items():
        y = change(x)
        assert (attention_cuda._align(y) is y) == (name in ("heads first", "heads last")), name
        assert torch.equal(attention_cuda._align(y), y)
        assert attention_cuda._is_aligned(attention_cuda._align(y))


@pytest.mark.parametrize("card", CARDS)
def test_biases_of_all_dtypes_and_strides(card: str, emulated: None) -> None:
    q = torch.randn(1, 2, 9, 16).to(torch.float16)
    base = torch.randn(1, 2, 9, 18)
    for dtype, bias in itertools.product(
        (torch.float64, torch.float32, BF16, torch.float16), (base[..., ::2], base[..., :9].mT)
    ):
        variant = Variant(bias=bias.to(dtype), scale=0.2, alibi=torch.tensor([0.1, 7, 0.2, 7])[::2])
        o, lse = attention_cuda.forward(q, q, q, variant, card)
        dbias = attention_cuda.backward(o, None, q, q, q, o, lse, variant, True, card)[3]
        want_o, want_lse = attention_math.forward(q, q, q, variant)
        want = attention_math.backward(want_o, None, q, q, q, want_o, want_lse, variant, True)[3]
        assert dbias is not None
        assert want is not None
        assert dbias.dtype == dtype
        assert dbias.shape == bias.shape
        assert torch.allclose(o, want_o, atol=0.01)
        assert torch.allclose(dbias.float(), want.float(), atol=0.02)


def test_the_op_runs_it_and_autograd_knows(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path, but for the GPU: SHARDLIB_OPS, the op, its backward, the bias's gradient in its own shape."""
    monkeypatch.setenv("SHARDLIB_OPS", "attention=cuda")
    monkeypatch.setattr(attention_cuda, "find_fault", lambda *_: None)
    from shardlib.ops.attention import op

    cuda = op.BACKENDS["cuda"]._replace(find_fault=lambda *_: None, way=lambda *_: "sm_80")
    monkeypatch.setitem(op.BACKENDS, "cuda", cuda)  # type: ignore[index]
    monkeypatch.setattr(attention_cuda, "choose_card", lambda _: "sm_80")
    case = dataclasses.replace(CASES["grouped bias"], s=7, t=9)
    q, k, v, grad_o = (x.to(BF16).requires_grad_(i < 3) for i, x in enumerate(case.operands()[:4]))
    variant = cast(case.variant(), BF16)
    assert variant.bias is not None
    bias = variant.bias[0, 0].clone().requires_grad_()
    found, wanted = [], []
    for into in (found, wanted):
        o, lse = attention(q, k, v, bias=bias, causal=True)
        loss = (o * grad_o).sum() + lse.sum()
        into += [o, lse, *torch.autograd.grad(loss, (q, k, v, bias))]
        monkeypatch.setenv("SHARDLIB_OPS", "attention=math")
    assert all(
        x.shape == y.shape and torch.allclose(x, y, atol=0.1, rtol=0.02) for x, y in zip(found, wanted, strict=True)
    )
    assert not all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))  # two backends did run


def test_deterministic_algorithms_ask_for_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kernel(card: str, direction: str) -> Callable[..., None]:
        return lambda *arguments: asked.append(arguments[10:12])

    monkeypatch.setattr(attention_cuda, "get_kernel", kernel)
    q, lse = torch.zeros(1, 2, 4, 8, dtype=BF16), torch.zeros(1, 2, 4)
    variant = Variant(bias=torch.zeros(1, 1, 1, 4))
    attention_cuda.backward(q, None, q, q, q, q, lse, variant, True, "sm_80")
    with deterministic():
        attention_cuda.backward(q, None, q, q, q, q, lse, variant, True, "sm_80")
    (first, repeatable), (second, strictly) = asked
    assert (first.shape, repeatable) == ((1, 1, 1, 4), False)
    assert (second.shape, strictly) == ((1, 2, 4, 4), True)  # a place for every addend
