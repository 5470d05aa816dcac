"""A GPT over bytes, written for one device: functions on a dict of tensors.

B batch, T sequence, D width, H heads, F feed-forward, V vocabulary. Sharding shows in three places, all in this file:
the mesh's rules, the specs of the weights by name, and one `annotate` on the residual stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
Annotate = Callable[[Tensor, str], Tensor]

RULES = {"batch": "data", "seq": "tensor", "heads": "tensor", "ff": "tensor", "vocab": "tensor"}

# Megatron's layout. `heads` cuts [3, H*hd, D] along whole heads: the compiler finds H in that dim by itself.
WEIGHT_SPECS = {
    r"embedding|head": "vocab embed",
    r".*\.qkv": "three heads embed",
    r".*\.out": "embed heads",
    r".*\.up": "ff embed",
    r".*\.down": "embed ff",
    r".*norm.*": "embed",
}
BATCH_SPEC = "batch _"  # token ids are small: every tensor rank holds whole sequences
RESIDUAL_SPEC = "batch seq embed"


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults have 3.3 million parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 128
    vocab: int = 256

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""
        D, F4 = self.width, 4 * self.width
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab, D)}
        for i in range(self.layers):
            shapes |= {
                f"{i}.norm1.weight": (D,),
                f"{i}.norm1.bias": (D,),
                f"{i}.qkv": (3, D, D),
                f"{i}.out": (D, D),
                f"{i}.norm2.weight": (D,),
                f"{i}.norm2.bias": (D,),
                f"{i}.up": (F4, D),
                f"{i}.down": (D, F4),
            }
        return shapes | {"norm.weight": (D,), "norm.bias": (D,), "head": (self.vocab, D)}


def init(config: Config, seed: int = 0) -> Params:
    """Fresh weights: norms at identity, the rest normal, what ends in the residual stream scaled down by depth (GPT-2).

    Example:
        >>> params = init(Config(layers=1))
        >>> sum(p.numel() for p in params.values())
        919040
    """
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in config.shapes().items():
        if "norm" in name:
            params[name] = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
        else:
            depth = (2 * config.layers) ** -0.5 if name.endswith(("out", "down")) else 1.0
            params[name] = torch.randn(shape, generator=generator) * 0.02 * depth
    return params


def spec(name: str) -> str:
    """The spec of the parameter `name`.

    Example:
        >>> spec("3.up"), spec("norm.bias")
        ('ff embed', 'embed')
    """
    return next(text for pattern, text in WEIGHT_SPECS.items() if re.fullmatch(pattern, name))


def plain(x: Tensor, spec: str) -> Tensor:
    """An `annotate` that does nothing: the model on one device."""
    return x


def logits(params: Params, tokens_BT: Tensor, config: Config, annotate: Annotate = plain) -> Tensor:
    """Logits `[B, T, V]` of the byte that follows each position; a sharded program annotates with `shardlib.shard`."""
    (B, T), D = tokens_BT.shape, config.width
    x_BTD = F.embedding(tokens_BT, params["embedding"])
    angles = _angles(T, D // config.heads, tokens_BT.device)
    for i in range(config.layers):
        p = {key: params[f"{i}.{key}"] for key in ("qkv", "out", "up", "down")}
        x_BTD = annotate(x_BTD, RESIDUAL_SPEC)

        h_BTD = _norm(params, f"{i}.norm1", x_BTD)
        qkv = F.linear(h_BTD, p["qkv"].flatten(0, 1)).view(B, T, 3, config.heads, D // config.heads)
        q_BHTd, k_BHTd, v_BHTd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_BHTd, k_BHTd = _rotated(q_BHTd, angles), _rotated(k_BHTd, angles)
        a_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        x_BTD = annotate(x_BTD + F.linear(a_BHTd.transpose(1, 2).flatten(2), p["out"]), RESIDUAL_SPEC)

        h_BTD = _norm(params, f"{i}.norm2", x_BTD)
        x_BTD = x_BTD + F.linear(F.gelu(F.linear(h_BTD, p["up"])), p["down"])
    return F.linear(_norm(params, "norm", annotate(x_BTD, RESIDUAL_SPEC)), params["head"])


def loss(params: Params, tokens_BT: Tensor, targets_BT: Tensor, config: Config, annotate: Annotate = plain) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    logits_BTV = logits(params, tokens_BT, config, annotate)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _norm(params: Params, name: str, x_BTD: Tensor) -> Tensor:
    return F.layer_norm(x_BTD, x_BTD.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"])


def _angles(length: int, head: int, device: torch.device) -> Tensor:
    """Rotary positions (Su et al., 2021): the angle `[T, d/2]` of each pair of channels at each position."""
    speeds = 10_000.0 ** (-torch.arange(0, head, 2, device=device) / head)
    return torch.arange(length, device=device)[:, None] * speeds


def _rotated(x_BHTd: Tensor, angles: Tensor) -> Tensor:
    a, b = x_BHTd.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def generate(params: Params, prompt: bytes, length: int, config: Config, *, temperature: float, seed: int) -> bytes:
    """`length` bytes that continue `prompt`, sampled on one device; temperature 0 is greedy.

    Example:
        >>> config = Config(layers=1, width=32, heads=2, context=16)
        >>> len(generate(init(config), b"def ", 5, config, temperature=0.8, seed=0))
        5
    """
    generator = torch.Generator().manual_seed(seed)
    params = {name: p.cpu() for name, p in params.items()}
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-config.context :]])
        last_V = logits(params, window, config)[0, -1]
        if temperature == 0:
            tokens.append(int(last_V.argmax()))
        else:
            choice = torch.multinomial(torch.softmax(last_V / temperature, 0), 1, generator=generator)
            tokens.append(int(choice))
    return bytes(tokens[len(prompt) :])
