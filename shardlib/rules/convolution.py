"""Convolutions: batch, channels and space; a cut spatial dim exchanges its borders."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
