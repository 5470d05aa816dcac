"""Which nodes are gradients of inputs: these live where the input does, unless somebody says otherwise."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.torch_private import ENGINE, innermost


@contextmanager
def noted() -> Iterator[None]:
    """While on, gradients that autograd returns are known as such."""
    engine = ENGINE.value

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = engine(*args, **kwargs)
        for grad, x in zip(found or (), args[4] if len(args) > 4 else (), strict=False):
            note(grad, x)
        return found

    with ENGINE.holding(run):
        yield


def note(grad: object, x: object) -> None:
    """Note, in `meta["gradient of"]`, that a tensor is the gradient of another one, if that is an input."""
    node, source = _node(grad), _node(x)
    if node is not None and source is not None and source.op == "placeholder":
        node.meta.setdefault("gradient of", source)


def _node(x: object) -> fx.Node | None:
    mode = get_proxy_mode()
    if mode is None or not isinstance(x, Tensor):
        return None
    slot = get_proxy_slot(innermost(x), mode.tracer, None)
    node = None if slot is None else slot.proxy.node
    while node is not None and node.op == "call_function" and has_trait(node.target, "is_alias"):
        (node,) = node.all_input_nodes
    return node
