"""Inputs that a program cannot write to: their new values come back when it has run, element by element."""

from __future__ import annotations

from torch import Tensor, fx

from shardlib.core.errors import ShardingError


def refuse_unwritable(said: str, owner: fx.Node, target: fx.Node, value: fx.Node) -> None:
    """Refuse a write of `value` to `target`, which shows the input `owner`."""
    given, old, new = owner.meta["val"], target.meta["val"], value.meta["val"]
    if not _is_apart(given):
        raise ShardingError(
            "the traced function writes to an argument whose elements share memory",
            [said, f"its shape is {list(given.shape)}, with strides {list(given.stride())}"],
            rule="a write to one element would show in others, on one device",
            remedy="pass x.clone(), or what it was expanded from, and expand it inside",
        )
    if old.shape != new.shape:
        raise ShardingError(
            "the traced function gives out= a tensor of another size",
            [said, f"its shape is {list(old.shape)}, that of the result {list(new.shape)}"],
            rule="what a program is given keeps its shape; values are written back, shapes are not",
            remedy=f"return the result; or pass torch.empty({list(new.shape)})",
        )


def _is_apart(x: Tensor) -> bool:
    """Whether every element has memory of its own: each stride is beyond the reach of those below it."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)) if x.numel() else ():
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True
