"""How many examples a property is tried on."""

from __future__ import annotations

import os


def examples(n: int) -> int:
    """So many, or as many times more as `EXAMPLES` says (`make slow`: 4)."""
    return n * int(os.environ.get("EXAMPLES", "1"))
