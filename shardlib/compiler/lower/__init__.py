"""Decisions -> the per-device program with explicit collectives."""

from __future__ import annotations

from shardlib.compiler.lower.count_comm import Senders
from shardlib.compiler.lower.lowering import Part, lower, lower_in_parts
from shardlib.compiler.program.steps import Program

__all__ = ["Part", "Program", "Senders", "lower", "lower_in_parts"]
