"""Running sums and their like: local scans, then what came before."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
