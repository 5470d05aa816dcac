"""Marks the nodes that are gradients of inputs: by default these get the layout of the input."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.torch_internals.torch_private import ENGINE
from shardlib.core.torch_internals.traced_nodes import node_of


@contextmanager
def tag_engine_gradients() -> Iterator[None]:
    """Marks the gradients that autograd's engine returns, inside the context."""
    engine = ENGINE.value

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        gradients = engine(*args, **kwargs)
        for grad, x in zip(gradients or (), args[4] if len(args) > 4 else (), strict=False):
            tag_gradient(grad, x)
        return gradients

    with ENGINE.holding(run):
        yield


def tag_gradient(grad: object, x: object) -> None:
    """Notes in `meta["gradient of"]` that a tensor is the gradient of `x`, if `x` is an input."""
    node, source = _node(grad), _node(x)
    if node is not None and source is not None and source.op == "placeholder":
        node.meta.setdefault("gradient of", source)


def _node(x: object) -> fx.Node | None:
    node = node_of(x) if isinstance(x, Tensor) else None
    while node is not None and node.op == "call_function" and has_trait(node.target, "is_alias"):
        (node,) = node.all_input_nodes
    return node
