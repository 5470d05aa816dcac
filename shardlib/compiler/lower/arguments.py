"""Replaces a call's tensors by local ones, and its integers by local sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from shardlib.compiler.program.steps import Var
from shardlib.rules.rule import Path


def substitute(node: fx.Node, operands: Sequence[Var]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the node's arguments with its tensors replaced, in order."""
    feed = iter(operands)

    def change(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return next(feed)
        if isinstance(x, tuple | list):
            return [change(y) for y in x]
        return x

    return tuple(change(a) for a in node.args), {k: change(v) for k, v in node.kwargs.items()}


def put(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with one integer replaced."""

    def put(x: Any, rest: Path) -> Any:
        if not rest:
            return value
        if isinstance(x, dict):
            return {**x, rest[0]: put(x.get(rest[0]), rest[1:])}  # torch omits arguments that equal their defaults
        i = rest[0]
        assert isinstance(i, int)
        return type(x)([*x[:i], put(x[i], rest[1:]), *x[i + 1 :]])

    if isinstance(path[0], str):
        return args, put(kwargs, path)
    return put(args, path), kwargs
