"""Figures of matplotlib, which is an optional dependency."""

from __future__ import annotations

from typing import Any

from shardlib.core.errors import ShardingError


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure`, sized in inches; raises `ShardingError` without matplotlib."""
    try:
        from matplotlib.figure import Figure  # takes seconds to import
    except ImportError as error:
        raise ShardingError(
            "a plot needs matplotlib, which is not installed", remedy="pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
