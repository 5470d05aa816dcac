"""Refuses writes to inputs that cannot get their new values back element by element, after the program ran."""

from __future__ import annotations

from torch import Tensor, fx

from shardlib.core.errors import ShardingError


def refuse_unwritable(description: str, owner: fx.Node, target: fx.Node, value: fx.Node) -> None:
    """Refuses a write of `value` to `target`, a view of the input `owner`."""
    whole, old, new = owner.meta["val"], target.meta["val"], value.meta["val"]
    if not _has_distinct_elements(whole):
        raise ShardingError(
            "the traced function writes to an argument whose elements share memory",
            [description, f"its shape is {list(whole.shape)}, with strides {list(whole.stride())}"],
            rule="a write to one element would show in others, on one device",
            remedy="pass x.clone(), or what it was expanded from, and expand it inside",
        )
    if old.shape != new.shape:
        raise ShardingError(
            "the traced function gives out= a tensor of another size",
            [description, f"its shape is {list(old.shape)}, the result has the shape {list(new.shape)}"],
            rule="an argument of a program keeps its shape; values are written back, shapes are not",
            remedy=f"return the result; or pass torch.empty({list(new.shape)})",
        )


def _has_distinct_elements(x: Tensor) -> bool:
    """Returns whether every element has memory of its own: each stride exceeds the reach of the smaller ones."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)) if x.numel() else ():
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True
