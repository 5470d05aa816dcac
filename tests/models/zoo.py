"""Families of transformers' models beside GPT-2 and Llama, tiny, with random weights and no dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .causal_lm import CausalLM

RULES = {"batch": "data", "heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}
LAYERS, D, HEADS, FF, VOCAB, SEQ = 2, 32, 8, 48, 64, 16

_QKV = f"(heads={HEADS} three=3 hd={D // HEADS})"  # as GPT-NeoX and BLOOM order them
_REST = {r"\w*(norm|ln_\w+|layernorm|LayerNorm)\w*\.(weight|bias)": "embed"}
_LLAMA = {
    r"(embed_tokens|lm_head)\.weight": "vocab embed",
    r"q_proj\.weight": "heads embed",
    r"q_proj\.bias": "heads",
    r"[kv]_proj\.weight": "kv embed",
    r"[kv]_proj\.bias": "kv",
    r"o_proj\.weight": "embed heads",
    r"(gate|up)_proj\.weight": "ff embed",
    r"down_proj\.weight": "embed ff",
    r"mlp\.gate\.weight": "expert embed",
    r"experts\.gate_up_proj": f"expert (two=2 ff={FF}) embed",
    r"experts\.down_proj": "expert embed ff",
}
_OSS = {
    r"sinks": "heads",
    r"o_proj\.bias": "embed",
    r"router\.weight": "expert embed",
    r"router\.bias": "expert",
    r"experts\.gate_up_proj": f"expert embed (ff={FF} two=2)",
    r"experts\.gate_up_proj_bias": f"expert (ff={FF} two=2)",
    r"experts\.down_proj": "expert ff embed",
    r"experts\.down_proj_bias": "expert embed",
}
_DEEPSEEK = {
    r"q_a_proj\.weight": "lora embed",
    r"kv_a_proj_with_mqa\.weight": "lora embed",
    r"(q_b|kv_b)_proj\.weight": "heads lora",
}
_NEOX = {
    r"(embed_in|lm_head|word_embeddings)\.weight": "vocab embed",
    r"query_key_value\.weight": f"{_QKV} embed",
    r"query_key_value\.bias": _QKV,
    r"(self_)?attention\.dense\.weight": "embed heads",
    r"dense_h_to_4h\.weight": "ff embed",
    r"dense_h_to_4h\.bias": "ff",
    r"dense_4h_to_h\.weight": "embed ff",
    r"(dense|dense_4h_to_h)\.bias": "embed",
}
_GPT = {
    r"wte\.weight": "vocab embed",
    r"wpe\.weight": "position embed",
    r"lm_head\.weight": "vocab embed",
    r"lm_head\.bias": "vocab",
    r"[qkv]_proj\.weight": "heads embed",
    r"out_proj\.weight": "embed heads",
    r"(fc_in|c_fc)\.weight": "ff embed",
    r"(fc_in|c_fc)\.bias": "ff",
    r"(fc_out|c_proj)\.weight": "embed ff",
    r"(out_proj|fc_out|c_proj)\.bias": "embed",
}
_BERT = {
    r"word_embeddings\.weight": "vocab embed",
    r"(position|token_type)_embeddings\.weight": "position embed",
    r"(query|key|value)\.weight": "heads embed",
    r"(query|key|value)\.bias": "heads",
    r"attention\.output\.dense\.weight": "embed heads",
    r"intermediate\.dense\.weight": "ff embed",
    r"intermediate\.dense\.bias": "ff",
    r"layer\.\d+\.output\.dense\.weight": "embed ff",
    r"(predictions|lm_head)\.bias": "vocab",
    r"(transform|lm_head)\.dense\.weight": "out embed",
    r"(output|transform|lm_head)\.dense\.bias": "embed",
}
_T5 = {
    r"(shared|lm_head)\.weight": "vocab embed",
    r"[qkv]\.weight": "heads embed",
    r"o\.weight": "embed heads",
    r"relative_attention_bias\.weight": "bucket all",
    r"wi\.weight": "ff embed",
    r"wo\.weight": "embed ff",
}

_MODERN = {"num_hidden_layers": LAYERS, "hidden_size": D, "num_attention_heads": HEADS, "intermediate_size": FF}
_MODERN |= {"vocab_size": VOCAB, "max_position_embeddings": SEQ}
_GROUPED = _MODERN | {"num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}  # torch's grouped product has no float64
_OLD = {"n_layer": LAYERS, "n_embd": D, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": SEQ}
_OLD |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
_ENCODER = _MODERN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}


@dataclass(frozen=True)
class Family:
    """A model class of transformers, its configuration, specs by the ends of its parameters' names."""

    cls: str
    config: str
    sizes: dict[str, Any]
    patterns: dict[str, str]
    keywords: tuple[tuple[str, object], ...] = (("use_cache", False),)


FAMILIES = {
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", _OLD | {"rotary_dim": 2}, _GPT),
    "gptneo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"num_layers": LAYERS, "hidden_size": D, "num_heads": HEADS, "vocab_size": VOCAB, "window_size": 4}
        | {"max_position_embeddings": SEQ, "attention_types": [[["global", "local"], 1]], "bos_token_id": 0}
        | {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0, "eos_token_id": 0},
        _GPT,
    ),
    "gptneox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _MODERN | {"rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        _NEOX,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"n_layer": LAYERS, "hidden_size": D, "n_head": HEADS, "vocab_size": VOCAB}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        _NEOX,
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", _ENCODER, _BERT, ()),
    "roberta": Family(
        "RobertaForMaskedLM", "RobertaConfig", _ENCODER | {"max_position_embeddings": SEQ + 4}, _BERT, ()
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": LAYERS, "d_model": D, "num_heads": HEADS, "d_kv": D // HEADS, "d_ff": FF, "vocab_size": VOCAB}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8},
        _T5,
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", _GROUPED | {"head_dim": 4}, _LLAMA),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", _GROUPED | _EXPERTS | {"num_local_experts": 4}, _LLAMA
    ),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _GROUPED | _EXPERTS | {"head_dim": 4, "num_experts": 4, "moe_intermediate_size": FF},
        _LLAMA,
    ),
    "gptoss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        _GROUPED | _EXPERTS | {"head_dim": 4, "num_local_experts": 4, "sliding_window": 4},
        _LLAMA | _OSS,
    ),
    "deepseek3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _MODERN | _EXPERTS | {"num_key_value_heads": HEADS, "n_routed_experts": 4, "moe_intermediate_size": FF}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
        _LLAMA | _DEEPSEEK,
    ),
}  # fmt: skip


def build(name: str, seed: int = 0, **config: Any) -> CausalLM:
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(seed)
    made = getattr(transformers, family.config)(**(family.sizes | config))
    module = getattr(transformers, family.cls)(made).train()
    with torch.no_grad():  # biases start at 0 and norms at 1, where mistakes hide
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p) if p.dim() == 1 else 0.0)
    return CausalLM(module, _REST | family.patterns, dict(family.keywords))
