"""Activations that torch does not tag as pointwise, and those with parameters along a dim."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
