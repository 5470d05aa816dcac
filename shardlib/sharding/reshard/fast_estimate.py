"""What reshards may take, from what happens to every axis alone: of many at once, without looking for their steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardlib.sharding.mesh.axis import Axis, ways
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.reshard.step import Axes, Cut, local_numel

Flags = NDArray[np.bool_]  # per pair of states and axis
Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Rough:
    """Estimated seconds of the direct ways of a value, whose factors have such sizes, between its `states`: its cut,
    and what is pending there. Every cut is taken for even, and no axis for one that has to leave from under another.

    The list of states may grow.
    """

    def __init__(
        self, states: Sequence[tuple[Cut, Axes]], sizes: tuple[int, ...], itemsize: int, prices: Prices
    ) -> None:
        self.states, self.sizes, self.itemsize, self.prices = states, sizes, itemsize, prices
        self._axes: list[Axis] = []
        self._place = np.empty((0, 0), np.int64)  # per state and axis: the factor that it cuts, -1 if none
        self._owed = np.empty((0, 0), np.bool_)  # whether a sum is pending over it
        self._local = np.empty(0)  # bytes on the fullest device
        # By sets of axes, as bits: devices; latency and rate along them, in rings and for what goes to each device.
        self._ways = np.ones(1)
        self._links = np.array([[[0.0, 1.0], [0.0, 1.0]]])

    def seconds(self, sources: Numbers, wants: Numbers) -> Seconds:
        """Seconds from states to others, given by their numbers: of what is pending there, some may still be here."""
        self._learn()
        have, want = self._place[sources], self._place[wants]
        owed, there, wanted = self._owed[sources] & ~self._owed[wants], have >= 0, want >= 0
        local = self._local[sources] / self._ways[self._set(wanted & ~there & ~owed)]
        scattered = self._set(owed & wanted)
        local = local / self._ways[scattered]
        exchanged, gathered = self._set(there & wanted & (have != want)), self._set(there & ~wanted)
        summed = self._set(owed & ~wanted)
        n = self._ways
        found = self._sent(scattered, local * (n[scattered] - 1))
        found += self._sent(exchanged, local * (n[exchanged] - 1) / n[exchanged], apart=True)
        found += self._sent(summed, 2 * local * (n[summed] - 1) / n[summed])
        found += self._sent(gathered, local * (n[gathered] - 1))
        return found

    def _learn(self) -> None:
        """Write down the states that are new."""
        known, new = len(self._local), self.states[len(self._local) :]
        if not new:
            return
        at = {a: i for i, a in enumerate(self._axes)}
        for cut, pending in new:
            for a in (*(a for axes in cut for a in axes), *pending):
                at.setdefault(a, len(at))
        more = (0, len(new)), (0, len(at) - len(self._axes))
        self._axes = list(at)
        self._place = np.pad(self._place, more, constant_values=-1)
        self._owed = np.pad(self._owed, more)
        for row, (cut, pending) in enumerate(new, known):
            for factor, axes in enumerate(cut):
                self._place[row, [at[a] for a in axes]] = factor
            self._owed[row, [at[a] for a in pending]] = True
        local = [local_numel(self.sizes, cut) * self.itemsize for cut, _ in new]
        self._local = np.concatenate([self._local, local])
        if more[1][1]:
            self._price()

    def _price(self) -> None:
        sets = [tuple(a for i, a in enumerate(self._axes) if bits >> i & 1) for bits in range(1 << len(self._axes))]
        self._ways = np.array([float(ways(axes)) for axes in sets])
        links = [[self.prices.link(axes, apart) if axes else (0.0, 1.0) for apart in (False, True)] for axes in sets]
        self._links = np.array(links)

    def _set(self, flags: Flags) -> Numbers:
        bits: Numbers = flags @ (1 << np.arange(len(self._axes)))
        return bits

    def _sent(self, sets: Numbers, nbytes: Seconds, *, apart: bool = False) -> Seconds:
        latency, rate = self._links[sets, int(apart)].T
        seconds: Seconds = latency + nbytes / rate
        return seconds
