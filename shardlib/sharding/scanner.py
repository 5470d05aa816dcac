"""Reads specs and layouts, which are one-line texts, token by token; errors point at the character."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from shardlib.core.errors import ShardingError

T = TypeVar("T")
_TOKEN = re.compile(r"\.\.\.|[^\W\d]\w*|\d+|\S")


class Scanner:
    """The tokens of one text: `...`, names, numbers, and single characters."""

    def __init__(self, text: str, kind: str, *, rule: str) -> None:
        self.text, self.kind, self.rule = text, kind, rule
        self.tokens = [(m[0], m.start()) for m in _TOKEN.finditer(text)]
        self.at = 0

    @property
    def token(self) -> str:
        """The token to be read next; "" at the end."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    @property
    def column(self) -> int:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text.rstrip())

    @property
    def spaced(self) -> bool:
        """True if the next token stands at the start or behind a space."""
        return not self.text[: self.column].rstrip() or self.text[self.column - 1].isspace()

    @property
    def is_name(self) -> bool:
        return self.token.isidentifier()

    def take(self, token: str) -> bool:
        """Skip the next token if it is this one."""
        is_next = self.token == token
        self.at += is_next
        return is_next

    def expect(self, token: str, why: str) -> None:
        if not self.take(token):
            self.fail(why)

    def name(self, expected: str) -> str:
        return self._next(expected, self.is_name)

    def number(self, expected: str) -> int:
        return int(self._next(expected, self.token.isdecimal()))

    def _next(self, expected: str, fits: bool) -> str:
        if not fits:
            self.fail(f"{expected} must stand here, not {self.token!r}" if self.token else f"{expected} is missing")
        self.at += 1
        return self.tokens[self.at - 1][0]

    def axis(self) -> tuple[str, int, int | None]:
        """Reads a mesh axis, `tensor` (no size), or a part of one, `tensor:(2)4`: name, `pre` and size."""
        name = self.name("a mesh axis")
        if not self.take(":"):
            return name, 1, None
        self.expect("(", "a part of an axis is written axis:(pre)size, as in tensor:(1)8")
        pre = self.number("the product of the more major parts")
        self.expect(")", "a part of an axis is written axis:(pre)size, as in tensor:(1)8")
        return name, pre, self.number("the size of the part")

    def one_or_more(self, read: Callable[[], T]) -> tuple[T, ...]:
        """Reads one item, or several in parentheses."""
        if not self.take("("):
            return (read(),)
        items = []
        while not self.take(")"):
            items.append(read())
        return tuple(items)

    def numbers(self, expected: str) -> tuple[int, ...]:
        """Reads `[5 3 8 0]`, with or without commas."""
        self.expect("[", f"{expected} must stand here")
        out: list[int] = []
        while self.token.isdecimal():
            out.append(self.number(expected))
            self.take(",")
        self.expect("]", f"{self.token!r} is not a size" if self.token else "the ']' is missing")
        return tuple(out)

    def fail(self, why: str) -> NoReturn:
        head = f"{self.kind} {self.text!r} cannot be read: {why}"
        raise ShardingError(f"{head}\n    {self.text}\n    {' ' * self.column}^", rule=self.rule)
