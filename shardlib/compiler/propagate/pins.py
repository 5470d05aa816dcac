"""Pins: the layouts that annotations and placed arguments fix, and that no decision may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.compiler.graph.ir import Op, Value
from shardlib.sharding.placement import FixedLayout

# Identifies a pin: the input or result of `shard`, the position of the output, or the op that enters a shard_map body.
PinKey = Value | int | Op


@dataclass(frozen=True)
class Pins:
    """The pinned layouts of one graph."""

    values: Mapping[Value, FixedLayout]  # of inputs, and of results of `shard` and of shard_map bodies
    outputs: Mapping[int, FixedLayout] = field(default_factory=dict)  # by position
    body_inputs: Mapping[Op, FixedLayout] = field(default_factory=dict)  # of arguments, by the op that enters the body
