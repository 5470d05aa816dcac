"""Drops gathered values, and scatters partial sums, where a program turns from forward to backward or back.

Values marked `regather` are gathered again in the next pass, as in ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
Sums that a later microbatch adds to are scattered, as in MiCS (Zhang et al. 2022, arXiv:2205.00119). So no whole copy
of either is held while other layers run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardlib.compiler.graph.ir import Graph, Op, Value, viewed
from shardlib.compiler.lower.value_layouts import Values


class Between:
    """Tracks the values to drop between two passes; `passes` maps every op to the number of its pass."""

    def __init__(self, values: Values, graph: Graph) -> None:
        self.values = values
        self.again = [x for x in graph.values() if x.again]
        self.passes = _passes(graph) if self.again else {op: int(op.backward) for op in graph.ops}
        self._now = 0
        self._waiting: dict[int, list[tuple[Op, Value]]] = defaultdict(list)
        for op in graph.ops if self.again else ():
            for value in op.operands:
                producer = viewed(value).op
                if (
                    producer is not None
                    and producer.backward
                    and op.backward
                    and self.passes[producer] < self.passes[op]
                ):
                    self._waiting[self.passes[producer]].append((op, value))

    def turn(self, op: Op) -> list[tuple[Op, Value]]:
        """Drops gathered values if `op` begins another pass.

        Returns the partial sums that a later pass reads, each with its reader.
        """
        if not self.again or self.passes[op] == self._now:
            return []
        before, self._now = self._now, self.passes[op]
        for value in self.again:
            self.values.forget(value)
        return [
            (reader, value) for reader, value in self._waiting[before] if self.values.partial_form(value) is not None
        ]


def _passes(graph: Graph) -> Mapping[Op, int]:
    """Maps each op to the number of changes of direction before it."""
    passes, n, backward = {}, 0, False
    for op in graph.ops:
        n += op.backward != backward
        passes[op], backward = n, op.backward
    return passes
