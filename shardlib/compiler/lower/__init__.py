"""Lowers a graph and its decisions to the per-device program with explicit collectives."""

from __future__ import annotations

from shardlib.compiler.lower.count_comm import MessageCounter
from shardlib.compiler.lower.lowering import Part, lower, lower_in_parts
from shardlib.compiler.program.steps import Program

__all__ = ["MessageCounter", "Part", "Program", "lower", "lower_in_parts"]
