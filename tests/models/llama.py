"""Llama of transformers from a config, random weights: grouped keys, rotary positions, gated feed-forward."""

from __future__ import annotations

from typing import Any

import torch

from .causal_lm import CausalLM

RULES = {"batch": "data", "heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}
PATTERNS = {
    r"(embed_tokens|lm_head)\.weight": "vocab embed",
    r"q_proj\.weight": "heads embed",
    r"[kv]_proj\.weight": "kv embed",
    r"o_proj\.weight": "embed heads",
    r"(gate|up)_proj\.weight": "ff embed",
    r"down_proj\.weight": "embed ff",
    r"\w*norm\.weight": "embed",
}


def build(
    *,
    layers: int = 2,
    d: int = 64,
    heads: int = 8,
    kv_heads: int = 4,
    ff: int = 176,
    vocab: int = 128,
    seq: int = 32,
    seed: int = 0,
    **config: Any,
) -> CausalLM:
    """A Llama; under `torch.device("meta")` it takes no memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": layers, "hidden_size": d, "num_attention_heads": heads, "intermediate_size": ff}
    sizes |= {"num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": seq}
    return CausalLM(LlamaForCausalLM(LlamaConfig(**(sizes | config))), PATTERNS)


def build_70b(seq: int = 4096) -> CausalLM:
    """Llama 2 70B, 80 layers, on the meta device."""
    with torch.device("meta"):
        return build(layers=80, d=8192, heads=64, kv_heads=8, ff=28672, vocab=32000, seq=seq)
