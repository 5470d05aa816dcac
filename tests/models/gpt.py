"""A small GPT written by hand, with the choices that programs differ in: how attention is written, what is masked.

Shapes: B batch, S sequence, D model, H query heads, K key and value heads, E elements a head, F feed-forward,
V vocabulary. Queries, keys and values come out of one matrix and are split; positions are learned; the head is tied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .causal_lm import Params

RULES = {"batch": "data", "heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}


@dataclass(frozen=True)
class GPT:
    """Sizes and choices.

    * `attention`: "fused" (torch's op), "explicit" (the softmax written out).
    * `grouped`: fewer keys than queries: "gqa" (torch's own), "repeat" (keys repeated).
    * `dropout`: the layers are there; the probability must be 0 in a sharded program.
    """

    layers: int = 2
    d: int = 32
    heads: int = 8
    kv_heads: int = 8
    ff: int = 80
    vocab: int = 64
    seq: int = 16
    attention: str = "fused"
    grouped: str = ""
    dropout: float = 0.0

    @property
    def head_size(self) -> int:
        return self.d // self.heads

    def specs(self) -> dict[str, str]:
        """A spec for every parameter, in logical names."""
        e = self.head_size
        qkv = f"(three=3 heads={self.heads} hd={e})"
        layer = {"norm1": "embed", "bias1": "embed", "norm2": "embed", "bias2": "embed", "out": "heads embed"}
        layer |= {"up": "embed ff", "up_bias": "ff", "down": "ff embed", "down_bias": "embed"}
        if self.kv_heads == self.heads:
            layer |= {"qkv": f"embed {qkv}", "qkv_bias": qkv}
        else:
            layer |= {"q": "embed heads", "kv": f"embed (two=2 kv={self.kv_heads} hd={e})"}
        table = {"tokens": "vocab embed", "positions": "position embed", "norm": "embed", "bias": "embed"}
        return table | {f"{i}.{name}": spec for i in range(self.layers) for name, spec in layer.items()}

    def params(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Params:
        generator = torch.Generator().manual_seed(seed)
        d, e, kv = self.d, self.head_size, self.kv_heads * self.head_size
        sizes = {"tokens": (self.vocab, d), "positions": (self.seq, d), "qkv": (d, 3 * d), "qkv_bias": (3 * d,)}
        sizes |= {"q": (d, self.heads * e), "kv": (d, 2 * kv), "out": (d, d), "up": (d, self.ff), "down": (self.ff, d)}
        sizes |= {"up_bias": (self.ff,)}

        def draw(name: str) -> Tensor:
            shape = sizes.get(name, (d,))
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            return (noise / math.sqrt(d) + (1.0 if name.startswith("norm") else 0.0)).to(dtype)

        return {name: draw(name.split(".")[-1]) for name in self.specs()}

    def loss(self, params: Params, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy; `batch` holds tokens (B, S), labels (B, S; -100: none), maybe `padding` (B, S; 0: no
        token).
        """
        tokens = batch["tokens"]
        mask = _causal(self.seq, tokens.device)
        if "padding" in batch:
            mask = mask & (batch["padding"][:, None, None, :] != 0)
        x = F.embedding(tokens, params["tokens"]) + params["positions"]
        for i in range(self.layers):
            layer = {name.split(".")[1]: p for name, p in params.items() if name.startswith(f"{i}.")}
            h = F.layer_norm(x, (self.d,), layer["norm1"], layer["bias1"])
            x = x + F.dropout(self._attend(h, layer, mask, "padding" in batch), self.dropout, training=True)
            h = F.layer_norm(x, (self.d,), layer["norm2"], layer["bias2"])
            h = F.gelu(h @ layer["up"] + layer["up_bias"], approximate="tanh")
            x = x + F.dropout(h @ layer["down"] + layer["down_bias"], self.dropout, training=True)
        logits = F.layer_norm(x, (self.d,), params["norm"], params["bias"]) @ params["tokens"].t()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def _attend(self, x: Tensor, layer: Params, mask: Tensor, padded: bool) -> Tensor:
        b, s, _ = x.shape
        if "qkv" in layer:
            q, k, v = (x @ layer["qkv"] + layer["qkv_bias"]).split(self.d, dim=-1)
        else:
            q, (k, v) = x @ layer["q"], (x @ layer["kv"]).chunk(2, dim=-1)
        q, k, v = (t.view(b, s, -1, self.head_size).transpose(1, 2) for t in (q, k, v))
        if self.grouped == "repeat":
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        if self.attention == "fused":
            how = {"attn_mask": mask} if padded else {"is_causal": True}
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.grouped == "gqa", **how)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)
            scores = scores + torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            mixed = F.dropout(scores.softmax(-1), self.dropout, training=True) @ v
        return mixed.transpose(1, 2).reshape(b, s, self.d) @ layer["out"]


def _causal(seq: int, device: torch.device) -> Tensor:
    i = torch.arange(seq, device=device)
    return i[:, None] >= i[None, :]
