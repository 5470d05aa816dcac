"""shardlib on one GPU: the op through the dispatcher, streams and CUDA graphs, and programs on CUDA meshes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh
from shardlib.ops import tuning
from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.attention.op import Variant, attention, choose
from tests.ops.attention.attention_cases import CASES, cast
from tests.validation.gpu.kernels import find

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention by cuda/, which a machine with a GPU has to be able to build."""
    kernels = find()
    assert not isinstance(kernels, str), kernels
    monkeypatch.setenv("SHARDLIB_OPS", "attention=cuda")
    yield
    torch.cuda.synchronize()


def _operands(name: str = "grouped") -> tuple[list[Tensor], dict[str, object]]:
    case = CASES[name]
    tensors = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in case.operands()[:3]]
    how = cast(case.variant(), torch.bfloat16, DEVICE)._asdict()
    return tensors, how


def _results(tensors: list[Tensor], how: dict[str, object]) -> list[Tensor]:
    o, lse = attention(*tensors, **how)  # type: ignore[arg-type]
    return [o.detach(), lse.detach(), *torch.autograd.grad(o.square().sum() + lse.exp().sum(), tensors)]


def test_it_says_what_runs(own_kernels: None) -> None:
    q = torch.zeros(1, 2, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    way = "sm_90a" if torch.cuda.get_device_capability() == (9, 0) else "sm_80"
    assert str(choose(q, q, Variant())) == f"cuda/{way}: shardlib's own kernel"


def test_what_runs_unasked_has_been_measured() -> None:
    q = torch.zeros(1, 2, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    slower = tuning.find_speed_fault(torch.cuda.get_device_name(), 64, general=False, grouped=False)
    assert choose(q, q, Variant()).backend == ("torch" if slower else "cuda")


@pytest.mark.parametrize("name", ["grouped", "everything", "head 112", "nothing to see"])
def test_forward_and_backward_through_the_op(name: str, own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, how = _operands(name)
    found = _results(tensors, how)
    monkeypatch.setenv("SHARDLIB_OPS", "attention=math")
    for x, want in zip(found, _results(tensors, how), strict=True):
        assert torch.allclose(x, want, atol=0.1, rtol=0.05)


def test_another_stream(own_kernels: None) -> None:
    tensors, how = _operands()
    want = _results(tensors, how)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = _results(tensors, how)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found[0], want[0])
    assert all(torch.allclose(x, y, atol=0.1, rtol=0.05) for x, y in zip(found, want, strict=True))


def test_in_a_cuda_graph(own_kernels: None) -> None:
    q, k, v = (x.detach() for x in _operands()[0])
    variant = Variant(causal=True, scale=0.125)
    once = functools.partial(attention_cuda.forward, q, k, v, variant)
    want = once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = once()
        dq, dk, dv, _ = attention_cuda.backward(o, None, q, k, v, o, lse, variant, False)
    for x in (o, lse, dq, dk, dv):
        x.fill_(float("nan"))
    graph.replay()
    assert torch.equal(o, want[0])
    assert torch.equal(lse, want[1])
    assert not any(x.isnan().any() for x in (dq, dk, dv))


# --- programs ---------------------------------------------------------------------------------------------------------


def _block(x: Tensor, w_qkv: Tensor, w_out: Tensor) -> Tensor:
    """Attention between two projections: x [B, S, E], 4 heads."""
    q, k, v = (y.unflatten(2, (4, -1)).transpose(1, 2) for y in (x @ w_qkv).chunk(3, 2))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (o.transpose(1, 2).flatten(2) @ w_out).square().mean()


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 2, "tensor": 2}])
def test_a_program_on_virtual_gpus_is_the_program(axes: dict[str, int]) -> None:
    x, w_qkv, w_out = (torch.randn(shape, device=DEVICE) for shape in ((4, 8, 32), (32, 96), (32, 32)))
    leaves = [w.clone().requires_grad_() for w in (w_qkv, w_out)]
    loss = _block(x, *leaves)
    want = torch.autograd.grad(loss, leaves)
    with Mesh(**axes, device=DEVICE, rules={"batch": "data"}):  # type: ignore[arg-type]
        step = sl.jit(
            sl.value_and_grad(_block, argnums=(1, 2)), in_specs=("batch seq embed", "embed wide", "wide embed")
        )
        found, grads = step(x, w_qkv, w_out)
    assert torch.allclose(found.full_tensor(), loss.detach(), rtol=1e-3)
    for grad, other in zip(grads, want, strict=True):
        assert grad.full_tensor().device.type == DEVICE
        assert torch.allclose(grad.full_tensor(), other, atol=1e-4, rtol=1e-2)
