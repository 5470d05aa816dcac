"""Models of transformers through `parallelize(model)`, nothing said: steps, tokens, directories of weights."""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import shardlib as sl
from shardlib.nn.forward import EagerWarning
from tests.validation import pretrained

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
TOKENS = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(0))
AXES: list[dict[str, int]] = [{"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 8}]


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mixtral", "qwen3_moe"])
def test_its_own_table(kind: str) -> None:
    found = pretrained.outcome(kind)
    assert found["worst"] < 1e-5, found
    assert found["gathered"] == found["whole"] == []
    assert found["cut"] > found["parameters"] / 3


def worked(model: Any, plain: Any) -> tuple[sl.Plan, float]:
    """The plan of a step, and what its devices do if each does what the one with most heads does, of what one would do
    alone."""
    with sl.Mesh(tensor=1):
        alone = sl.parallelize(copy.deepcopy(plain), {}).forward.plan(TOKENS, labels=TOKENS)
    plan = model.forward.plan(TOKENS, labels=TOKENS)
    return plan, plan.flops * plan.mesh.size / alone.flops


def share_heads(model: Any, plain: Any, *, whole: str) -> None:
    """No work is done twice, nothing called so is gathered, and a step is that of one device."""
    plan, work = worked(model, plain)
    heads, ways = plain.config.num_attention_heads, plan.mesh.size
    assert work <= math.ceil(heads / ways) * ways / heads, plan
    assert not [c for c in plan.collectives if c.kind == "all_gather" and whole in str(c)], plan
    same_step(model, plain)


def same_step(model: Any, plain: Any) -> None:
    """Loss and gradients are those of one device."""
    mine, its = model(TOKENS, labels=TOKENS).loss, plain(TOKENS, labels=TOKENS).loss
    mine.backward()
    its.backward()
    assert mine.item() == pytest.approx(its.item(), rel=1e-5)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q[1].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.long
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("heads", "kv", "ways"), [(6, 2, 4), (7, 1, 4), (14, 2, 4), (12, 4, 8), (12, 12, 8), (5, 5, 4)]
)
def test_heads_that_the_axis_does_not_divide(heads: int, kv: int, ways: int) -> None:
    """By its own table, cut flat, projections behind them would be gathered, and their products done by all."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 8 * heads, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1}
    plain = Qwen2ForCausalLM(Qwen2Config(**CONFIG.to_dict() | sizes | {"model_type": "qwen2"}))
    with sl.Mesh(tensor=ways):
        model = sl.parallelize(copy.deepcopy(plain))
    share_heads(model, plain, whole="_proj.weight")


@pytest.mark.long
def test_fused_heads_that_the_axis_does_not_divide() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6}
    plain = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=64, max_position_embeddings=32, use_cache=False))
    with sl.Mesh(tensor=4):
        model = sl.parallelize(copy.deepcopy(plain))
    assert sl.typeof(model.gpt_neox.layers[0].attention.query_key_value.weight) == "f32[(6@tensor 24), 48]"
    share_heads(model, plain, whole="attention")


@pytest.mark.long
def test_latent_heads_that_the_axis_does_not_divide() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "vocab_size": 64, "use_cache": False}
    plain = MiniCPM3ForCausalLM(MiniCPM3Config(**sizes))
    with sl.Mesh(tensor=4):
        model = sl.parallelize(copy.deepcopy(plain))
    attention = model.model.layers[0].self_attn
    assert sl.typeof(attention.kv_b_proj.weight) == "f32[(6@tensor 16), 16]"
    assert sl.typeof(attention.o_proj.weight) == "f32[48, (6@tensor 8)]"
    plan, _ = worked(model, plain)
    assert "all_gather" not in {c.kind for c in plan.collectives}, plan
    same_step(model, plain)


@pytest.mark.long
def test_heads_that_the_axis_does_not_divide_are_suggested() -> None:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 96, "n_head": 12, "vocab_size": 64, "n_positions": 32, "use_cache": False}
    plain = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0))
    table = sl.suggest(copy.deepcopy(plain).to("meta"), sl.Mesh.abstract(tensor=8), TOKENS.to("meta"))
    said = {pattern.partition(".attn.")[-1]: spec for pattern, spec in table.items()}
    assert said["c_attn.weight"] == "_ (f0=3 out@tensor f2=8)"
    assert said["c_attn.bias"] == "(f0=3 out@tensor f2=8)"
    assert said["c_proj.weight"] == "(in@tensor f1=8) _"
    with sl.Mesh(tensor=8):
        model = sl.parallelize(copy.deepcopy(plain), table)
    plan, work = worked(model, plain)
    assert work < 2 * 8 / 12, plan  # two heads of twelve on the device that has most
    assert {c.kind for c in plan.collectives} == {"all_reduce"}, plan
    same_step(model, plain)


@pytest.mark.long
@pytest.mark.filterwarnings("default::shardlib.nn.forward.EagerWarning")
def test_a_model_that_counts_its_tokens_runs_op_by_op() -> None:
    with pytest.warns(EagerWarning, match="makes a shape that depends on values, by nonzero, at .*modeling_longcat"):
        found = pretrained.outcome("longcat_flash")
    assert found["worst"] < 1e-5, found


@pytest.mark.long
@pytest.mark.sampled(3, first=1)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_cache_comes_out(axes: dict[str, int]) -> None:
    plain, model = llama(), llama()
    with sl.Mesh(axes):
        sl.parallelize(model)
    want, found, again = plain(TOKENS), model(TOKENS), model(TOKENS)
    assert again.past_key_values is not found.past_key_values
    for mine, layer in zip(found.past_key_values.layers, want.past_key_values.layers, strict=True):
        torch.testing.assert_close(whole(mine.keys), layer.keys, rtol=1e-5, atol=1e-5)
    nxt = torch.full((4, 1), 7)
    argument = "cache" if "cache" in inspect.signature(plain.forward).parameters else "past_key_values"
    one, other = (m(nxt, **{argument: x.past_key_values}).logits for m, x in ((model, found), (plain, want)))
    torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-5)


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 2},
    "static": {"cache_implementation": "static"},
    "sampled": {"do_sample": True, "top_k": 10},
}


@pytest.mark.long
@pytest.mark.sampled(9)
@pytest.mark.parametrize("axes", AXES[1:], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_generated_tokens_are_those_of_one_device(how: str, axes: dict[str, int]) -> None:
    """On one device, sampled ones are those under `global_random()`."""
    plain = llama()
    torch.manual_seed(1)
    with sl.global_random():
        want = plain.generate(TOKENS, max_new_tokens=3, **HOW[how])
    model = llama()
    with sl.Mesh(axes):
        sl.parallelize(model)
    torch.manual_seed(1)
    assert torch.equal(whole(model.generate(TOKENS, max_new_tokens=3, **HOW[how])), want)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so of every load in one process
@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_of_weights_is_read_in_pieces(tmp_path: Path, tied: bool) -> None:
    config = copy.deepcopy(CONFIG)
    config.tie_word_embeddings = tied
    plain = LlamaForCausalLM(copy.deepcopy(config)).eval()
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    with sl.Mesh(data=2, tensor=2):
        sl.materialize(sl.parallelize(model, strategy="fsdp"))
    dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    for name, x in plain.state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]), x), name
    torch.testing.assert_close(whole(model(TOKENS).logits), plain(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_directory_that_plain_transformers_reads(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    with sl.Mesh(data=2, tensor=2):
        sl.parallelize(model, strategy="fsdp")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(tmp_path / "given", state_dict=full)
    model.save_pretrained(tmp_path / "itself")
    for which in ("given", "itself"):
        back = LlamaForCausalLM.from_pretrained(tmp_path / which).state_dict()
        assert all(torch.equal(a, b) for a, b in zip(back.values(), plain.state_dict().values(), strict=True))


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    plain, model = (LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"tie_word_embeddings": True})) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    with sl.Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        model.save_pretrained(tmp_path / "placed")
    plain.save_pretrained(tmp_path / "plain")
    placed, expected = (load_file(tmp_path / which / "model.safetensors") for which in ("placed", "plain"))
    assert placed.keys() == expected.keys()
    assert all(torch.equal(placed[k], x) for k, x in expected.items())


def test_the_table_of_a_model_inside_another() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = llama(), torch.nn.Linear(64, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.model(tokens).logits)

    model = Wrapped()
    with sl.Mesh(tensor=2):
        sl.parallelize(model)
    assert sl.typeof(model.model.model.layers[0].mlp.up_proj.weight) == "f32[48@tensor, 32]"
    assert sl.typeof(model.head.weight) == "f32[1, 64]"


@pytest.mark.long
@pytest.mark.parametrize("axes", AXES)
def test_a_vocabulary_of_another_size_is_refused_as_a_whole(axes: dict[str, int]) -> None:
    with sl.Mesh(axes):
        model = sl.parallelize(llama())
        before = {k: (p, p.full_tensor()) for k, p in model.named_parameters()}
        want = model(TOKENS).logits.full_tensor()
        with pytest.raises(sl.ShardingError, match=r"other sizes runs before parallelize"):
            model.resize_token_embeddings(80)
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[k] is p and torch.equal(p.full_tensor(), was) for k, (p, was) in before.items())
        assert (model.config.vocab_size, model.lm_head.out_features) == (64, 64)
        assert torch.equal(model(TOKENS).logits.full_tensor(), want)
        model.resize_token_embeddings(64)  # nothing to do


@pytest.mark.long
@pytest.mark.parametrize("axes", AXES)
def test_a_vocabulary_of_another_size_before(axes: dict[str, int]) -> None:
    plain, model = llama(), llama()
    for m in (plain, model):
        torch.manual_seed(1)
        m.resize_token_embeddings(80, mean_resizing=False)
    with sl.Mesh(axes):
        torch.testing.assert_close(sl.parallelize(model)(TOKENS).logits.full_tensor(), plain(TOKENS).logits)
