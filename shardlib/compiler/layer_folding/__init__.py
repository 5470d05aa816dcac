"""Layer folding: plans a short graph that has one layer in place of many equal ones, and unrolls its program."""

from __future__ import annotations

from shardlib.compiler.layer_folding.expand_decisions import spread_decisions
from shardlib.compiler.layer_folding.expand_program import unroll
from shardlib.compiler.layer_folding.fold_graph import Folded, fold

__all__ = ["Folded", "fold", "spread_decisions", "unroll"]
