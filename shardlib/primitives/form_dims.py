"""The interface by which a local form asks for its device's elements of a dim."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """A device's elements of a dim: the first index, the number, and the size of the whole dim."""

    offset: int
    size: int
    whole: int


class FormDims(Protocol):
    """Questions of a local form about a dim of its rule.

    The compiler emits the form once for all devices with equal answers, so a form should ask only for what it uses.
    """

    def piece(self, name: str) -> Piece: ...
    def share(self, name: str) -> int: ...
    def shares(self, name: str) -> list[int]: ...
    def place(self, name: str) -> int: ...
