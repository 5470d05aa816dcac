"""Planning one layer in place of many that are alike: a short graph for a long one, and its program written out."""

from __future__ import annotations

from shardlib.folding.folded import Folded, fold
from shardlib.folding.spreading import spread
from shardlib.folding.unrolled import unroll

__all__ = ["Folded", "fold", "spread", "unroll"]
