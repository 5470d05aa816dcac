"""Sizes of memory as users write them."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral
from typing import Any

from shardlib.core.errors import ShardingError

_UNITS = {"B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate(("k", "M", "G", "T"), 1)
    for binary in ("", "i")
}
_UNITS["KiB"] = _UNITS.pop("kiB")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*")


def nbytes(size: Any, what: str) -> int:
    """Bytes, of a number of them or a text with its unit; `what` is called so in errors.

    Raises `ShardingError` for a text without a unit, and for what is not positive.

    Example:
        >>> nbytes("25MiB", "bucket"), nbytes("1.5 GB", "cap"), nbytes(512, "memory")
        (26214400, 1500000000, 512)
    """
    found, match = size, None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        found = None if match is None or match[2] not in _UNITS else int(Decimal(match[1]) * _UNITS[match[2]])
    if not isinstance(found, Integral) or isinstance(found, bool) or found < 1:
        units = ", ".join(sorted(_UNITS, key=_UNITS.__getitem__))
        meant = _meant(match[2]) if match else ""
        raise ShardingError(
            f"{what}={size!r} is no size",
            rule=f"a size is a whole number of bytes above 0, or a text with one of the units {units}",
            remedy=f'{what}="{match[1]}{meant}"' if match and meant else f'{what}="{_EXAMPLES.get(what, "25MiB")}"',
        )
    return int(found)


def _meant(unit: str) -> str:
    """The unit that somebody has written in other letters, or without its last."""
    return next((x for x in _UNITS if x != unit and x.lower() in (unit.lower(), f"{unit}B".lower())), "")


_EXAMPLES = {"memory": "72GiB", "cap": "2GiB"}
