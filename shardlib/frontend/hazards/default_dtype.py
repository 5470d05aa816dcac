"""Refuses functions that compute with several default dtypes: a program has one, the last of the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree


@contextmanager
def restore_default_on_error() -> Iterator[None]:
    """Restores the default dtype after an error: the function may be traced again."""
    before = torch.get_default_dtype()
    try:
        yield
    except BaseException:
        torch.set_default_dtype(before)
        raise


def refuse_changed_default(name: str, graph: fx.Graph) -> None:
    """Refuses ops whose result had another default dtype when they were called."""
    left = torch.get_default_dtype()
    wrong = [
        f"{node.meta['default']} at {node.meta['line']}"
        for node in graph.nodes
        if node.meta.get("default", left) is not left and _takes_default(node)
    ]
    if wrong:
        raise ShardingError(
            f"{name} computes with one default dtype, and leaves another, {left}",
            list(dict.fromkeys(wrong)),
            rule="one default dtype holds for all of a program",
            remedy="set it around the call; or say dtype=..., or x.to(dtype), at these lines",
        )


def _takes_default(node: fx.Node) -> bool:
    """Returns whether the default dtype alone decides the floating-point dtype of the result."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    return (
        node.op == "call_function"
        and any(map(_is_floating, _values(node.meta.get("val"))))
        and not any(isinstance(x, torch.dtype) for x in arguments)
        and not any(_is_floating(y) for x in arguments if isinstance(x, fx.Node) for y in _values(x.meta.get("val")))
    )


def _values(val: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(val) if isinstance(x, torch.Tensor))


def _is_floating(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
