"""Models of `peft` through `parallelize`: a frozen base in pieces, adapters that learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import shardlib as sl
from shardlib.nn import hf_tp_plan

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
TOKENS = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1))


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj", "down_proj"]} | more)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "every linear": lambda: lora(target_modules="all-linear", bias="lora_only", use_rslora=True),
    "DoRA": lambda: lora(use_dora=True),
    "a head of its own": lambda: lora(modules_to_save=["lm_head"]),
    "tables": lambda: lora(target_modules=["embed_tokens", "o_proj"]),
    "IA3": lambda: IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": lambda: VeraConfig(r=4, target_modules=["q_proj"]),
}


def adapted(
    config: Any, *, base: torch.dtype = torch.float64, saves_activations: bool = True, tied: bool = False
) -> Any:
    """A model whose adapters do something: fresh ones are zero on one side."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"tie_word_embeddings": tied})).to(base)
    if not saves_activations:
        model.activation_checkpointing_enable()
        model.enable_input_require_grads()
    model = get_peft_model(model, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)
    return model if base is torch.bfloat16 else model.to(base)


def step(model: Any, opt: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def trained(model: Any, run: Callable[..., Tensor]) -> tuple[dict[str, Tensor], Any]:
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = {f"loss {i}": whole(run(model, opt, TOKENS)).detach() for i in range(3)}
    return losses | {n: whole(p).detach() for n, p in model.named_parameters() if p.requires_grad}, opt


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("door", ["parallelize", "jit"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_learn_as_on_one_device(kind: str, door: str) -> None:
    expected, _ = trained(adapted(ADAPTERS[kind]()), step)
    model = adapted(ADAPTERS[kind]())
    with sl.Mesh(data=2, tensor=2):
        sl.parallelize(model, strategy="fsdp")
        found, opt = trained(model, sl.jit(step) if door == "jit" else step)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    learning = [p for p in model.parameters() if p.requires_grad]
    assert all(any(p is q for q in learning) for p in opt.state), "moments of adapters alone"
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.long
def test_a_base_that_recomputes_its_activations() -> None:
    expected, _ = trained(adapted(lora()), step)
    model = adapted(lora(), saves_activations=False)
    with sl.Mesh(data=2, tensor=2):
        found, _ = trained(sl.parallelize(model, strategy="fsdp"), sl.jit(step))
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-10)


def test_adapters_are_cut_as_the_weights_that_they_stand_beside() -> None:
    with sl.Mesh(data=2, tensor=2):
        model = sl.parallelize(adapted(lora(), base=torch.float32))
    layer = "base_model.model.model.layers.0."
    found = {name.removeprefix(layer): sl.typeof(p) for name, p in model.named_parameters() if name.startswith(layer)}
    assert {name: at for name, at in found.items() if "lora" in name or "base_layer" in name} == {
        "self_attn.q_proj.base_layer.weight": "f32[32@tensor, 32]",
        "self_attn.q_proj.lora_A.default.weight": "f32[4, 32]",
        "self_attn.q_proj.lora_B.default.weight": "f32[32@tensor, 4]",
        "self_attn.v_proj.base_layer.weight": "f32[16@tensor, 32]",
        "self_attn.v_proj.lora_A.default.weight": "f32[4, 32]",
        "self_attn.v_proj.lora_B.default.weight": "f32[16@tensor, 4]",
        "mlp.down_proj.base_layer.weight": "f32[32, 64@tensor]",
        "mlp.down_proj.lora_A.default.weight": "f32[4, 64@tensor]",
        "mlp.down_proj.lora_B.default.weight": "f32[32, 4]",
    }


def test_what_else_is_in_a_module_of_the_table_is_cut_if_it_is_as_large() -> None:
    shapes = {
        "embed.weight": (64, 32), "embed.norm.weight": (32,), "head.0.weight": (64, 32), "head.0.bias": (64,),
        "head.1.weight": (64, 32), "down.base.weight": (32, 48), "down.base.bias": (32,), "down.lora_A.weight": (4, 48),
    }  # fmt: skip
    table = {"embed": "embedding_rowwise", "head": "colwise", "down": "rowwise"}
    found = hf_tp_plan.specs_of(table, {name: torch.zeros(shape) for name, shape in shapes.items()}, "tensor")
    assert {name: str(spec) for name, spec in found.items()} == {
        "embed.weight": "vocab@tensor _", "embed.norm.weight": "_", "head.0.weight": "out@tensor _",
        "head.0.bias": "out@tensor", "head.1.weight": "out@tensor _", "down.base.weight": "_ in@tensor",
        "down.base.bias": "_", "down.lora_A.weight": "_ in@tensor",
    }  # fmt: skip


@pytest.mark.long
def test_a_frozen_base_is_gathered_in_its_own_dtype_and_has_no_gradient() -> None:
    """On data alone: all that is sent of the base is its weights, once, at 2 bytes, or rows of them; of adapters, both
    ways."""
    with sl.Mesh(data=4):
        once = sl.strategies.fsdp(regather=False)
        model = sl.parallelize(adapted(lora(), base=torch.bfloat16), strategy=once)
        opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        plan = sl.jit(step).plan(model, opt, TOKENS)
    base = [p for p in model.parameters() if not p.requires_grad]
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in base} == {torch.bfloat16}
    assert {p.dtype for p in adapters} == {torch.float32}
    sent: dict[tuple[str, torch.dtype], float] = {}
    for c in plan.compiled.program.collectives:
        key = c.kind, c.source.dtype
        sent[key] = sent.get(key, 0) + c.bytes
    share = lambda ps: 3 / 4 * sum(p.numel() * p.element_size() for p in ps)
    assert sent["all_gather", torch.bfloat16] + sent.pop(("all_to_all", torch.bfloat16), 0) <= share(base)
    assert sent["all_gather", torch.float32] == share(adapters)
    assert sent["reduce_scatter", torch.float32] == share(adapters)
    others = {kind: n for (kind, dtype), n in sent.items() if dtype is torch.bfloat16 and kind != "all_gather"}
    assert sum(others.values()) < 10, "the loss, and no gradient of the base"


@pytest.mark.long
def test_what_was_learnt_is_saved_merged_and_switched_off(tmp_path: Path) -> None:
    plain, model = adapted(lora()), adapted(lora())
    with sl.Mesh(data=2, tensor=2):
        sl.parallelize(model, strategy="fsdp")
        trained(model, step)
        trained(plain, step)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        model.save_pretrained(tmp_path, state_dict=state)
        with model.disable_adapter(), plain.disable_adapter():
            torch.testing.assert_close(whole(model(TOKENS).logits), plain(TOKENS).logits)
        greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(8, 4)}
        assert torch.equal(model.generate(TOKENS[:, :4], **greedy), plain.generate(TOKENS[:, :4], **greedy))
        merged = model.merge_and_unload()
        logits = whole(merged(TOKENS).logits)
    again = PeftModel.from_pretrained(adapted(lora()).unload(), tmp_path).double()
    torch.testing.assert_close(again(TOKENS).logits, plain(TOKENS).logits, rtol=1e-5, atol=1e-6)  # from float32
    torch.testing.assert_close(logits, plain(TOKENS).logits)


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:::peft.tuners.tuners_utils", "ignore:::peft.utils.save_and_load")  # of tied tables
@pytest.mark.parametrize("name", ["LoRA", "tables", "a head of its own"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_a_placed_model_is_saved_and_merged_as_it_is(name: str, tied: bool, tmp_path: Path) -> None:
    """Plain tensors come out, of the adapters alone, and tied weights stay one."""
    plain, model = (adapted(ADAPTERS[name](), tied=tied) for _ in range(2))
    with sl.Mesh(data=2, tensor=2):
        sl.parallelize(model, strategy="fsdp")
        model.save_pretrained(tmp_path / "placed")
        plain.save_pretrained(tmp_path / "plain")
        files = [load_file(tmp_path / which / "adapter_model.safetensors") for which in ("placed", "plain")]
        assert files[0].keys() == files[1].keys()
        assert all(type(x) is Tensor and torch.equal(x, files[1][k]) for k, x in files[0].items())
        assert all(isinstance(p, sl.ShardedTensor) for p in model.parameters()), "what is saved stays where it is"
        merged, expected = model.merge_and_unload(), plain.merge_and_unload()
        ends = [[m.get_input_embeddings().weight, m.get_output_embeddings().weight] for m in (merged, expected)]
        assert (ends[0][0] is ends[0][1]) == (ends[1][0] is ends[1][1])
        state = merged.state_dict()
        for k, x in expected.state_dict().items():
            torch.testing.assert_close(whole(state[k]), x, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(whole(merged(TOKENS).logits), expected(TOKENS).logits, rtol=1e-5, atol=1e-6)


def test_a_table_that_finds_no_weight_is_refused() -> None:
    model = adapted(lora())
    model.base_model.model.tp_plan = {"layers.*.no_such": "colwise"}
    with sl.Mesh(data=2, tensor=2), pytest.raises(sl.ShardingError) as caught:
        sl.parallelize(model)
    assert "nothing says which weights 'tensor' shards: no weight is in its tp_plan" in str(caught.value)
