"""Decisions -> the per-device program with explicit collectives."""

from __future__ import annotations

from shardlib.lower.inside import Senders
from shardlib.lower.lowering import Part, lower, lower_in_parts
from shardlib.program.steps import Program

__all__ = ["Part", "Program", "Senders", "lower", "lower_in_parts"]
