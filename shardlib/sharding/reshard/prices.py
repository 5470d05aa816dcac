"""Prices of compiler decisions: seconds of arithmetic, of memory and of collectives on the mesh's machine.

A message costs the latency of one hop, plus its bytes over the rate of a ring along its axes. That is close for large
messages, and for small ones in trees, which have few hops; `Plan.simulate` is more precise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import PRESETS, Machine
from shardlib.sharding.mesh.mesh import Mesh

_PAIRWISE = ("all_to_all", "ppermute")  # each device sends to every other one directly


class Prices:
    """Prices on a machine whose devices form a mesh of these `axes`; `Prices.for_mesh(mesh)` caches them."""

    def __init__(self, machine: Machine, axes: Mapping[str, int]) -> None:
        self.machine, self.axes = machine, axes
        self.bandwidth = machine.device.bandwidth  # bytes/s of memory
        links = machine.inner, machine.outer, *machine.links.values()
        self.fastest = max(link.bandwidth for link in links)  # of all links
        # No collective exceeds this rate: of pairwise messages between two nodes, half stay inside a node.
        self.highest_rate = max(self.fastest, 2 * machine.outer.bandwidth / machine.outer.sharing)
        self._links: dict[tuple[tuple[Axis, ...], bool], tuple[float, float]] = {}

    @staticmethod
    def for_mesh(mesh: Mesh) -> Prices:
        """Returns the prices on a mesh; without a machine, all links cost the same."""
        return DEFAULT_PRICES if mesh.machine is None else _prices(mesh.machine, tuple(mesh.axes.items()))

    def flops(self, itemsize: int) -> float:
        """Returns FLOP/s of products of floating-point numbers of `itemsize` bytes."""
        return self.machine.device.rate("bf16" if itemsize <= 2 else "f32" if itemsize <= 4 else "f64", itemsize)

    def latency(self, axes: tuple[Axis, ...]) -> float:
        """Returns the minimum seconds of a message along these axes."""
        return self.link(axes)[0]

    def rate(self, axes: tuple[Axis, ...]) -> float:
        """Returns the bytes/s that a device sends along these axes."""
        return self.link(axes)[1]

    def comm_seconds(self, axes: tuple[Axis, ...], nbytes: float, kind: str = "") -> float:
        """Returns the seconds of a collective along these axes in which each device sends `nbytes`.

        In an all_to_all or ppermute every device sends through its own share of a node's cards. Other collectives run
        in rings, which enter and leave a node once.
        """
        latency, rate = self.link(axes, kind in _PAIRWISE)
        return latency + nbytes / rate

    @property
    def of_bytes(self) -> Prices:
        """The same prices without latencies."""
        return _WithoutLatency(self)

    @property
    def counting(self) -> Prices:
        """Prices that count bytes: one byte costs one second, whatever the axes."""
        return _Counting(self.machine, self.axes)

    def link(self, axes: tuple[Axis, ...], pairwise: bool = False) -> tuple[float, float]:
        """Returns latency in seconds and bytes/s of messages along these axes, in rings or `pairwise`."""
        if (price := self._links.get((axes, pairwise))) is None:
            span = self.machine.span(axes, self.axes)
            rate = span.pairwise if pairwise else span.ring
            price = self._links[axes, pairwise] = (span.outer if span.far > 1 else span.inner).latency, rate
        return price


@lru_cache(maxsize=64)
def _prices(machine: Machine, axes: tuple[tuple[str, int], ...]) -> Prices:
    return Prices(machine, MappingProxyType(dict(axes)))


class _Uniform(Prices):
    """Prices where all links are alike, whatever the axes."""

    def link(self, axes: tuple[Axis, ...], pairwise: bool = False) -> tuple[float, float]:
        return self.machine.outer.latency, self.machine.outer.bandwidth


class _WithoutLatency(Prices):
    def __init__(self, base: Prices) -> None:
        super().__init__(base.machine, base.axes)
        self._base = base

    def link(self, axes: tuple[Axis, ...], pairwise: bool = False) -> tuple[float, float]:
        return 0.0, self._base.link(axes, pairwise)[1]


class _Counting(Prices):
    def link(self, axes: tuple[Axis, ...], pairwise: bool = False) -> tuple[float, float]:
        return 0.0, 1.0


DEFAULT_PRICES: Prices = _Uniform(PRESETS["node"], {})
