"""Estimates the seconds of a collective: a latency per hop, and its bytes over the slowest link (alpha-beta model).

The cheapest algorithm is chosen, as in NCCL. All groups of a mesh communicate at once, so devices share the network
cards of their node. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005), for rings, trees and exchanges; by node, as in NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardlib.sharding.mesh.machine import Span


class Transfer(NamedTuple):
    """The algorithm of a message, its seconds, and True if it leaves the node (`far`)."""

    algorithm: str
    seconds: float
    far: bool


def transfer(kind: str, wire: float, span: Span) -> Transfer:
    """Returns the cheapest algorithm for a collective in which each device would send `wire` bytes by a ring."""
    if span.size == 1:
        return Transfer("nothing", 0.0, False)
    ways = {name: seconds(wire, span) for name, seconds in _WAYS[kind].items()}
    name = min(ways, key=ways.__getitem__)
    return Transfer(name, ways[name], span.far > 1)


def _ring(wire: float, s: Span) -> float:
    """Once round all members, node by node."""
    hops = (s.size - s.far) * s.inner.latency + (s.far * s.outer.latency if s.far > 1 else 0.0)
    return hops + wire / s.ring


def _both(wire: float, s: Span) -> float:
    """Twice round the ring: reduce, then broadcast."""
    return 2 * _ring(wire / 2, s)


def _tree(wire: float, s: Span) -> float:
    """Up and down a binary tree: few hops, and the whole value on every link."""
    whole = wire * s.size / (s.size - 1)
    hops = 2 * (math.ceil(math.log2(s.near)) * s.inner.latency + math.ceil(math.log2(s.far)) * s.outer.latency)
    return hops + whole / s.ring


def _by_node(wire: float, s: Span) -> float:
    """Between nodes first, each member with its counterparts, then inside (for a reduction the other way round)."""
    if s.near == 1 or s.far == 1:
        return math.inf
    shard = wire / (s.size - 1)
    outside = (s.far - 1) * (s.outer.latency + shard / s.shared)
    return outside + (s.near - 1) * (s.inner.latency + s.far * shard / s.inner.bandwidth)


def _sum_by_node(wire: float, s: Span) -> float:
    return 2 * _by_node(wire / 2, s)


def _exchange(wire: float, s: Span) -> float:
    """A message from each member to each; those to other nodes share the cards, those inside overlap with them."""
    shard = wire / (s.size - 1)
    inside = s.inner.latency + (s.near - 1) * shard / s.inner.bandwidth
    return inside if s.far == 1 else max(inside, s.outer.latency + (s.size - s.near) * shard / s.shared)


def _pass(wire: float, s: Span) -> float:
    """A message from each member to one other, in another node for some."""
    return s.inner.latency + wire / s.inner.bandwidth if s.far == 1 else s.outer.latency + wire / s.shared


_WAYS: Mapping[str, Mapping[str, Callable[[float, Span], float]]] = {
    "all_gather": {"ring": _ring, "by node": _by_node},
    "reduce_scatter": {"ring": _ring, "by node": _by_node},
    "all_reduce": {"ring": _both, "tree": _tree, "by node": _sum_by_node},
    "all_to_all": {"exchange": _exchange},
    "ppermute": {"pass": _pass},
}
