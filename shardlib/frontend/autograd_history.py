"""What autograd knows of tensors: their hooks and flags, where their history ends, and the way back through it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from shardlib.core.torch_private import TENSOR_HOOKS, ReentrantCheckpoint


def pulled(outs: list[Tensor], wanted: list[Tensor], cotangents: list[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of `wanted`, None where nothing depends on one.

    A reentrant checkpoint calls `backward()` itself, inside another: what it finds is in the `.grad` of leaves.
    """
    if not _reenters(outs) or not all(x.is_leaf for x in wanted):
        return torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)
    before = [x.grad for x in wanted]
    try:
        for x in wanted:
            x.grad = None
        torch.autograd.backward(outs, cotangents)
        return [x.grad for x in wanted]
    finally:
        for x, grad in zip(wanted, before, strict=True):
            x.grad = grad


def _reenters(outs: Sequence[Tensor]) -> bool:
    """Whether the way back leads through a reentrant checkpoint."""
    seen: set[Any] = set()
    todo = [x.grad_fn for x in outs]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, ReentrantCheckpoint):
            return True
        seen.add(node)
        todo += [behind for behind, _ in node.next_functions]
    return False


def end(x: Tensor) -> Any:
    """Where the history of what is made of `x` ends."""
    return id(x) if x.grad_fn is None else x.grad_fn


def origins(outs: Sequence[Tensor], *, through: bool = False) -> dict[Any, frozenset[int]]:
    """For every end of the history of `outs`, from which of these it is reached.

    Only if asked to, `through` Functions of the user's: these may have no gradient for an input.
    """
    order: dict[Any, None] = {}  # from the ends
    todo: list[tuple[Any, bool]] = [(x.grad_fn, False) for x in outs]
    open_: set[Any] = set()
    while todo:
        node, done = todo.pop()
        if done:
            order[node] = None
        elif node is not None and node not in open_:
            open_.add(node)
            todo += [(node, True), *((behind, False) for behind, _ in _behind(node, through))]
    found: dict[Any, frozenset[int]] = {}
    for i, x in enumerate(outs):
        start = end(x)
        found[start] = found.get(start, frozenset()) | {i}
    for node in reversed(order):
        for behind, _ in _behind(node, through):
            if behind is not None:
                found[behind] = found.get(behind, frozenset()) | found[node]
    for node, which in list(found.items()):
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = found.get(id(leaf), frozenset()) | which
    return found


def is_within(outs: Sequence[Tensor]) -> list[bool]:
    """Of each, whether another one is made of it."""
    below: set[Any] = set()
    todo = [node for x in outs if x.grad_fn is not None for node, _ in x.grad_fn.next_functions]
    while todo:
        node = todo.pop()
        if node is not None and node not in below:
            below.add(node)
            todo += [behind for behind, _ in node.next_functions]
    return [x.grad_fn in below for x in outs]


def _behind(node: Any, through: bool) -> Any:
    return () if isinstance(node, BackwardCFunction) and not through else node.next_functions


@dataclass(frozen=True)
class Autograd:
    """What autograd knows of a tensor: whether it requires a gradient, where it comes from, its hooks by kind."""

    requires_grad: bool
    grad_fn: Any
    hooks: dict[str, tuple[Any, dict[int, Any]]]

    @staticmethod
    def of(x: Tensor) -> Autograd:
        return Autograd(x.requires_grad, x.grad_fn, hooks_of(x))

    def change(self, x: Tensor) -> str:
        """What is otherwise now, in words."""
        if x.grad_fn is not self.grad_fn:
            return "is written to, and what is written has a history"
        if x.requires_grad != self.requires_grad:
            return f"has requires_grad={x.requires_grad} now"
        return "" if _keys(hooks_of(x)) == _keys(self.hooks) else "has another hook now"

    def restore(self, x: Tensor) -> None:
        """Undo what a trace did to a tensor that outlives it. Handles of hooks know the dict that they stand in."""
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
        """Give `x`, which stands for this tensor, these hooks."""
        for kind, (_, held) in self.hooks.items():
            setattr(x, kind, OrderedDict(held))


def hooks_of(x: Any) -> dict[str, tuple[Any, dict[int, Any]]]:
    """By kind, the dict of the hooks of a tensor, and what is in it now."""
    return {kind: (hooks, dict(hooks)) for kind in TENSOR_HOOKS if (hooks := getattr(x, kind, None)) is not None}


def _keys(hooks: dict[str, tuple[Any, dict[int, Any]]]) -> dict[str, list[int]]:
    return {kind: list(held) for kind, (_, held) in hooks.items() if held}
