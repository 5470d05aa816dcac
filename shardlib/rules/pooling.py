"""Pooling: batch and channels pass through; a cut spatial dim exchanges its borders."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
