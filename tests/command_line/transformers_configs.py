"""Configs of 20 model types of transformers, at the sizes of a published model, and tiny."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """The content of a `config.json`: `real` sizes, which `tiny` overrides, and the tokens of a sample in both.

    A model of images has no tokens: None.
    """

    kind: str
    architecture: str
    real: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    seq: tuple[int | None, int | None] = (4096, 16)

    def config(self, *, is_tiny: bool) -> dict[str, Any]:
        sizes = self.real | self.tiny if is_tiny else self.real
        return {"model_type": self.kind, "architectures": [self.architecture], **sizes}


def _decoder(
    hidden: int, inner: int, heads: int, kv_heads: int, layers: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 8192,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


_TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_hidden_layers": 4,
}
_IMAGE = {"image_size": 224, "patch_size": 16, "num_channels": 3}
_TINY_ENCODER = {
    key: _TINY[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
}

CASES = {
    "llama": Case("llama", "LlamaForCausalLM", _decoder(8192, 28672, 64, 8, 80, 128256), _TINY),
    "qwen3": Case(
        "qwen3", "Qwen3ForCausalLM", _decoder(5120, 25600, 64, 8, 64, 151936, head_dim=128), _TINY | {"head_dim": 8}
    ),
    "gemma3": Case(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _decoder(5376, 21504, 32, 16, 62, 262208, head_dim=128),
        _TINY | {"head_dim": 8},
    ),
    "mistral": Case(
        "mistral", "MistralForCausalLM", _decoder(4096, 14336, 32, 8, 32, 32768, head_dim=128), _TINY | {"head_dim": 8}
    ),
    "phi3": Case("phi3", "Phi3ForCausalLM", _decoder(5120, 17920, 40, 10, 40, 32064), _TINY),
    "gpt2": Case(
        "gpt2",
        "GPT2LMHeadModel",
        {"n_embd": 1600, "n_head": 25, "n_layer": 48, "loss_type": "ForCausalLM"},
        {"n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2},
        (1024, 16),
    ),
    "gpt_neox": Case(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "num_hidden_layers": 44,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
        },
        _TINY_ENCODER | {"vocab_size": 64},
        (2048, 16),
    ),
    "falcon": Case(
        "falcon",
        "FalconForCausalLM",
        {
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "num_hidden_layers": 60,
            "vocab_size": 65024,
            "new_decoder_architecture": True,
            "bias": False,
        },
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "num_hidden_layers": 4,
            "vocab_size": 64,
            "ffn_hidden_size": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        (2048, 16),
    ),
    "mixtral": Case(
        "mixtral",
        "MixtralForCausalLM",
        _decoder(6144, 16384, 48, 8, 56, 32768, num_local_experts=8),
        _TINY | {"num_local_experts": 4},
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _decoder(
            4096,
            12288,
            64,
            4,
            94,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
        ),
        _TINY | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _decoder(7168, 18432, 128, 128, 61, 129280, first_k_dense_replace=3),
        _TINY
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    ),
    "gpt_oss": Case(
        "gpt_oss",
        "GptOssForCausalLM",
        _decoder(2880, 2880, 64, 8, 36, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4),
        _TINY | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "t5": Case(
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "decoder_start_token_id": 0},
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "vocab_size": 64},
        (512, 16),
    ),
    "bart": Case(
        "bart",
        "BartForConditionalGeneration",
        {},
        {
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "vocab_size": 64,
            "decoder_attention_heads": 4,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        (1024, 16),
    ),
    "whisper": Case(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": 1280,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "num_mel_bins": 128,
        },
        {
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "num_mel_bins": 8,
            "vocab_size": 64,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        (448, 16),
    ),
    "bert": Case(
        "bert",
        "BertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
        _TINY_ENCODER | {"vocab_size": 64},
        (512, 16),
    ),
    "modernbert": Case(
        "modernbert",
        "ModernBertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16, "num_hidden_layers": 28},
        _TINY_ENCODER
        | {
            "vocab_size": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        (8192, 16),
    ),
    "vit": Case(
        "vit",
        "ViTForImageClassification",
        {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "num_hidden_layers": 32, **_IMAGE},
        _TINY_ENCODER | {"image_size": 32, "patch_size": 8},
        (None, None),
    ),
    "swin": Case(
        "swin",
        "SwinForImageClassification",
        {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48], "window_size": 7},
        {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 64},
        (None, None),
    ),
    "clip": Case(
        "clip",
        "CLIPModel",
        {
            "projection_dim": 768,
            "text_config": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_attention_heads": 12,
                "num_hidden_layers": 12,
            },
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
        {
            "projection_dim": 16,
            "text_config": _TINY_ENCODER | {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
            "vision_config": _TINY_ENCODER | {"image_size": 32, "patch_size": 8},
        },
        (77, 16),
    ),
}
