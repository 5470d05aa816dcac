"""A GPT over bytes: torch modules for one device, and their sharding on a mesh.

B batch, T sequence, D width, H heads, d size of a head, F feed-forward, V vocabulary. This file shards
in three places: the mesh's rules, the table of weights, and `shard` on the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl

RULES = {"batch": "data", "length": "tensor", "heads": "tensor", "ff": "tensor", "vocab": "tensor"}

# Megatron's layout. Weights without a line (the norms) are replicated.
WEIGHTS = {
    "*embedding.weight": "vocab embed",
    "*head.weight": "vocab embed",
    "*.query.weight": "heads embed",
    "*.key.weight": "heads embed",
    "*.value.weight": "heads embed",
    "*.out.weight": "embed heads",
    "*.up.weight": "ff embed",
    "*.down.weight": "embed ff",
}
RESIDUAL = "batch length embed"


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults give 0.46 million parameters."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64
    vocab: int = 256


class Block(nn.Module):
    """Attention with rotary positions, then a feed-forward layer of four widths, each with a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x_BTD: Tensor, angles: Tensor) -> Tensor:
        """Maps `[B, T, D]` to `[B, T, D]`; `angles` are `[T, d/2]`."""
        h_BTD = self.norm1(x_BTD)
        q_BHTd, k_BHTd, v_BHTd = (
            project(h_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        a_BHTd = F.scaled_dot_product_attention(
            _rotate(q_BHTd, angles), _rotate(k_BHTd, angles), v_BHTd, is_causal=True
        )
        x_BTD = sl.shard(x_BTD + self.out(a_BHTd.transpose(1, 2).flatten(2)), RESIDUAL)
        return sl.shard(x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD)))), RESIDUAL)


class GPT(nn.Module):
    """Predicts the next byte: logits `[B, T, V]`, or with targets the mean loss in nats per byte.

    Fresh weights are normal. Those that write to the residual stream are scaled down by depth (GPT-2). On one device
    the model runs inside `with shardlib.no_mesh()`.

    Example:
        >>> model = GPT(Config())
        >>> sum(p.numel() for p in model.parameters())
        460032
        >>> with sl.no_mesh():
        ...     model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, p in self.named_parameters():
            if "norm" not in name:
                depth = (2 * config.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * depth)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Maps token ids to logits, or to the loss."""
        x_BTD = sl.shard(self.embedding(tokens_BT), RESIDUAL)
        angles = _rotary_angles(tokens_BT.shape[1], self.config.width // self.config.heads, tokens_BT.device)
        for block in self.blocks:
            x_BTD = block(x_BTD, angles)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV if targets_BT is None else F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _rotary_angles(length: int, head: int, device: torch.device) -> Tensor:
    """Returns rotary angles `[T, d/2]`: one per position and pair of channels (Su et al., 2021)."""
    speeds = 10_000.0 ** (-torch.arange(0, head, 2, device=device) / head)
    return torch.arange(length, device=device)[:, None] * speeds


def _rotate(x_BHTd: Tensor, angles: Tensor) -> Tensor:
    a, b = x_BHTd.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, *, temperature: float, seed: int) -> bytes:
    """Samples `length` bytes that continue `prompt`, on one device; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with sl.no_mesh():
        for _ in range(length):
            last_V = model(torch.tensor([tokens[-model.config.context :]]))[0, -1]
            if temperature == 0:
                tokens.append(int(last_V.argmax()))
            else:
                choice = torch.multinomial(torch.softmax(last_V / temperature, 0), 1, generator=generator)
                tokens.append(int(choice))
    return bytes(tokens[len(prompt) :])
