"""The user's source lines that a page shows, with the lines around them."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import Any

from shardlib.compiler.plan.page.tables import Strings
from shardlib.core.source_lines import Line, format_path_line

AROUND = 8  # lines shown before and after a line of the program


class SourceLines:
    """Numbers the source lines of one plan; equal places have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._lines: list[Line | None] = []
        self._labels: list[str] = []

    def number(self, line: Line | None) -> int:
        """Returns the position of a line in the table."""
        place = ("", 0) if line is None or not line.file else (line.file, line.lineno)
        if place not in self._numbers:
            self._numbers[place] = len(self._lines)
            self._lines.append(line)
            self._labels.append(format_path_line(line))
        return self._numbers[place]

    def label(self, line: Line | None) -> str:
        """Returns the place of a line as text: `models/mlp.py:12`."""
        return self._labels[self.number(line)]

    def number_of_label(self, label: str) -> int:
        """Returns the position of the line at a place; -1 if it is not in the table."""
        return self._labels.index(label) if label in self._labels else -1

    def table(self, strings: Strings) -> dict[str, Any]:
        """Returns a row per line: the label of its file, its number there (0 for no line), its text, its function."""
        rows = []
        for line, label in zip(self._lines, self._labels, strict=True):
            file, _, number = label.rpartition(":")
            is_line = line is not None and bool(line.file)
            rows.append(
                (file if is_line else "the results", int(number) if is_line else 0, line.text if line else "",
                 line.function if line else "")
            )  # fmt: skip
        return strings.table({"file": str, "number": int, "text": str, "function": str}, rows)

    def files(self) -> list[dict[str, Any]]:
        """Returns per file the stretches of its text around the lines: the first line's number, and the lines.

        Only the program's own lines are listed if the file is gone, or changed since it was traced.
        """
        files: dict[str, list[Line]] = {}
        for line in self._lines:
            if line is not None and line.file:
                files.setdefault(line.file, []).append(line)
        return [
            {"file": format_path_line(lines[0]).rpartition(":")[0], "stretches": _stretches(file, lines)}
            for file, lines in files.items()
        ]


def _stretches(file: str, lines: Iterable[Line]) -> list[tuple[int, list[str]]]:
    own = {line.lineno: line.text for line in lines}
    text = linecache.getlines(file)
    if any(number > len(text) or text[number - 1].strip() != content for number, content in own.items()):
        return [(number, [own[number]]) for number in sorted(own)]
    shown = sorted({k for n in own for k in range(max(n - AROUND, 1), min(n + AROUND, len(text)) + 1)})
    stretches: list[tuple[int, list[str]]] = []
    for number in shown:
        if not stretches or stretches[-1][0] + len(stretches[-1][1]) < number:
            stretches.append((number, []))
        stretches[-1][1].append(text[number - 1].rstrip())
    return stretches
