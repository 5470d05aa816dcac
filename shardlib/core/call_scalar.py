"""Scalars: numbers that every call passes anew, the same on every device.

A `Scalar` is a Python expression over the call's numbers. It is an opaque argument of ops in a program, and a call
evaluates it with Python's own arithmetic, so that `p - lr * g` is the same program for every learning rate.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
}
_PREFIX: dict[Any, str] = {operator.neg: "-", operator.pos: "+"}
_COMPARISONS: dict[Any, str] = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
_NAMES = (
    *("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "pow", "fabs", "fmod", "hypot"),
    *("copysign", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf", "erfc"),
)
MATH: dict[Any, str] = {getattr(math, name): f"math.{name}" for name in _NAMES}
_CALLS: dict[Any, str] = {torch.sym_float: "float", float: "float", operator.abs: "abs", **MATH}
OPERATIONS = frozenset({*_INFIX, *_PREFIX, *_CALLS})


@dataclass(frozen=True, eq=False, repr=False)
class Scalar:
    """`op` of `args` (numbers and scalars), or the number at leaf `leaf` of the call, called `name`.

    `hint` is its value at trace time. It determines shapes and dtypes of results, never a decision.
    """

    op: Any
    args: tuple[Any, ...]
    leaf: int = -1
    name: str = ""
    hint: Any = None

    @staticmethod
    def from_leaf(leaf: int, name: str, value: Any) -> Scalar:
        """Makes the scalar of the number at a leaf of the call."""
        return Scalar(None, (), leaf, name, value)

    @staticmethod
    def apply(op: Any, *args: Any) -> Scalar:
        """Applies `op` to numbers; computing the hint raises the errors of Python's arithmetic."""
        return Scalar(op, args, hint=op(*(x.hint if isinstance(x, Scalar) else x for x in args)))

    def text(self, name: Callable[[Scalar], str]) -> str:
        """Formats the expression in Python; `name` formats a number of the call."""
        if self.op is None:
            return name(self)
        parts = [x.text(name) if isinstance(x, Scalar) else _literal(x) for x in self.args]
        if self.op in _COMPARISONS:
            return f"{parts[0]} {_COMPARISONS[self.op]} {parts[1]}"
        if self.op in _INFIX:
            text = f"({parts[0]} {_INFIX[self.op]} {parts[1]})"
            return f"float{text}" if self.op is operator.pow and type(self.hint) is float else text  # no complex number
        if self.op in _PREFIX:
            return f"({_PREFIX[self.op]}{parts[0]})"
        return f"{_CALLS[self.op]}({', '.join(parts)})"

    def value(self, leaves: Sequence[Any]) -> Any:
        """Evaluates the scalar in a call with these leaves."""
        if self.op is None:
            return leaves[self.leaf]
        result = self.op(*(x.value(leaves) if isinstance(x, Scalar) else x for x in self.args))
        return float(result) if self.op is operator.pow and type(self.hint) is float else result

    def leaves(self) -> Iterator[int]:
        """Yields the leaves of the call in the expression."""
        if self.op is None:
            yield self.leaf
        for x in self.args:
            if isinstance(x, Scalar):
                yield from x.leaves()

    def __repr__(self) -> str:
        return self.text(lambda x: x.name)

    @cached_property
    def _text(self) -> str:
        return self.text(lambda x: f"leaf_{x.leaf}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scalar) and self._text == other._text  # 1, 1.0 and True differ, and 0.0 and -0.0

    def __hash__(self) -> int:
        return hash(self._text)


def _literal(x: Any) -> str:
    if isinstance(x, float) and not math.isfinite(x):
        return f"float({str(x)!r})"
    return f"({x!r})" if x < 0 or math.copysign(1, x) < 0 else repr(x)


def is_same_number(a: Any, b: Any) -> bool:
    """Returns whether a program treats two numbers alike: 1, 1.0 and True differ, 0.0 and -0.0 too; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    return bool(a == b) if type(a) is not float else a.hex() == b.hex()


def replace_by_hints(x: Any) -> Any:
    """Replaces every scalar in arguments by its hint."""
    if isinstance(x, Scalar):
        return x.hint
    if isinstance(x, dict):
        return {k: replace_by_hints(y) for k, y in x.items()}
    if isinstance(x, list | tuple) and not isinstance(x, torch.Size):
        return [replace_by_hints(y) for y in x] if isinstance(x, list) else tuple(replace_by_hints(y) for y in x)
    return x
