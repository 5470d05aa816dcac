"""Reads and restores autograd's state of tensors, and walks the history of results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.autograd_graph import history_nodes, nodes_behind
from shardlib.core.torch_internals.torch_private import TENSOR_HOOKS, ReentrantCheckpoint


def compute_gradients(outs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of `inputs`; None for inputs that no result depends on.

    A reentrant checkpoint calls `backward()` inside another, which puts gradients into the `.grad` of leaves.
    """
    is_reentrant = any(isinstance(node, ReentrantCheckpoint) for node in history_nodes(outs))
    if not is_reentrant or not all(x.is_leaf for x in inputs):
        return torch.autograd.grad(outs, inputs, cotangents, allow_unused=True)
    with without_grads(inputs):
        torch.autograd.backward(outs, cotangents)
        return [x.grad for x in inputs]


@contextmanager
def without_grads(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While on, leaves have no `.grad` of their own."""
    grads = [(x, x.grad) for x in tensors]
    try:
        for x in tensors:
            x.grad = None
        yield
    finally:
        for x, grad in grads:
            x.grad = grad


def history_end(x: Tensor) -> Any:
    """Returns the end of the history of values computed from `x`: its node, or the id of a leaf."""
    return id(x) if x.grad_fn is None else x.grad_fn


def find_origins(outs: Sequence[Tensor], *, through: bool = False) -> dict[Any, frozenset[int]]:
    """Maps every end of the history of `outs` to the positions of the results that lead to it.

    Stops at the user's Functions, which may have no gradient for an input, unless `through`.
    """
    reached: dict[Any, frozenset[int]] = {}
    for i, x in enumerate(outs):
        start = history_end(x)
        reached[start] = reached.get(start, frozenset()) | {i}
    for node in history_nodes(outs, through=through):
        for behind in nodes_behind(node, through=through):
            reached[behind] = reached.get(behind, frozenset()) | reached[node]
    for node, which in list(reached.items()):
        if (leaf := getattr(node, "variable", None)) is not None:
            reached[id(leaf)] = reached.get(id(leaf), frozenset()) | which
    return reached


def mark_intermediates(outs: Sequence[Tensor]) -> list[bool]:
    """Returns, for each result, whether another one depends on it."""
    below = {behind for node in history_nodes(outs) for behind in nodes_behind(node)}
    return [x.grad_fn in below for x in outs]


@dataclass(frozen=True)
class AutogradState:
    """Autograd's state of a tensor: its flag, its history, and its hooks by kind."""

    requires_grad: bool
    grad_fn: Any
    hooks: dict[str, tuple[Any, dict[int, Any]]]

    @staticmethod
    def read(x: Tensor) -> AutogradState:
        return AutogradState(x.requires_grad, x.grad_fn, read_hooks(x))

    def describe_change(self, x: Tensor) -> str:
        """Returns the difference from the present state in words; "" if there is none."""
        if x.grad_fn is not self.grad_fn:
            return "is written to, and what is written has a history"
        if x.requires_grad != self.requires_grad:
            return f"has requires_grad={x.requires_grad} now"
        return "" if _keys(read_hooks(x)) == _keys(self.hooks) else "has another hook now"

    def restore(self, x: Tensor) -> None:
        """Gives a tensor this state back. Dicts of hooks stay the same objects, since handles refer to them."""
        if x.grad_fn is not self.grad_fn:
            x.detach_()
        if x.requires_grad != self.requires_grad:
            x.requires_grad_(self.requires_grad)
        for kind in TENSOR_HOOKS:
            mine, held = self.hooks.get(kind, (None, {}))
            if mine is not None and list(mine) != list(held):
                mine.clear()
                mine.update(held)
            if getattr(x, kind, None) is not mine:
                setattr(x, kind, mine)

    def lend_hooks(self, x: Tensor) -> None:
        """Gives these hooks to `x`, the stand-in of this tensor."""
        for kind, (_, held) in self.hooks.items():
            setattr(x, kind, OrderedDict(held))


def read_hooks(x: Any) -> dict[str, tuple[Any, dict[int, Any]]]:
    """Returns, by kind, the dict of a tensor's hooks, and a copy of it."""
    return {kind: (hooks, dict(hooks)) for kind in TENSOR_HOOKS if (hooks := getattr(x, kind, None)) is not None}


def _keys(hooks: dict[str, tuple[Any, dict[int, Any]]]) -> dict[str, list[int]]:
    return {kind: list(held) for kind, (_, held) in hooks.items() if held}
