"""The programs and plans that a jitted function keeps, and facts about its earlier calls."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from shardlib.compiler.plan.plan import Plan
from shardlib.frontend.guards.mutable_places import MutablePlaces
from shardlib.frontend.guards.number_guards import NumberGuards
from shardlib.frontend.guards.recompile_reasons import CallRecord
from shardlib.jit.call.execute import Entry
from shardlib.tensor.replicas import Verifier

PROGRAMS, PLANS = 64, 8  # most that a function keeps

T = TypeVar("T")
_NONE: list[Any] = []


@dataclass(frozen=True)
class Ready:
    """A program that can run; `call` takes the leaves of a call, and its results may have a history."""

    entry: Entry
    call: Callable[[list[Any]], Any]
    plan: Callable[[], Plan | None]

    def verified(self, verifier: Verifier) -> Ready:
        """Returns the same program with replicas among its inputs compared, in the calls that `verifier` counts."""
        mesh, name, call = self.entry.mesh, self.entry.name, self.call
        inputs = [(x.name, x.leaf) for x in self.entry.inputs if x.leaf >= 0]

        def verify_and_call(leaves: list[Any]) -> Any:
            if verifier.is_due():
                verifier.compare(mesh, name, {label: leaves[i] for label, i in inputs})
            return call(leaves)

        return replace(self, call=verify_and_call)


class Kept(OrderedDict[Any, list[tuple[T, NumberGuards]]], Generic[T]):
    """At most `limit` items under keys; those under one key serve different numbers.

    Beyond the limit, an item is dropped from the key whose newest item is the oldest; `find` does no bookkeeping.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def find(self, key: Any, leaves: list[Any]) -> tuple[T, list[Any]] | None:
        """Returns an item that serves a call, and the leaves for it."""
        item: T
        served: NumberGuards
        for item, served in reversed(self.get(key, _NONE)):  # the newest knows most of the function's own changes
            if (completed := served.leaves(leaves)) is not None:
                return item, completed
        return None

    def keep(self, key: Any, item: T, served: NumberGuards) -> None:
        """Adds an item for the calls that it serves; the key None is not kept."""
        if key is None:
            return
        self.setdefault(key, []).append((item, served))
        self.move_to_end(key)
        while sum(map(len, self.values())) > self.limit:
            oldest = next(iter(self))
            self[oldest].pop(0)
            if not self[oldest]:
                del self[oldest]


class Programs:
    """The programs and plans of one jitted function, or of a jitted method of one object."""

    def __init__(self) -> None:
        self.entries: Kept[Ready] = Kept(PROGRAMS)
        self.plans: Kept[tuple[Plan, list[Any]]] = Kept(PLANS)  # with the objects that their keys identify
        self.lock = threading.RLock()  # while compiling
        self.last: CallRecord | None = None
        self.retraces: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.asks = False  # the function asks where arguments lie in memory
        self.changing = MutablePlaces(grads=False)
        self.transformed: Any = None  # calls inside transforms of torch.func

    @property
    def noted(self) -> tuple[CallRecord | None, list[str], Counter[str]]:
        """The record of earlier compilations, to be restored if one was for nothing."""
        return self.last, [*self.retraces], Counter(self.reasons)

    @noted.setter
    def noted(self, noted: tuple[CallRecord | None, list[str], Counter[str]]) -> None:
        self.last, self.retraces, self.reasons = noted
