"""GPT-2 of transformers from a config, random weights: fused qkv, biases, learned positions, a tied head."""

from __future__ import annotations

from typing import Any

import torch

from .causal_lm import CausalLM

RULES = {"batch": "data", "heads": "tensor", "ff": "tensor", "vocab": "tensor"}


def build(
    *, layers: int = 2, d: int = 64, heads: int = 8, vocab: int = 128, seq: int = 32, seed: int = 0, **config: Any
) -> CausalLM:
    """A GPT-2 without dropout. Its Conv1D keeps weights as (in, out)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"n_layer": layers, "n_embd": d, "n_head": heads, "vocab_size": vocab, "n_positions": seq}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    module = GPT2LMHeadModel(GPT2Config(**(sizes | ends | dropout | config)))
    qkv = f"(three=3 heads={heads} hd={d // heads})"
    patterns = {
        "wte.weight": "vocab embed",
        "wpe.weight": "position embed",
        r"c_attn\.weight": f"embed {qkv}",
        r"c_attn\.bias": qkv,
        r"attn\.c_proj\.weight": "heads embed",
        r"c_fc\.weight": "embed ff",
        r"c_fc\.bias": "ff",
        r"mlp\.c_proj\.weight": "ff embed",
        r"c_proj\.bias|ln_\w+\.(weight|bias)": "embed",
    }
    return CausalLM(module, patterns)
