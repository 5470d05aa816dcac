"""Numpy's arrays and numbers where tensors are expected: taken as they are now, by a copy."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardlib.errors import ShardingError


def taken(x: Any, what: str = "an argument") -> Any:
    """`x` with a tensor of its own memory for every numpy array, and a Python number for every number of numpy.

    Raises `ShardingError` for arrays of a dtype that torch has not; `what` names `x`.

    Example:
        >>> import numpy as np
        >>> taken({"x": np.ones(2), "n": np.float32(3.0)})
        {'x': tensor([1., 1.], dtype=torch.float64), 'n': 3.0}
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return x
    leaves, tree = pytree.tree_flatten(x)
    if not any(isinstance(leaf, numpy.ndarray | numpy.generic) for leaf in leaves):
        return x
    return pytree.tree_unflatten([_one(leaf, numpy, what) for leaf in leaves], tree)


def _one(leaf: Any, numpy: Any, what: str) -> Any:
    if isinstance(leaf, numpy.generic):
        return leaf.item()
    if not isinstance(leaf, numpy.ndarray):
        return leaf
    try:
        return torch.from_numpy(numpy.array(leaf))  # a copy: read-only arrays, and those that run backwards, are fine
    except TypeError as error:
        raise ShardingError(
            f"{what} is a numpy array of dtype {leaf.dtype} and shape {list(leaf.shape)}",
            rule="arrays become tensors, as by torch.from_numpy",
            remedy="convert it to numbers first, or name the argument in static_argnames",
        ) from error


def tensor_of(x: Any, what: str) -> torch.Tensor:
    """`x` as a tensor; raises `ShardingError` where it is neither a tensor nor a numpy array."""
    x = taken(x, what)
    if isinstance(x, torch.Tensor):
        return x
    raise ShardingError(
        f"{what} is {x!r:.60}, a {type(x).__name__}",
        rule="what is placed is a tensor, or a numpy array",
        remedy="shard(torch.tensor(x), spec)" if isinstance(x, int | float | list) else "shard each of its tensors",
    )
