"""Where the direction of a program changes: what is gathered anew (`regather`) is given up, as ZeRO-3 does it
(Rajbhandari et al. 2020, arXiv:1910.02054), and sums that wait for those of the next micro-step are scattered, as in
MiCS (Zhang et al. 2022, arXiv:2205.00119). Neither is there whole while other layers run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardlib.compiler.graph.ir import Graph, Op, Value, viewed
from shardlib.compiler.lower.value_layouts import Values


class Between:
    """What is given up between two passes. `passes` numbers them, for every op."""

    def __init__(self, values: Values, graph: Graph) -> None:
        self.values = values
        self.again = [x for x in graph.values() if x.again]
        self.passes = _passes(graph) if self.again else {op: int(op.backward) for op in graph.ops}
        self._now = 0
        self._waiting: dict[int, list[tuple[Op, Value]]] = defaultdict(list)
        for op in graph.ops if self.again else ():
            for value in op.operands:
                made = viewed(value).op
                if made is not None and made.backward and op.backward and self.passes[made] < self.passes[op]:
                    self._waiting[self.passes[made]].append((op, value))

    def turn(self, op: Op) -> list[tuple[Op, Value]]:
        """Give up what was gathered, if `op` begins another pass.

        Returns the sums that wait for a later pass, and who reads them there.
        """
        if not self.again or self.passes[op] == self._now:
            return []
        before, self._now = self._now, self.passes[op]
        for value in self.again:
            self.values.forget(value)
        return [(reader, value) for reader, value in self._waiting[before] if self.values.owing(value) is not None]


def _passes(graph: Graph) -> Mapping[Op, int]:
    """For each op, how often the direction has changed in front of it."""
    passes, n, backward = {}, 0, False
    for op in graph.ops:
        n += op.backward != backward
        passes[op], backward = n, op.backward
    return passes
