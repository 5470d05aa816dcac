"""Matrix factorisations and solvers: the matrix dims stay whole, leading dims are a batch."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
