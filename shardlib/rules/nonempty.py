"""A local form for ops that refuse empty dims: one element of zeros stands in for a shard that holds nothing."""

from __future__ import annotations

import math
from typing import Any

from shardlib.rules.rule import Local, Meta, Path
from shardlib.rules.shards import aten, is_zero, may_be_empty
from shardlib.rules.space import Dim


def nonempty(local: Local, **then: Any) -> Any:
    """The op itself; where a local factor may be empty, operands and sizes get one element of it, results lose it.

    `then` are further arguments for that.
    """
    risky = {f for f in local.rule.local_factors if may_be_empty(local, f)}
    if not risky:
        return local.op(local.call.target, *local.args, **local.kwargs)

    def filled(f: str) -> Any:
        size = local.size(f)
        return size + is_zero(size) if f in risky else size

    def here(dim: Dim) -> Any:
        return math.prod(local.size(f) for f in dim)

    operands = iter(local.rule.operands)

    def walked(whole: Any, mine: Any) -> Any:
        if isinstance(whole, list | tuple):
            return [walked(a, b) for a, b in zip(whole, mine, strict=True)]
        if not isinstance(whole, Meta):
            return mine
        labels = next(operands)
        if not risky & {f for dim in labels for f in dim}:
            return mine
        pads: list[Any] = []
        for dim in reversed(labels):
            pads += [0, math.prod(map(filled, dim)) - here(dim) if risky & set(dim) else 0]
        return local.op(aten.constant_pad_nd.default, mine, pads, 0)

    args = walked(local.call.args, local.args)
    kwargs = {name: walked(whole, local.kwargs[name]) for name, whole in local.call.kwargs.items()}
    for path, (k, factors) in local.rule.ints.items():
        put(kwargs if isinstance(path[0], str) else args, path, math.prod(map(filled, factors)) * k)
    results = local.op(local.call.target, *args, **kwargs | then)
    out = []
    for x, labels in zip(results if isinstance(results, tuple) else [results], local.rule.results, strict=True):
        for i, dim in enumerate(labels):
            if risky & set(dim):
                x = local.op(aten.slice.Tensor, x, i, 0, here(dim))
        out.append(x)
    return tuple(out)


def put(arguments: Any, path: Path, value: Any) -> None:
    """Set the argument that sits there."""
    *outer, last = path
    for step in outer:
        arguments = arguments[step]
    arguments[last] = value
