"""Reads short texts token by token, and points at the character where one goes wrong.

Specs and layouts are one-line texts of names, numbers and a few signs; both are read with a `Scanner`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from shardlib.core.errors import ShardingError

T = TypeVar("T")
_TOKEN = re.compile(r"\.\.\.|[^\W\d]\w*|\d+|\S")


class Scanner:
    """The tokens of one text: `...`, names, numbers, and single characters.

    Example:
        >>> scan = Scanner("ff@tensr)", "spec", rule="dims are separated by spaces")
        >>> scan.name("a dim"), scan.take("@"), scan.name("an axis")
        ('ff', True, 'tensr')
        >>> scan.fail("nothing is open here")
        Traceback (most recent call last):
            ...
        shardlib.ShardingError: spec 'ff@tensr)' cannot be read: nothing is open here
            ff@tensr)
                    ^
        Rule: dims are separated by spaces
    """

    def __init__(self, text: str, what: str, *, rule: str) -> None:
        self.text, self.what, self.rule = text, what, rule
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
        """Whether the next token stands at the start or behind a space."""
        return not self.text[: self.column].rstrip() or self.text[self.column - 1].isspace()

    @property
    def is_name(self) -> bool:
        return self.token.isidentifier()

    def take(self, token: str) -> bool:
        """Skip the next token if it is this one."""
        if found := self.token == token:
            self.at += 1
        return found

    def expect(self, token: str, why: str) -> None:
        if not self.take(token):
            self.fail(why)

    def name(self, what: str) -> str:
        if not self.is_name:
            self.fail(f"{what} must stand here, not {self.token!r}" if self.token else f"{what} is missing")
        self.at += 1
        return self.tokens[self.at - 1][0]

    def number(self, what: str) -> int:
        if not self.token.isdecimal():
            self.fail(f"{what} must stand here, not {self.token!r}" if self.token else f"{what} is missing")
        self.at += 1
        return int(self.tokens[self.at - 1][0])

    def one_or_more(self, read: Callable[[], T]) -> tuple[T, ...]:
        """What is read, or several of it in parentheses."""
        if not self.take("("):
            return (read(),)
        found = []
        while not self.take(")"):
            found.append(read())
        return tuple(found)

    def numbers(self, what: str) -> tuple[int, ...]:
        """`[5 3 8 0]`; commas between the numbers do no harm."""
        self.expect("[", f"{what} must stand here")
        out: list[int] = []
        while self.token.isdecimal():
            out.append(self.number(what))
            self.take(",")
        self.expect("]", f"{self.token!r} is not a size" if self.token else "the ']' is missing")
        return tuple(out)

    def fail(self, why: str) -> NoReturn:
        head = f"{self.what} {self.text!r} cannot be read: {why}"
        raise ShardingError(f"{head}\n    {self.text}\n    {' ' * self.column}^", rule=self.rule)
