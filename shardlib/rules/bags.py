"""Bags and segments: rows of a table added up in groups."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
