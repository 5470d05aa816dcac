"""Matrices beside the plain products: diagonals, traces, distances, complex numbers as pairs."""

from __future__ import annotations

from shardlib.rules.rule import RuleFn

ROWS: dict[str, RuleFn | str] = {}
