"""What decisions pay: seconds of arithmetic, of memory, and of what is sent along some axes, on the mesh's machine.

A message costs the latency of one hop, and its bytes over what a ring along its axes goes at. Small ones travel
together and trees have few hops, so that is near what they take; `Plan.simulate` asks closer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import PRESETS, Machine
from shardlib.sharding.mesh.mesh import Mesh

_APART = ("all_to_all", "ppermute")


class Prices:
    """The prices on a machine whose devices stand in a mesh of such `axes`; there is one of each, `Prices.of(mesh)`.

    Example:
        >>> here, there = (Prices.of(Mesh.abstract(data=4, tensor=8, machine=name)) for name in ("node", "h100"))
        >>> data, tensor = (Axis(name, size, 1, size) for name, size in (("data", 4), ("tensor", 8)))
        >>> here.sent((data,), 3e9) == here.sent((tensor,), 3e9)
        True
        >>> there.sent((data,), 3e9) > 7 * there.sent((tensor,), 3e9)
        True
    """

    def __init__(self, machine: Machine, axes: Mapping[str, int]) -> None:
        self.machine, self.axes = machine, axes
        self.bandwidth = machine.device.bandwidth  # bytes/s of memory
        self.fastest = max(x.bandwidth for x in (machine.inner, machine.outer, *machine.links.values()))  # of any links
        self._links: dict[tuple[tuple[Axis, ...], bool], tuple[float, float]] = {}

    @staticmethod
    def of(mesh: Mesh) -> Prices:
        """The prices on a mesh; where it names no machine all links are alike, and all meshes."""
        return USUAL if mesh.machine is None else _prices(mesh.machine, tuple(mesh.axes.items()))

    def flops(self, itemsize: int) -> float:
        """FLOP/s of products of floating-point numbers of so many bytes."""
        return self.machine.device.rate("bf16" if itemsize <= 2 else "f32" if itemsize <= 4 else "f64", itemsize)

    def latency(self, axes: tuple[Axis, ...]) -> float:
        """Seconds that a message along these axes takes at least."""
        return self.link(axes)[0]

    def rate(self, axes: tuple[Axis, ...]) -> float:
        """Bytes/s that a device sends along these axes."""
        return self.link(axes)[1]

    def sent(self, axes: tuple[Axis, ...], nbytes: float, kind: str = "") -> float:
        """Seconds of a collective along these axes in which each device sends so many bytes.

        What is exchanged or permuted goes from each device by itself, through its share of a node's cards; all else
        goes round in rings, and enters and leaves a node once.
        """
        latency, rate = self.link(axes, kind in _APART)
        return latency + nbytes / rate

    @property
    def of_bytes(self) -> Prices:
        """The same, but for bytes alone: messages take no time of their own."""
        return _OfBytes(self)

    def link(self, axes: tuple[Axis, ...], apart: bool = False) -> tuple[float, float]:
        """Seconds that a message along these axes takes at least, and bytes/s behind that; `apart`: as `sent` says."""
        if (known := self._links.get((axes, apart))) is None:
            span = self.machine.span(axes, self.axes)
            rate = span.apart if apart else span.ring
            known = self._links[axes, apart] = (span.outer if span.far > 1 else span.inner).latency, rate
        return known


@lru_cache(maxsize=64)
def _prices(machine: Machine, axes: tuple[tuple[str, int], ...]) -> Prices:
    return Prices(machine, MappingProxyType(dict(axes)))


class _Usual(Prices):
    """All links are alike, so nobody looks at axes."""

    def link(self, axes: tuple[Axis, ...], apart: bool = False) -> tuple[float, float]:
        return self.machine.outer.latency, self.machine.outer.bandwidth


class _OfBytes(Prices):
    """The prices of another, without latencies."""

    def __init__(self, of: Prices) -> None:
        super().__init__(of.machine, of.axes)
        self._of = of

    def link(self, axes: tuple[Axis, ...], apart: bool = False) -> tuple[float, float]:
        return 0.0, self._of.link(axes, apart)[1]


USUAL: Prices = _Usual(PRESETS["node"], {})
