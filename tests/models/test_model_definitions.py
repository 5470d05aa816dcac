"""The models of the tests are what they say: W1 is a Llama, its two steps agree, and every parameter has a spec."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.models import causal_lm, gpt2, llama, w1

SMALL = w1.Config(layers=2, d=32, heads=4, kv_heads=2, ff=48, vocab=64, batch=2, seq=16, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_functional_step_is_the_eager_step() -> None:
    params, batch = w1.init(SMALL), w1.batch(SMALL)
    eager = w1.Eager(params, SMALL)
    for _ in range(3):
        value, params = w1.step(params, *batch, SMALL)
        close(value, eager.step(*batch))
    for p, q in zip(pytree.tree_leaves(params), pytree.tree_leaves(eager.params), strict=True):
        close(p, q.detach())


def test_every_dtype_starts_from_the_same_numbers() -> None:
    half = w1.init(SMALL.with_(dtype=torch.float32))
    for p, q in zip(pytree.tree_leaves(half), pytree.tree_leaves(w1.init(SMALL)), strict=True):
        assert torch.equal(p, q.float())


def test_residual_hook_sees_the_embedding_and_every_sum() -> None:
    seen: list[torch.Size] = []

    def residual(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x

    w1.loss(w1.init(SMALL), *w1.batch(SMALL), SMALL, residual)
    assert seen == [torch.Size((2, 16, 32))] * (1 + 2 * SMALL.layers)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", ["dp8", "tp", "tp_sp", "fsdp8", "fsdp_tp"])
def test_modes_have_a_spec_for_every_dim(name: str, devices: int) -> None:
    mode = w1.modes(SMALL, devices)[name]
    shapes = pytree.tree_map(lambda p: p.dim(), w1.init(SMALL))
    assert pytree.tree_map(lambda spec: len(spec.split()), mode.params) == shapes
    assert torch.tensor(list(mode.axes.values())).prod() == devices


def test_abstract_has_the_shapes_of_init() -> None:
    params, tokens, targets = w1.abstract(SMALL)
    real = (w1.init(SMALL), *w1.batch(SMALL))
    for a, b in zip(pytree.tree_leaves((params, tokens, targets)), pytree.tree_leaves(real), strict=True):
        assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "meta")


@pytest.mark.peer
def test_w1_is_llama() -> None:
    pytest.importorskip("transformers")
    c = SMALL
    sizes = {"layers": c.layers, "d": c.d, "heads": c.heads, "kv_heads": c.kv_heads, "ff": c.ff, "vocab": c.vocab}
    module = llama.build(**sizes, seq=c.seq, rms_norm_eps=c.eps).module.to(c.dtype)
    params, (tokens, targets) = w1.init(c), w1.batch(c)
    ours = {"attention_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}
    ours |= {f"w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
    ours |= {"w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj"}
    state = {"model.embed_tokens": params["embedding"], "model.norm": params["norm"], "lm_head": params["head"]}
    for i, layer in enumerate(params["layers"]):
        state |= {f"model.layers.{i}.{ours[name]}": weight for name, weight in layer.items()}
    module.load_state_dict({f"{name}.weight": weight for name, weight in state.items()})
    logits = module(input_ids=tokens, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    # transformers keeps the rotary angles in float32.
    torch.testing.assert_close(w1.loss(params, tokens, targets, c), expected, rtol=1e-6, atol=0)


@pytest.mark.peer
@pytest.mark.parametrize("build", [gpt2.build, llama.build])
def test_functional_step_of_transformers(build: Callable[[], causal_lm.CausalLM]) -> None:
    pytest.importorskip("transformers")
    lm = build()
    tokens, params = causal_lm.tokens(128, 4, 32), lm.params()
    assert lm.specs().keys() == params.keys()
    value, new = lm.step(params, tokens)
    expected = lm.module(input_ids=tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    for name, p in lm.module.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(new[name], p.detach() - causal_lm.LEARNING_RATE * p.grad)
