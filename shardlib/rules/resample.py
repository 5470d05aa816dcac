"""Interpolation, padding by reflection and replication, and other re-arrangements of space."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
