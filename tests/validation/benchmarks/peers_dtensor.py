"""The peer DTensor: W1 as a plain module, sharded by hand with a tensor-parallel plan and FSDP2.

`tp_fsdp` is parallelize_module on a (2, n/2) mesh with a vocab-parallel embedding and loss, and fully_shard over data;
`fsdp` is fully_shard alone, over all ranks. Every layer is a unit of fully_shard, as its documentation advises.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from tests.models import w1


class Norm(nn.Module):
    def __init__(self, config: w1.Config) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(config.d)), config.eps

    def forward(self, x: Tensor) -> Tensor:
        return w1.rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, config: w1.Config) -> None:
        super().__init__()
        q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
        self.head_size = config.head_size
        self.attention_norm, self.ff_norm = Norm(config), Norm(config)
        sizes = {"wq": (config.d, q), "wk": (config.d, kv), "wv": (config.d, kv), "wo": (q, config.d)}
        sizes |= {"w1": (config.d, config.ff), "w3": (config.d, config.ff), "w2": (config.ff, config.d)}
        for name, (into, out) in sizes.items():
            self.add_module(name, nn.Linear(into, out, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        b, s, _ = y.shape
        q, k, v = (w(y).view(b, s, -1, self.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = w1.rotate(q, cos, sin), w1.rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(mixed.transpose(1, 2).reshape(b, s, -1))
        y = self.ff_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Model(nn.Module):
    def __init__(self, config: w1.Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.d)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm, self.head = Norm(config), nn.Linear(config.d, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = w1.rotary(self.config, tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def model(params: w1.Params, config: w1.Config) -> Model:
    """The module, holding copies of W1's parameters."""
    flat = {name: params[name] for name in ("embedding", "norm", "head")}
    flat |= {f"layers.{i}.{name}": w for i, layer in enumerate(params["layers"]) for name, w in layer.items()}
    module = Model(config).to(config.dtype)
    module.load_state_dict({f"{name}.weight": w for name, w in flat.items()})
    return module


def _tensor_parallel(module: Model, mesh: Any) -> None:
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
        "wq": column,
        "wk": column,
        "wv": column,
        "wo": row,
        "w1": column,
        "w3": column,
        "w2": row,
    }
    for layer in module.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in plan.items()})
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, ends)


class Peer:
    """One rank's sharded module, its optimizer and its rows of the batch."""

    def __init__(
        self,
        kind: str,
        params: w1.Params,
        tokens: Tensor,
        targets: Tensor,
        config: w1.Config,
        *,
        compiled: bool = False,
    ) -> None:
        world = torch.distributed.get_world_size()
        self.module, self.loss_parallel = model(params, config), kind == "tp_fsdp"
        if kind == "tp_fsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
            data = mesh["data"]
            _tensor_parallel(self.module, mesh["tensor"])
        else:
            data = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
        for layer in self.module.layers:
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=data)
        fully_shard(self.module, mesh=data)
        rows = math.ceil(config.batch / data.size())
        mine = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
        self.tokens, self.targets, self.data = tokens[mine], targets[mine], data
        # One group a mesh: the fused update of SGD takes no DTensors of different meshes.
        by_mesh: dict[tuple[str, ...] | None, list[nn.Parameter]] = {}
        for p in self.module.parameters():
            assert isinstance(p, DTensor)
            by_mesh.setdefault(p.device_mesh.mesh_dim_names, []).append(p)
        groups = [{"params": group} for group in by_mesh.values()]
        self.optimizer = torch.optim.SGD(groups, lr=w1.LEARNING_RATE, foreach=True)

    def step(self) -> Tensor:
        """One step; the loss of this rank's rows."""
        self.optimizer.zero_grad(set_to_none=True)
        parallel: AbstractContextManager[Any] = loss_parallel() if self.loss_parallel else nullcontext()
        with parallel:
            logits = self.module(self.tokens)
            value = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
            value.backward()
        self.optimizer.step()
        return value.detach()

    def whole_loss(self, value: Tensor) -> float:
        """The mean over all rows of a loss that `step` returned."""
        local = value.to_local() if isinstance(value, DTensor) else value
        total = local.clone()
        torch.distributed.all_reduce(total, group=self.data.get_group())
        return float(total / self.data.size())
