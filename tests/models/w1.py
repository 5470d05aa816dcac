"""Workload W1: a small Llama-like decoder and one step of SGD, written for one device in plain torch.

Parameters are a nested dict, weights as in `torch.nn.Linear`: (out, in). Shapes below: B batch, S sequence, D model,
H query heads, K key and value heads, E elements a head, F feed-forward, V vocabulary.

`modes` says where the weights and the batch live in each of the five ways in which W1 is sharded; the model itself
knows nothing of it, but for a hook on the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

Params = dict[str, Any]
Residual = Callable[[Tensor], Tensor]

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Config:
    """Sizes of W1; the defaults are the two-layer workload."""

    layers: int = 2
    d: int = 256
    heads: int = 8
    kv_heads: int = 4
    ff: int = 688
    vocab: int = 4096
    batch: int = 8
    seq: int = 128
    eps: float = 1e-5
    theta: float = 10000.0
    dtype: torch.dtype = torch.float32

    @property
    def head_size(self) -> int:
        return self.d // self.heads

    def with_(self, **changes: Any) -> Config:
        return replace(self, **changes)


TINY = Config(layers=2, batch=2, seq=16)


def _shapes(c: Config) -> Params:
    q, kv = c.heads * c.head_size, c.kv_heads * c.head_size
    layer = {
        "attention_norm": (c.d,),
        "wq": (q, c.d),
        "wk": (kv, c.d),
        "wv": (kv, c.d),
        "wo": (c.d, q),
        "ff_norm": (c.d,),
        "w1": (c.ff, c.d),
        "w3": (c.ff, c.d),
        "w2": (c.d, c.ff),
    }
    layers = [dict(layer) for _ in range(c.layers)]
    return {"embedding": (c.vocab, c.d), "layers": layers, "norm": (c.d,), "head": (c.vocab, c.d)}


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def init(config: Config, seed: int = 0) -> Params:
    """Parameters drawn in float64 and cast, so that every dtype holds the same numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        whole = 1 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1])
        return whole.to(config.dtype)

    params: Params = pytree.tree_map(draw, _shapes(config), is_leaf=_is_shape)
    return params


def abstract(config: Config) -> tuple[Params, Tensor, Tensor]:
    """Parameters, tokens and targets as meta tensors: enough to plan, no memory."""
    params = pytree.tree_map(
        lambda shape: torch.empty(shape, dtype=config.dtype, device="meta"), _shapes(config), is_leaf=_is_shape
    )
    tokens = torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta")
    return params, tokens, torch.empty_like(tokens)


def batch(config: Config, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, S): random tokens, and each one's successor."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.vocab, (config.batch, config.seq + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotary(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, E) of the rotary embedding, both halves of a head alike."""
    half = config.head_size // 2
    frequency = config.theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(config.seq, device=device, dtype=torch.float64), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(config.dtype), angle.sin().to(config.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(i, i + E/2)` of x (B, H, S, E)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention(x: Tensor, layer: Params, config: Config, cos: Tensor, sin: Tensor) -> Tensor:
    b, s, _ = x.shape
    split = (b, s, -1, config.head_size)
    q = F.linear(x, layer["wq"]).view(split).transpose(1, 2)
    k = F.linear(x, layer["wk"]).view(split).transpose(1, 2)
    v = F.linear(x, layer["wv"]).view(split).transpose(1, 2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).reshape(b, s, -1), layer["wo"])


def feed_forward(x: Tensor, layer: Params) -> Tensor:
    return F.linear(F.silu(F.linear(x, layer["w1"])) * F.linear(x, layer["w3"]), layer["w2"])


def _unchanged(x: Tensor) -> Tensor:
    return x


def block(x: Tensor, layer: Params, cos: Tensor, sin: Tensor, config: Config, residual: Residual) -> Tensor:
    """One layer."""
    x = residual(x + attention(rms_norm(x, layer["attention_norm"], config.eps), layer, config, cos, sin))
    return residual(x + feed_forward(rms_norm(x, layer["ff_norm"], config.eps), layer))


def loss(
    params: Params,
    tokens: Tensor,
    targets: Tensor,
    config: Config,
    residual: Residual = _unchanged,
    block: Callable[..., Tensor] = block,
) -> Tensor:
    """Mean cross-entropy of the targets (B, S). `residual` is called on each value of the residual stream (B, S, D)."""
    cos, sin = rotary(config, tokens.device)
    x = residual(F.embedding(tokens, params["embedding"]))
    for layer in params["layers"]:
        x = block(x, layer, cos, sin, config, residual)
    logits = F.linear(rms_norm(x, params["norm"], config.eps), params["head"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(params: Params, tokens: Tensor, targets: Tensor, config: Config, *how: Any) -> tuple[Tensor, Params]:
    """One step of SGD: the loss, called `how` else, and new parameters."""
    grads, value = torch.func.grad_and_value(loss)(params, tokens, targets, config, *how)
    return value, pytree.tree_map(lambda p, g: p - LEARNING_RATE * g, params, grads)


class Eager:
    """The same step as one writes it in eager torch: autograd, and SGD in place. What timings compare with."""

    def __init__(self, params: Params, config: Config) -> None:
        self.config = config
        self.params = pytree.tree_map(lambda p: p.detach().clone().requires_grad_(), params)
        self.optimizer = torch.optim.SGD(pytree.tree_leaves(self.params), lr=LEARNING_RATE)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        value = loss(self.params, tokens, targets, self.config)
        value.backward()
        self.optimizer.step()
        return value.detach()


@dataclass(frozen=True)
class Mode:
    """One way to shard W1: mesh axes, logical rules, and a spec for every weight, the batch and the residual stream."""

    name: str
    axes: Mapping[str, int]
    rules: Mapping[str, str | tuple[str, ...]]
    params: Params
    batch: str = "batch seq"
    residual: str | None = None


MEGATRON = {"heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}
_LAYER = {
    "attention_norm": "embed",
    "wq": "heads embed",
    "wk": "kv embed",
    "wv": "kv embed",
    "wo": "embed heads",
    "ff_norm": "embed",
    "w1": "ff embed",
    "w3": "ff embed",
    "w2": "embed ff",
}


def specs(config: Config, change: Callable[[str], str] = str) -> Params:
    """A spec for every weight in logical names, each passed through `change`."""
    layers = [{name: change(spec) for name, spec in _LAYER.items()} for _ in range(config.layers)]
    table, norm = change("vocab embed"), change("embed")
    return {"embedding": table, "layers": layers, "norm": norm, "head": table}


def _first_dim_on_data(spec: str) -> str:
    first, *rest = spec.split()
    return " ".join([f"{first}@data", *rest])


def modes(config: Config, devices: int = 8) -> dict[str, Mode]:
    """The five modes on so many devices (data=2 x tensor where there are two axes).

    One set of logical names serves all but `fsdp8`: the rules alone move the weights. `fsdp8` cuts dim 0 of every
    weight, whatever that dim is, as FSDP does, and says so on the spot.
    """
    flat, grid = {"data": devices}, {"data": 2, "tensor": devices // 2}
    data = {"batch": "data"}
    named = specs(config)
    table = [
        Mode("dp8", flat, data, named),
        Mode("tp", grid, data | MEGATRON, named),
        Mode("tp_sp", grid, data | MEGATRON | {"seq_sp": "tensor"}, named, residual="batch seq_sp embed"),
        Mode("fsdp8", flat, data, specs(config, _first_dim_on_data)),
        Mode("fsdp_tp", grid, data | MEGATRON | {"embed": "data"}, named),
    ]
    return {mode.name: mode for mode in table}
