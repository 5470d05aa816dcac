"""What can be laid out at all: tensors of which every element has its place among dims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardlib.errors import ShardingError


def refuse_others(what: str, found: Iterable[tuple[str, Any]]) -> None:
    """Raise `ShardingError` if there are sparse, nested or opaque ones among the named tensors.

    Example:
        >>> refuse_others("step(x, y)", [("x", torch.zeros(3)), ("y", torch.eye(2).to_sparse())])
        Traceback (most recent call last):
        shardlib.errors.ShardingError: step(x, y) works on tensors that are not strided:
          * y of shape [2, 2] is sparse_coo
        Rule: a layout cuts dims into ranges of positions; what is stored by index has none
        Remedy: work on dense tensors, x.to_dense(), or on the indices and the values as tensors of their own
    """
    wrong = [(name, x) for name, x in found if isinstance(x, torch.Tensor) and not _is_strided(x)]
    if wrong:
        raise ShardingError(
            f"{what} works on tensors that are not strided",
            [_described(name, x) for name, x in wrong],
            rule="a layout cuts dims into ranges of positions; what is stored by index has none",
            remedy="work on dense tensors, x.to_dense(), or on the indices and the values as tensors of their own",
        )


def _is_strided(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def _described(name: str, x: torch.Tensor) -> str:
    if x.is_nested:
        return f"{name} is nested"
    return f"{name} of shape {list(x.shape)} is {str(x.layout).removeprefix('torch.')}"
