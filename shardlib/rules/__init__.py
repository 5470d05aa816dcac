"""Sharding rules: what an op's dims have to do with each other, as data."""

from __future__ import annotations

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Meta, Rule, RuleFn
from shardlib.rules.table import TABLE, rule, rule_for

__all__ = ["TABLE", "Call", "LocalBuilder", "Meta", "Rule", "RuleFn", "pattern", "rule", "rule_for"]
