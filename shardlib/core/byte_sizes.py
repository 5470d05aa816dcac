"""Parses sizes of memory, and counts the bytes of files."""

from __future__ import annotations

import contextlib
import re
from decimal import Decimal
from numbers import Integral
from pathlib import Path
from typing import Any

from shardlib.core.errors import ShardingError

_UNITS = {"B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate(("k", "M", "G", "T"), 1)
    for binary in ("", "i")
}
_UNITS["KiB"] = _UNITS.pop("kiB")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*")


def nbytes(size: Any, name: str) -> int:
    """Converts a number of bytes, or a text with a unit, to bytes; errors call it `name`.

    Raises `ShardingError` for a text without a unit, and for a size that is not positive.
    """
    count, match = size, None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        count = None if match is None or match[2] not in _UNITS else int(Decimal(match[1]) * _UNITS[match[2]])
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        units = ", ".join(sorted(_UNITS, key=_UNITS.__getitem__))
        unit = _intended_unit(match[2]) if match else ""
        raise ShardingError(
            f"{name}={size!r} is no size",
            rule=f"a size is a whole number of bytes above 0, or a text with one of the units {units}",
            remedy=f'{name}="{match[1]}{unit}"' if match and unit else f'{name}="{_EXAMPLES.get(name, "25MiB")}"',
        )
    return int(count)


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of the files in a folder, to which others may write meanwhile."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # it has been renamed
            total += path.stat().st_size
    return total


def _intended_unit(unit: str) -> str:
    """Returns the unit that differs from `unit` in case or a missing "B"; "" if there is none."""
    return next((x for x in _UNITS if x != unit and x.lower() in (unit.lower(), f"{unit}B".lower())), "")


_EXAMPLES = {"memory": "72GiB", "cap": "2GiB"}
