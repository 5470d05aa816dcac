"""Formats dataclasses as the Python call that makes them, and parses such calls."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any


def format_call(x: Any) -> str:
    """Formats a value as a Python call; fields with their default are left out."""
    values = ((f, getattr(x, f.name)) for f in fields(x))
    words = [f"{f.name}={_literal(value)}" for f, value in values if value != _default(f)]
    return f"{type(x).__name__}({', '.join(words)})"


def parse_call(text: str, *kinds: type) -> Any:
    """Parses the text of `format_call` for a value of one of these classes; fields are such values or literals.

    Raises `SyntaxError`, `ValueError` or `TypeError` for another text.
    """
    return _value(ast.parse(text.strip(), mode="eval").body, {kind.__name__: kind for kind in kinds})


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _literal(x: Any) -> str:
    """Formats a literal as a person writes it: 340e9 and not 340000000000.0."""
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key!r}: {_literal(value)}" for key, value in x.items()) + "}"
    if isinstance(x, float) and x >= 1e6:
        power = 12 if x >= 1e12 else 9
        short = f"{x / 10**power:.12g}e{power}"
        return short if float(short) == x else repr(x)
    return repr(x)


def _value(node: ast.AST, kinds: Mapping[str, type]) -> Any:
    if isinstance(node, ast.Call):
        kind = kinds.get(ast.unparse(node.func))
        if kind is None or node.args:
            raise ValueError(f"{ast.unparse(node)} is no {' or '.join(kinds)} with fields by name")
        return kind(**{str(word.arg): _value(word.value, kinds) for word in node.keywords})
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(k): _value(v, kinds) for k, v in pairs if k is not None}
    return ast.literal_eval(ast.unparse(node))
