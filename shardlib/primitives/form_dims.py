"""Local forms ask a device which elements of a dim it has."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """A device's elements of a dim: the index of the first one in the whole, how many, and how many there are."""

    offset: int
    size: int
    whole: int


class FormDims(Protocol):
    """What a local form may ask of a dim of its rule. It is run for every kind of device, and every number that it is
    told, and that differs, tells devices apart: so it asks for no more than it uses."""

    def piece(self, name: str) -> Piece: ...
    def share(self, name: str) -> int: ...
    def shares(self, name: str) -> list[int]: ...
    def place(self, name: str) -> int: ...
