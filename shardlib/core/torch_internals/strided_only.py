"""Refuses tensors without strided memory: DTensors, and sparse, nested, quantized or opaque tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from shardlib.core.errors import ShardingError


def refuse_unstrided(call: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raises `ShardingError` for DTensors, and sparse, nested, quantized or opaque tensors among the named ones."""
    tensors = [(name, x) for name, x in named if isinstance(x, torch.Tensor)]
    refuse_dtensors(call, tensors)
    wrong = [(name, x) for name, x in tensors if not is_strided(x)]
    if wrong:
        raise ShardingError(
            f"{call} works on tensors that are not strided",
            [_describe(name, x) for name, x in wrong],
            rule="a layout shards dims into ranges of elements, which are plain numbers",
            remedy=f"pass a dense tensor: {'; '.join(dict.fromkeys(_dense(x) for _, x in wrong))}",
        )


def refuse_dtensors(call: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raises `ShardingError` if there are DTensors of torch.distributed among the named tensors.

    Models after `fully_shard` or with `tp_plan="auto"` hold DTensors. Each rank holds one shard of such a tensor.
    """
    dtensors = [f"{name} is a DTensor of shape {list(x.shape)}, {x.placements}" for name, x in named if is_dtensor(x)]
    if dtensors:
        raise ShardingError(
            f"{call} works on DTensors",
            dtensors,
            rule="shardlib places plain tensors and ShardedTensors; the ops of a DTensor communicate by themselves",
            remedy="convert each one: sl.from_dtensor(x), or x.full_tensor() for the plain tensor; for a module, leave "
            'fully_shard and tp_plan="auto" out, or load its full state dict into a plain copy',
        )


def is_dtensor(x: Any) -> bool:
    """True for a DTensor; does not import `torch.distributed.tensor`."""
    module = None if type(x) is torch.Tensor else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_strided(x: torch.Tensor) -> bool:
    """Returns whether a tensor is an ordinary strided one."""
    return x.layout == torch.strided and not x.is_nested and not x.is_quantized


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Views or copies the values of a tensor as bytes, in the order of its elements; a view if it is contiguous.

    A dim of one element may have any stride, and `view` keeps that.
    """
    whole = x.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _dense(x: torch.Tensor) -> str:
    if x.is_nested:
        return "torch.nested.to_padded_tensor(x, 0.0), with the lengths as a tensor"
    if x.is_quantized:
        return "x.dequantize()"
    return "x.to_dense()" + (", or its indices and values as tensors of their own" if x.layout in _INDEXED else "")


_INDEXED = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _describe(name: str, x: torch.Tensor) -> str:
    if x.is_nested:
        return f"{name} is nested"
    if x.is_quantized:
        return f"{name} of shape {list(x.shape)} is quantized"
    return f"{name} of shape {list(x.shape)} is {str(x.layout).removeprefix('torch.')}"
