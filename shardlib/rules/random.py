"""Random numbers: every element is drawn from its place in the whole tensor."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
