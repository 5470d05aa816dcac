"""Reads expressions over the numbers of a call, such as `2 * $3`, in the text of a program."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from typing import Any

from shardlib.core.call_scalar import Scalar

_BINARY: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def parse_scalar(text: str) -> Scalar:
    """Reads an expression; the traced values of the numbers are not in the text.

    Example:
        >>> parse_scalar("2 * $3")
        (2 * leaf_3)
    """

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return Scalar.from_leaf(int(node.id.removeprefix("leaf_")), node.id, 1.0)
        if isinstance(node, ast.BinOp):
            return Scalar(_BINARY[type(node.op)], (read(node.left), read(node.right)), hint=1)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            return Scalar(operator.neg if isinstance(node.op, ast.USub) else operator.pos, (read(node.operand),))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                return Scalar(getattr(math, node.func.attr), tuple(map(read, node.args)), hint=1.0)
            (argument,) = node.args
            if isinstance(argument, ast.Constant):
                return float(str(argument.value))
            inside = read(argument)
            if isinstance(node.func, ast.Name) and node.func.id == "abs":
                return Scalar(operator.abs, (inside,), hint=1)
            is_power = inside.op is operator.pow and inside.hint == 1 and type(inside.hint) is int
            return Scalar(operator.pow, inside.args, hint=1.0) if is_power else Scalar(float, (inside,), hint=1.0)
        return ast.literal_eval(node)

    scalar: Scalar = read(ast.parse(text.replace("$", "leaf_"), mode="eval").body)
    return scalar
