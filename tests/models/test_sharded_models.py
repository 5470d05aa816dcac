"""Whole models, sharded against one device: GPT-2, Llama, a GPT by hand in many forms, and ten more families.

A step returns the loss, the gradients, and what an optimizer makes of the parameters; all must agree.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.core.context import single_device
from shardlib.jit.global_random import plain_program
from tests.models import gpt, gpt2, llama, zoo
from tests.models.causal_lm import CausalLM, Params

MESHES = {"8": {"data": 8}, "2x4": {"data": 2, "tensor": 4}, "2x2x2": {"data": 2, "seq": 2, "tensor": 2}}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
Loss = Callable[[Params, Any], Tensor]
Step = Callable[..., Any]


# The harness ----------------------------------------------------------------------------------------------------------


def by_func(loss: Loss, params: Params, batch: Any) -> tuple[Params, Tensor]:
    grads, value = torch.func.grad_and_value(loss)(params, batch)
    return grads, value


def by_autograd(loss: Loss, params: Params, batch: Any) -> tuple[Params, Tensor]:
    """For models with an autograd.Function that torch.func cannot take."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    value = loss(leaves, batch)
    grads = torch.autograd.grad(value, list(leaves.values()))
    return dict(zip(leaves, grads, strict=True)), value.detach()


def sgd(grads: Params, params: Params, state: Any) -> tuple[Params, Any]:
    return {name: p - 0.1 * grads[name] for name, p in params.items()}, state


def adamw(grads: Params, params: Params, state: Any) -> tuple[Params, Any]:
    moments = {name: (0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g) for (name, (m, v)), g in _zip(state, grads)}
    new = {
        name: p * (1 - 1e-3) - 1e-2 * (m / 0.1) / ((v / 0.05).sqrt() + 1e-8)
        for (name, p), (m, v) in _zip(params, moments)
    }
    return new, moments


def _zip(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[tuple[str, Any], Any]]:
    return [((name, x), b[name]) for name, x in a.items()]


def make_step(loss: Loss, update: Any = sgd, differentiate: Any = by_func) -> Step:
    def step(params: Params, state: Any, batch: Any) -> Any:
        grads, value = differentiate(loss, params, batch)
        return value, grads, *update(grads, params, state)

    return step


def compare(
    step: Step,
    params: Params,
    batch: Mapping[str, Tensor],
    axes: Mapping[str, int],
    specs: Mapping[str, str | None],
    *,
    rules: Mapping[str, str],
    batch_spec: str = "batch seq",
    state: Mapping[str, Any] | None = None,
) -> sl.Plan:
    """Run `step` on one device and sharded, compare every leaf, and hand back the plan."""
    dtype, state = next(iter(params.values())).dtype, state or {}
    rules = {name: axis for name, axis in rules.items() if axis in axes}
    with single_device():
        expected = step(params, state, batch)
    state_specs = {name: (specs[name], specs[name]) for name in state}
    with Mesh(**axes, rules=rules):
        sharded = sl.jit(
            step,
            in_specs=(dict(specs), state_specs, dict.fromkeys(batch, batch_spec)),
            out_specs=(None, dict(specs), dict(specs), state_specs),
        )
        plan: sl.Plan = sharded.plan(params, state, batch)
        found = sharded(params, state, batch)
    assert not plan.replicated_ops
    largest = max(float(g.abs().max()) for g in expected[1].values())
    wrong = []
    for (path, one), many in zip(pytree.tree_leaves_with_path(expected), pytree.tree_leaves(found), strict=True):
        whole = many.full_tensor()
        # A gradient that is zero but for rounding (of a bias before a softmax, say) is measured against the others.
        scale = max(float(one.abs().max()), 1e-3 * largest if path[0].idx == 1 else 0.0)
        error = float((one - whole).abs().max()) / (scale or 1.0)
        if not (error <= TOLERANCE[dtype] and one.shape == whole.shape and one.dtype == whole.dtype):
            wrong.append(f"{pytree.keystr(path)}: {error:.1e}")
    assert not wrong, "\n".join(wrong)
    return plan


def moments(params: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """AdamW's state some steps in: at zero, what it does to a small gradient is all rounding."""
    return {name: (torch.zeros_like(p), torch.full_like(p, 1e-4)) for name, p in params.items()}


def fsdp(specs: Mapping[str, str], params: Params) -> dict[str, str]:
    """Dim 0 of every weight on `data`."""
    return {name: " ".join(["_@data", *["_"] * (params[name].dim() - 1)]) for name in specs}


def batch_of(vocab: int, seq: int = 16, size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(2, vocab, (size, seq), generator=generator) for _ in range(2))
    return {"input_ids": tokens, "labels": labels.masked_fill(labels % 5 == 0, -100)}


# GPT-2 and Llama ------------------------------------------------------------------------------------------------------

BUILD = {"gpt2": (gpt2.build, gpt2.RULES), "llama": (llama.build, llama.RULES)}


@functools.cache
def built(name: str, **sizes: Any) -> CausalLM:
    pytest.importorskip("transformers")
    lm = BUILD[name][0](d=32, seq=16, **{"layers": 1, "vocab": 64} | sizes)
    with torch.no_grad():
        for p in lm.module.parameters():
            p.add_(0.1 * torch.randn_like(p) if p.dim() == 1 else 0.0)
    return lm


def cast(params: Params, dtype: torch.dtype) -> Params:
    return {name: p.to(dtype) for name, p in params.items()}


@pytest.mark.long
@pytest.mark.sampled(11, first=1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", BUILD)
def test_weights_and_batch(name: str, mesh: str) -> None:
    lm = built(name, layers=2)
    params = cast(lm.params(), torch.float64)
    plan = compare(make_step(lm.loss), params, batch_of(64), MESHES[mesh], lm.specs(), rules=BUILD[name][1])
    kinds = {c.kind for c in plan.collectives}
    assert kinds <= {"all_reduce", "all_gather", "reduce_scatter"}
    assert sum(c.kind == "all_gather" for c in plan.collectives) <= 1  # the small table of embeddings


@pytest.mark.long
@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # the old name, which every version has
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", BUILD)
def test_gradient_checkpointing(name: str, reentrant: bool, inside: bool) -> None:
    model = copy.deepcopy(built(name).module).double().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    tokens = batch_of(64)["input_ids"]

    def loss(tokens: Tensor) -> Tensor:
        value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if inside:
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach() if inside else value

    def grads(run: Any, program: Any = nullcontext) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        torch.manual_seed(1)
        with program():
            value = run(tokens)
            if not inside:
                value.backward()
        return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    with single_device():
        one, expected = grads(loss, plain_program)
    with Mesh(data=2, tensor=4, rules=RULE):
        many, found = grads(sl.jit(loss, in_specs=("batch seq",)))
    torch.testing.assert_close(many.full_tensor(), one)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-8, rtol=1e-8)


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", BUILD)
def test_sequence_cut_and_adamw(name: str, mesh: str) -> None:
    lm, axes = built(name), MESHES[mesh]
    params = cast(lm.params(), torch.float64)
    where = "seq" if "seq" in axes else "tensor" if "tensor" in axes else "data"
    rules = {n: axis for n, axis in BUILD[name][1].items() if n != "batch" or where != "data"}
    step = make_step(lm.loss, adamw)
    spec = f"batch seq@{where}"
    compare(step, params, batch_of(64), axes, lm.specs(), rules=rules, batch_spec=spec, state=moments(params))


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("name", BUILD)
def test_every_weight_on_data(name: str, mesh: str) -> None:
    lm = built(name)
    params = cast(lm.params(), torch.float64)
    specs = fsdp(lm.specs(), params)
    compare(make_step(lm.loss, adamw), params, batch_of(64), MESHES[mesh], specs, rules=RULE, state=moments(params))


RULE = {"batch": "data"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUILD)
def test_batch_alone(name: str) -> None:
    lm = built(name)
    params = cast(lm.params(), torch.float64)
    specs = dict.fromkeys(lm.specs())
    plan = compare(make_step(lm.loss), params, batch_of(64), MESHES["8"], specs, rules=RULE)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    assert len(plan.collectives) == len(params) + 2  # gradients, the sum of losses and their count


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUILD)
def test_single_precision_and_uneven_sizes(name: str) -> None:
    """A vocabulary, a feed-forward and a batch that no axis divides."""
    lm = built(name, vocab=131, **({"ff": 83} if name == "llama" else {"n_inner": 83}))
    batch = batch_of(131, size=7)
    params = cast(lm.params(), torch.float32)
    compare(make_step(lm.loss), params, batch, MESHES["2x4"], lm.specs(), rules=BUILD[name][1])
    params = cast(lm.params(), torch.float64)
    compare(make_step(lm.loss), params, batch, MESHES["8"], fsdp(lm.specs(), params), rules=RULE)


@pytest.mark.long
@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("name", BUILD)
def test_padding_and_eager_attention(name: str) -> None:
    lm = built(name, attn_implementation="eager")
    params = cast(lm.params(), torch.float64)
    batch = batch_of(64)
    batch["attention_mask"] = (torch.arange(16) < torch.arange(9, 17)[:, None]).long()
    compare(make_step(lm.loss), params, batch, MESHES["2x4"], lm.specs(), rules=BUILD[name][1])


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUILD)
def test_logits_stay_cut(name: str) -> None:
    """With a vocabulary of real size nothing of the logits' size moves."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        lm = BUILD[name][0](d=512, vocab=50304, seq=256)
    params, rules = lm.params(), BUILD[name][1]
    tokens = torch.empty(64, 256, dtype=torch.int64, device="meta")
    with Mesh.abstract(data=2, tensor=4, rules=rules):
        plan = sl.jit(lm.step, in_specs=(lm.specs(), "batch seq"), out_specs=(None, lm.specs())).plan(params, tokens)
    assert not plan.replicated_ops
    assert {c.kind for c in plan.collectives} <= {"all_reduce", "all_gather", "reduce_scatter"}
    residual = 64 // 2 * 256 * 512 * 4
    assert max(c.bytes for c in plan.collectives) <= 2 * residual
    sums = [c for c in plan.collectives if c.axes == ("tensor",) and c.bytes >= residual]
    assert len(sums) <= 4 * 2 + 2


# A GPT in many forms --------------------------------------------------------------------------------------------------

FORMS = {
    "fused": gpt.GPT(),
    "explicit": gpt.GPT(attention="explicit"),
    "gqa": gpt.GPT(kv_heads=4, grouped="gqa"),
    "repeat": gpt.GPT(kv_heads=4, grouped="repeat"),
    "repeat explicit": gpt.GPT(kv_heads=4, grouped="repeat", attention="explicit"),
    "few keys": gpt.GPT(kv_heads=2, grouped="gqa"),
}


def text(form: gpt.GPT, *, padded: bool) -> dict[str, Tensor]:
    batch = batch_of(form.vocab, form.seq)
    out = {"tokens": batch["input_ids"], "labels": batch["labels"]}
    if padded:
        out["padding"] = (torch.arange(form.seq) < torch.arange(9, 17)[:, None]).long()
    return out


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize(("padded", "where"), [(False, "batch seq"), (True, "batch seq@tensor")])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, padded: bool, where: str) -> None:
    model = FORMS[form]
    step = make_step(model.loss, adamw if padded else sgd)
    params, batch = model.params(), text(model, padded=padded)
    state = moments(params) if padded else None
    compare(step, params, batch, MESHES["2x4"], model.specs(), rules=gpt.RULES, batch_spec=where, state=state)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", "2x2x2"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_on_other_meshes(form: str, mesh: str) -> None:
    model = FORMS[form]
    params, batch = model.params(), text(model, padded=True)
    for specs in (model.specs(), fsdp(model.specs(), params)):
        compare(make_step(model.loss), params, batch, MESHES[mesh], specs, rules=gpt.RULES)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["2x4", "2x2x2"])
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_dropout_drops_what_it_drops_on_one_device(attention: str, mesh: str) -> None:
    model = gpt.GPT(layers=1, attention=attention, dropout=0.1)
    params, batch = model.params(), text(model, padded=False)
    with Mesh(MESHES[mesh], rules=gpt.RULES):
        sl.check(make_step(model.loss), params, None, batch, in_specs=(model.specs(), None, "batch seq"), rtol=1e-4)
        plan = sl.jit(make_step(model.loss), in_specs=(model.specs(), None, "batch seq")).plan(params, None, batch)
    assert sum(c.value.startswith("call_key") for c in plan.collectives) == 1


def test_dropout_of_nothing_passes() -> None:
    with Mesh(data=2):
        step = sl.jit(lambda x: F.dropout(F.dropout(x, 0.0), 0.5, training=False), in_specs=("_@data",))
        assert torch.equal(step(torch.ones(4)).full_tensor(), torch.ones(4))


def test_attention_by_torchs_own_kernel_draws_nothing() -> None:
    """With an odd size of v attention is not caught whole; torch's kernel for the CPU hands no state on."""
    q, v = torch.randn(2, 4, 8, 4), torch.randn(2, 4, 8, 6)
    with Mesh(data=2):
        sharded = sl.jit(lambda q, v: F.scaled_dot_product_attention(q, q, v), in_specs=("b@data _ _ _",) * 2)
        torch.testing.assert_close(sharded(q, v).full_tensor(), F.scaled_dot_product_attention(q, q, v))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for p, draws in ((0.0, False), (0.1, True)):
            plan = sl.jit(lambda q, p=p: flash(q, q, q, p)[0]).plan
            if draws:
                with pytest.raises(ShardingError, match="draws random numbers by ops that cannot be sharded"):
                    plan(q)
            else:
                plan(q)


# Other families -------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("how", ["weights", "fsdp", "seq"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_families(name: str, mesh: str, how: str) -> None:
    pytest.importorskip("transformers")
    lm, axes = _family(name), MESHES[mesh]
    params = cast(lm.params(), torch.float64)
    batch = batch_of(zoo.VOCAB, zoo.SEQ)
    if how == "seq":
        batch["attention_mask"] = (torch.arange(16) < torch.arange(9, 17)[:, None]).long()
    where = "seq" if "seq" in axes else "tensor" if "tensor" in axes else "data"
    spec = f"batch seq@{where}" if how == "seq" else "batch seq"
    rules = {n: axis for n, axis in zoo.RULES.items() if n != "batch" or how != "seq" or where != "data"}
    specs = fsdp(lm.specs(), params) if how == "fsdp" else lm.specs()
    step = make_step(lm.loss, differentiate=by_autograd)
    compare(step, params, batch, axes, specs, rules=rules, batch_spec=spec)


@functools.cache
def _family(name: str, **config: Any) -> CausalLM:
    return zoo.build(name, **config)


@pytest.mark.peer
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "gptoss", "deepseek3"])
def test_grouped_products_of_experts(name: str, mesh: str) -> None:
    pytest.importorskip("transformers")
    lm = _family(name, experts_implementation="grouped_mm")
    step = make_step(lm.loss, differentiate=by_autograd)
    compare(step, lm.params(), batch_of(zoo.VOCAB, zoo.SEQ), MESHES[mesh], lm.specs(), rules=zoo.RULES)


EXPERTS = {"4": {"expert": 4}, "2x2": {"data": 2, "expert": 2}, "2x2x2": {"data": 2, "expert": 2, "tensor": 2}}


@pytest.mark.peer
@pytest.mark.parametrize("mesh", EXPERTS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "gptoss", "deepseek3"])
def test_experts_stay_where_they_are(name: str, mesh: str) -> None:
    """Of rows, their sum is taken once a layer forward and once backward; no expert's weights are gathered."""
    pytest.importorskip("transformers")
    lm = _family(name, experts_implementation="grouped_mm")
    step = make_step(lm.loss, differentiate=by_autograd)
    rules, params, batch = {**zoo.RULES, "expert": "expert"}, lm.params(), batch_of(zoo.VOCAB, zoo.SEQ)
    plan = compare(step, params, batch, EXPERTS[mesh], lm.specs(), rules=rules)
    moved = [str(c) for c in plan.collectives]
    assert not [c for c in moved if c.startswith("all_gather") and re.search(r"experts\.(gate_up|down)_proj\[", c)]
    tokens = 8 * zoo.SEQ * zoo.D * 4
    if mesh == "4":
        large = [c for c in plan.collectives if c.bytes >= tokens]
        assert len(large) == 2 * (zoo.LAYERS - (name == "deepseek3")), moved  # whose first layer is dense
