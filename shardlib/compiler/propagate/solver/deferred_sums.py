"""Sums that go on through ops which are linear in them: the estimate has them where they are made, and they are paid
where they end, which may be little (`(v * gradient).sum()`)."""

from __future__ import annotations

import math
from collections import defaultdict

from shardlib.compiler.graph.ir import Op, Value, is_zero
from shardlib.compiler.propagate.solver.search import Search
from shardlib.sharding.mesh.axis import Axis

_Sum = tuple[tuple[Axis, ...], float, float]  # over which axes; seconds in the estimate, and as it is now


def unpaid(search: Search) -> float:
    """Seconds that the estimate of what is decided has, and nobody pays."""
    return _Travels(search).unpaid()


class _Travels:
    def __init__(self, search: Search) -> None:
        self.units, self.prices, self.search = search.problem.units, search.problem.prices, search
        self.reads = self.units.reads()
        ops = search.problem.graph.ops
        self.ops = [op for op in ops if op in self.units.unit and op.rule is not None and not op.transparent]
        self.readers = defaultdict[Value, dict[Op, None]](dict)
        for op in self.ops:
            for value in op.operands:
                if value in self.units.roots:
                    self.readers[self.units.root(value)[0]][op] = None
        self.owing = dict[Value, _Sum]()

    def unpaid(self) -> float:
        gone = set[Value]()
        for op in self.ops:
            self._begin(op)
            terms = self._terms(op)
            (result, *others) = op.results
            if not terms or others or result is None or result in self.owing or not all(map(self._goes_on, terms)):
                continue
            sums, gone = [self.owing[term] for term in terms], gone | {*terms}
            (axes, _, now), met = sums[0], len(terms) > 1 and all(now == seconds for _, seconds, now in sums)
            ends = now * result.nbytes / max(terms[0].nbytes, 1)
            shares = [seconds / len(self.readers[x]) for x, (_, seconds, _) in zip(terms, sums, strict=True)]
            self.owing[result] = axes, ends if met else sum(shares), ends
        return sum(seconds - now for value, (_, seconds, now) in self.owing.items() if value not in gone)

    def _begin(self, op: Op) -> None:
        """Note which sums an op owes."""
        cuts = self.search.cut(op)
        for index, result in enumerate(op.results):
            slots, owed = self.units.made.get((op, index), ((), ()))
            if result is not None and (axes := tuple(a for s in owed for a in cuts[s])):
                ways = math.prod(a.size for s in slots if s is not None for a in cuts[s])
                seconds = self.prices.comm_seconds(axes, 2 * result.nbytes / ways) * op.times
                self.owing[result] = axes, seconds, seconds

    def _terms(self, op: Op) -> list[Value]:
        """The sums that an op is linear in, all over the same axes."""
        assert op.rule is not None
        for together in op.rule.linear:
            read = (op.operands[i] for i in sorted(together) if not is_zero(op.operands[i]))
            roots = [self.units.root(x)[0] if x in self.units.roots else x for x in read]
            if roots and all(x in self.owing and self.owing[x][0] == self.owing[roots[0]][0] for x in roots):
                return roots
        return []

    def _goes_on(self, root: Value) -> bool:
        """Whether all who read a sum are linear in it, make nothing larger of it, and are not cut over its axes."""
        readers, axes = self.readers[root], self.owing[root][0]
        made = sum(r.nbytes for op in readers for r in op.results if r is not None)
        return (
            len(readers) == self.reads[root]
            and made <= root.nbytes
            and all(root in self._terms(op) and len(op.results) == 1 for op in readers)
            and not any(a in axes for op in readers for of in self.search.cut(op) for a in of)
        )
