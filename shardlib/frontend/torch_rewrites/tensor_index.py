"""Traces `x[:, i]` with a tensor `i` of one integer: torch reads its value for a view, a program indexes.

The result is a copy. A function that writes to the copy, or to `x` before it reads the copy, is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import is_batched, is_wrapped, unwrapped
from shardlib.core.torch_internals.traced_nodes import node_of

aten = torch.ops.aten


def read_at_tensor(x: Tensor, index: Any) -> Tensor | None:
    """Returns `x[index]`; None if the index has no such tensor, or other tensors."""
    if (parts := _split_index(x, index)) is None:
        return None
    return mark_as_copy(aten.index.Tensor(*parts))


def mark_as_copy(x: Tensor) -> Tensor:
    """Marks a tensor as a copy that is a view in torch, so that writes are refused; returns the tensor."""
    if (node := node_of(x)) is not None:
        node.meta["picked"] = True
    return x


def write_at_tensor(x: Tensor, index: Any, value: Any) -> Tensor | None:
    """Sets `x[index] = value` and returns `x`; None where `read_at_tensor` returns None."""
    if (parts := _split_index(x, index)) is None:
        return None
    view, places = parts
    value = torch.as_tensor(value, device=x.device).to(x.dtype)
    rank = view.dim() - sum(i is not None for i in places)
    while value.dim() > rank and value.shape[0] == 1:
        value = value.squeeze(0)
    aten.index_put_.default(view, places, value)
    return x


def _split_index(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]] | None:
    """Returns the view of `x` without such tensors in its index, and these tensors by dim."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_place, items)):
        return None
    basic = tuple(slice(None) if _is_place(k) else k for k in items)
    if not all(isinstance(k, int | slice | None) or k is ... for k in basic) or any(isinstance(k, bool) for k in basic):
        return None
    view: Tensor = x[basic]
    places: list[Tensor | None] = []
    for k, plain in zip(items, basic, strict=True):
        if plain is ...:
            places += [None] * (x.dim() - sum(isinstance(j, int | slice) for j in basic))
        elif not isinstance(plain, int):
            places.append(k if _is_place(k) else None)
    return view, places


def _is_place(k: Any) -> bool:
    if not isinstance(k, Tensor) or k.dim() or k.dtype not in _INTEGERS:
        return False
    while is_wrapped(k):
        if is_batched(k):
            return False
        k = unwrapped(k)
    return True


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
