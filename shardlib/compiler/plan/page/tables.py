"""Compact JSON tables: rows of numbers, and texts by their position in one list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Strings:
    """Every text of a page once; `position` returns its place in `texts`."""

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._positions)

    def position(self, text: str) -> int:
        return self._positions.setdefault(text, len(self._positions))

    def table(self, columns: Mapping[str, type], rows: Iterable[Iterable[Any]]) -> dict[str, Any]:
        """Returns a table whose columns of type `str` hold positions; `readTable` in elements.js reads it.

        Example:
            >>> strings = Strings()
            >>> strings.table({"kind": str, "bytes": int}, [("all_reduce", 8), ("all_gather", 4), ("all_reduce", 2)])
            {'columns': {'kind': 'text', 'bytes': 'number'}, 'rows': [[0, 8], [1, 4], [0, 2]]}
            >>> strings.texts
            ['all_reduce', 'all_gather']
        """
        is_text = [kind is str for kind in columns.values()]
        kinds = {name: "text" if kind is str else "number" for name, kind in columns.items()}
        return {
            "columns": kinds,
            "rows": [
                [self.position(x) if text else _compact(x) for x, text in zip(row, is_text, strict=True)]
                for row in rows
            ],
        }


def _compact(number: float) -> float:
    """Writes whole floats as integers."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
