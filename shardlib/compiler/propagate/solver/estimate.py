"""Estimates the cost of a decision: the seconds of the whole program.

Every value costs the reshards from the layout of its producer to every distinct layout of its readers. A partial sum is
reduced once; sums that only meet in an addition are added first and then reduced once. Every unit costs its arithmetic,
divided by the number of its shards: so replicated work costs its time.

Every cost is computed once: the cost of a value is an array over the layouts of its ends, with entries computed on
first use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlib.compiler.propagate.solver.bucket_elimination import Costs, Numbers, Table, round_costs, round_to_grain
from shardlib.compiler.propagate.solver.domains import Domain, SlotAxes, Variable
from shardlib.compiler.propagate.solver.problem import Order, Problem
from shardlib.compiler.propagate.solver.reshard_costs import LayoutCosts, ValueReshards
from shardlib.compiler.propagate.solver.value_records import UnitClass, ValueRecord
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.reshard import Prices

# The share of all arithmetic behind which the schedule hides messages, by the simulator's clock: the first layer has no
# arithmetic in front of it, and messages are unevenly spread.
_HIDES = 0.5
_FEW = 8  # choices: the tables of these have an entry for each, though several may cost the same

Choices = list[Order]  # for every unit class


@dataclass(frozen=True)
class Weights:
    """A second of messages counts as `sent` seconds of arithmetic; a hidden one as `sent * hidden`."""

    sent: float = 1.0
    hidden: float = 1.0


Free = Mapping[Variable, tuple[Domain, Numbers]]  # variables that may choose, and the choices that they may take


class Estimate:
    """Estimates the seconds of choices; `slot_axes` returns the axes on a unit's slots under a choice.

    `prices` (by default those of the problem) are paid for messages.
    """

    def __init__(
        self, problem: Problem, slot_axes: Callable[[UnitClass, Order], SlotAxes], prices: Prices | None = None
    ) -> None:
        self.problem, self.slot_axes = problem, slot_axes
        self.prices = prices or problem.prices
        self.optimistic = False  # messages inside ops count only if an earlier call computed them
        self._layouts: dict[object, LayoutCosts] = {}
        self.reshards = [self._make_reshards(record, n) for record, n in problem.records.items()]
        self._touching: dict[UnitClass, list[int]] = defaultdict(list)
        for i, reshards in enumerate(self.reshards):
            for unit_class in reshards.record.unit_classes:
                self._touching[unit_class].append(i)
        self._class_memo: list[dict[tuple[UnitClass, Order], int]] = [{} for _ in self.reshards]
        self._domain_memo: dict[tuple[int, UnitClass, Domain], Numbers] = {}
        self._merged_memo: dict[tuple[int, Variable, Domain], tuple[Numbers, Numbers]] = {}
        self._domain_seconds_memo: dict[tuple[Variable, Domain, float], Costs] = {}
        self._unit_seconds_memo: dict[tuple[UnitClass, Order], tuple[float, float]] = {}

    @property
    def evaluations(self) -> int:
        """Returns how many costs of values and units were computed."""
        return len(self._unit_seconds_memo) + sum(reshards.evaluations for reshards in self.reshards)

    @property
    def priced(self) -> int:
        """Returns how many routes between layouts were priced."""
        return sum(layouts.priced for layouts in self._layouts.values())

    def _class(self, i: int, unit_class: UnitClass, choice: Order) -> int:
        """Returns the number of the layouts that a unit class gives to its ends of record number `i`."""
        memo = self._class_memo[i]
        if (number := memo.get((unit_class, choice))) is None:
            number = memo[unit_class, choice] = self.reshards[i].number(unit_class, self.slot_axes(unit_class, choice))
        return number

    def sent(self, i: int, choices: Choices) -> float:
        """Returns the seconds of the reshards of all values that record number `i` represents."""
        reshards = self.reshards[i]
        return reshards.at(tuple([self._class(i, k, choices[k]) for k in reshards.unit_classes]))

    def _weighed(self, i: int, choices: Choices, weights: Weights) -> float:
        seconds = self.sent(i, choices) * weights.sent
        hidden = weights.hidden != 1.0 and self.reshards[i].record.hidden
        return round_to_grain(seconds * weights.hidden) if hidden else seconds

    def unit_seconds(self, unit_class: UnitClass, choice: Order) -> tuple[float, float]:
        """Returns the seconds of a unit class's arithmetic, and of the messages inside its ops."""
        if (seconds := self._unit_seconds_memo.get((unit_class, choice))) is None:
            axes = self.slot_axes(unit_class, choice)
            work, passed = self._price_unit(unit_class, axes)
            if self.optimistic and self.problem.senders[unit_class]:
                return round_to_grain(work), round_to_grain(passed)
            seconds = self._unit_seconds_memo[unit_class, choice] = (
                round_to_grain(work),
                round_to_grain(passed + self._sent_inside(unit_class, axes)),
            )
        return seconds

    def _price_unit(self, unit_class: UnitClass, axes: SlotAxes) -> tuple[float, float]:
        """Returns the seconds of arithmetic, and of tensors passed round a ring."""
        compute, total, prices = self.problem.compute[unit_class], 0.0, self.prices
        work = sum(s / math.prod(group_size(axes[i]) for i in slots) for s, slots in compute)
        for p in self.problem.passed[unit_class]:
            local = p.bytes / math.prod(group_size(axes[i]) for i in p.slots)
            around, requested = axes[p.slot], self.problem.slots[unit_class][p.slot].requests
            gathered = tuple(a for a in axes[p.leader] if a in requested and a not in around)
            passed, held = group_size(around), group_size(gathered)
            total += local * (
                p.count_received(passed) / prices.rate(around) + (held - 1) / held / prices.rate(gathered)
            )
            # All forms of attention on a sharded sequence count equally many messages, so that their bytes decide.
            total += p.times * (held > 1) * prices.latency(gathered)
            total += p.times * 2 * (passed > 1 and p.operand) * prices.latency(around)
        return work, total

    def _sent_inside(self, unit_class: UnitClass, axes: SlotAxes) -> float:
        """Returns the seconds of the messages inside ops."""
        total = 0.0
        for sender in self.problem.senders[unit_class]:
            assignment = {factor: axes[slot] for factor, slot in sender.slots if axes[slot]}
            messages = self.problem.sends(sender.op, assignment)
            total += sender.times * sum(self.prices.comm_seconds(over, nbytes, how) for how, over, nbytes in messages)
        return total

    def cost(self, unit_classes: Iterable[UnitClass], choices: Choices, weights: Weights = Weights()) -> float:
        """Returns the seconds of unit classes, with the reshards of the values at them."""
        unit_classes = [*unit_classes]
        seconds = [self.unit_seconds(unit_class, choices[unit_class]) for unit_class in unit_classes]
        moved = sum([self._weighed(i, choices, weights) for i in self._touched(unit_classes)])
        return sum(mine for mine, _ in seconds) + moved + sum(mine for _, mine in seconds) * weights.sent

    def messages(self, unit_classes: Iterable[UnitClass], choices: Choices) -> float:
        """Returns the price of the messages inside unit classes, and of the reshards of the values at them."""
        unit_classes = [*unit_classes]
        inside = sum(self.unit_seconds(unit_class, choices[unit_class])[1] for unit_class in unit_classes)
        return inside + sum(self.sent(i, choices) for i in self._touched(unit_classes))

    def is_cheaper(
        self, unit_classes: Sequence[UnitClass], choices: Choices, seconds: float, weights: Weights = Weights()
    ) -> bool:
        """Returns whether unit classes cost less than `seconds`; looks only as far as it must."""
        left = seconds - sum([self._variable_seconds((k,), choices[k], weights) for k in unit_classes])
        for i in self._touched(unit_classes):
            if left <= 0:
                return False
            left -= self._weighed(i, choices, weights)
        return left > 0

    def align_ends(self, free: Free, at_once: float) -> Iterator[dict[Variable, Order]]:
        """Yields choices that put all ends of a value into one layout: of each variable, that with the least work.

        Only for values whose variables have more than `at_once` choices together: others are searched exactly.
        """
        weights, owner = Weights(), {unit_class: variable for variable in free for unit_class in variable}
        for i, reshards in enumerate(self.reshards):
            variables = dict.fromkeys(owner[k] for k in reshards.unit_classes if k in owner)
            if math.prod(len(self._merged(i, v, *free[v])[0]) for v in variables) <= at_once:
                continue
            aligned: dict[int, dict[Variable, Order]] = defaultdict(dict)
            for v in variables:
                domain, at = free[v]
                for n in sorted(at.tolist(), key=self._domain_seconds(v, domain, weights).__getitem__):
                    choice = domain.orders[n]
                    ends = {s for k in v if k in reshards.places for s in reshards.states[k][self._class(i, k, choice)]}
                    if len(ends) == 1:
                        aligned[ends.pop()].setdefault(v, choice)
            yield from aligned.values()

    def around(self, unit_classes: Variable, choices: Choices) -> float:
        """Returns the seconds of messages inside some unit classes, and of reshards of the values at them."""
        inside = sum(self.unit_seconds(unit_class, choices[unit_class])[1] for unit_class in unit_classes)
        return inside + sum(self.sent(i, choices) for i in self._touched(unit_classes))

    def costly(self, choices: Choices, domains: Mapping[UnitClass, Domain], least: float) -> set[UnitClass]:
        """Returns the unit classes that could save more than `least` seconds, by other reshards or by less work."""
        sent = (reshards.unit_classes for i, reshards in enumerate(self.reshards) if self.sent(i, choices) > least)
        excess = (
            k
            for k, domain in domains.items()
            if sum(self.unit_seconds(k, choices[k])) - self._domain_seconds((k,), domain, Weights()).min() > least
        )
        return {*(unit_class for unit_classes in sent for unit_class in unit_classes), *excess}

    def neighbors(self, *unit_classes: UnitClass) -> tuple[UnitClass, ...]:
        """Returns unit classes, and those that share a value with one of them."""
        near = (k for i in self._touched(unit_classes) for k in self.reshards[i].unit_classes)
        return tuple(dict.fromkeys([*unit_classes, *near]))

    def worth(self, free: Free, choices: Choices, weights: Weights, least: float = 0.0) -> Free:
        """Returns the `free` variables with the choices that could cost less than the present ones.

        A choice cannot if its own work exceeds the least by more than all that could be saved. Empty if no more than
        `least` seconds could be saved.
        """
        seconds_of = {v: self._domain_seconds(v, domain, weights)[at] for v, (domain, at) in free.items()}
        floor = {v: seconds.min() for v, seconds in seconds_of.items()}
        now = sum(self._variable_seconds(v, choices[v[0]], weights) - floor[v] for v in seconds_of)
        spent = now + sum([self._weighed(i, choices, weights) for i in self._touched(k for v in free for k in v)])
        if spent <= least:
            return {}
        left = {v: (domain, at[seconds_of[v] - floor[v] <= spent]) for v, (domain, at) in free.items()}
        return {v: (domain, at) for v, (domain, at) in left.items() if len(at) > 1}

    def _variable_seconds(self, variable: Variable, choice: Order, weights: Weights) -> float:
        return sum(mine + sent * weights.sent for mine, sent in (self.unit_seconds(k, choice) for k in variable))

    def _domain_seconds(self, variable: Variable, domain: Domain, weights: Weights) -> Costs:
        """Returns the seconds of the ops of a variable, for every choice of its domain."""
        key = variable, domain, weights.sent
        if (seconds := self._domain_seconds_memo.get(key)) is None:
            seconds = np.array([self._variable_seconds(variable, choice, weights) for choice in domain.orders])
            if not (self.optimistic and any(self.problem.senders[unit_class] for unit_class in variable)):
                self._domain_seconds_memo[key] = seconds
        return seconds

    def _touched(self, unit_classes: Iterable[UnitClass]) -> list[int]:
        return sorted({i for unit_class in unit_classes for i in self._touching[unit_class]})

    def tables(
        self, free: Free, choices: Choices, weights: Weights, largest: float = math.inf, at_once: float = math.inf
    ) -> tuple[list[Table], bool]:
        """Returns the costs of `free` variables and the values at them, other choices being as in `choices`.

        Also returns whether the tables are complete: those larger than `largest` are left out, and all of them if they
        had more than `at_once` entries. A table names a variable by its first unit class.
        """
        owner = {unit_class: variable for variable in free for unit_class in variable}
        merged_of = []
        for i in self._touched(owner):
            variables = sorted({owner[k] for k in self.reshards[i].unit_classes if k in owner})
            merged_of.append((i, {v: self._merged(i, v, *free[v]) for v in variables}))
        sizes = [math.prod(len(first) for first, _ in merged.values()) for _, merged in merged_of]
        if sum(sizes) > at_once:
            return [], False
        alone = {v: self._domain_seconds(v, domain, weights)[at] for v, (domain, at) in free.items()}
        tables = []
        for size, (i, merged) in zip(sizes, merged_of, strict=True):
            if size <= largest:
                table = self._table(i, free, merged, choices, weights)
                if len(table.variables) == 1:
                    (variable,) = (v for v, (first, _) in merged.items() if len(first) > 1)
                    alone[variable] = alone[variable] + table.costs[table.classes[0]]
                elif table.variables:
                    tables.append(table)
                else:  # no choice makes a difference
                    variable = next(iter(merged))
                    alone[variable] = alone[variable] + table.costs
        unary = [Table(v[:1], costs, (np.arange(len(costs)),)) for v, costs in alone.items()]
        return [*unary, *tables], all(size <= largest for size in sizes)

    def _merged(self, i: int, variable: Variable, domain: Domain, at: Numbers) -> tuple[Numbers, Numbers]:
        """Returns one choice for each layout of the ends of record number `i`, and the layout of every choice."""
        key = i, variable, domain
        if (merged := self._merged_memo.get(key)) is None:
            codes = np.zeros(len(domain.orders), np.int64)
            for unit_class in variable:
                if unit_class in self.reshards[i].places:
                    classes = self._classes(i, unit_class, domain)
                    codes = codes * (int(classes.max()) + 1) + classes
            _, first, class_of = np.unique(codes, return_index=True, return_inverse=True)
            merged = self._merged_memo[key] = first, class_of
        first, class_of = merged
        if len(at) == len(domain.orders):
            return first, class_of
        some, class_of = np.unique(class_of[at], return_inverse=True)
        return first[some], class_of

    def _classes(self, i: int, unit_class: UnitClass, domain: Domain) -> Numbers:
        key = i, unit_class, domain
        if (classes := self._domain_memo.get(key)) is None:
            classes = self._domain_memo[key] = np.array([self._class(i, unit_class, x) for x in domain.orders])
        return classes

    def _table(
        self,
        i: int,
        free: Free,
        merged: Mapping[Variable, tuple[Numbers, Numbers]],
        choices: Choices,
        weights: Weights,
    ) -> Table:
        """Returns the table of record number `i` over the variables that make a difference there."""
        reshards = self.reshards[i]
        along = {v: n for n, v in enumerate(v for v, (first, _) in merged.items() if len(first) > 1)}
        owner = {unit_class: variable for variable in merged for unit_class in variable}
        index = []
        for unit_class in reshards.unit_classes:
            if (variable := owner.get(unit_class)) is None:
                index.append(np.array(self._class(i, unit_class, choices[unit_class])))
                continue
            states = self._classes(i, unit_class, free[variable][0])[merged[variable][0]]
            n = along.get(variable)
            index.append(states[0] if n is None else states.reshape([-1, *[1] * (len(along) - n - 1)]))
        costs = reshards.costs(index)
        factor = weights.sent * (weights.hidden if reshards.record.hidden else 1.0)
        weighed = costs if factor == 1.0 else round_costs(costs * factor)
        return Table(tuple(v[0] for v in along), weighed, tuple(merged[v][1] for v in along))

    def program_seconds(self, choices: Choices) -> tuple[float, float]:
        """Returns the seconds of arithmetic and of communication, including units without a choice."""
        mine, moved = self.decided_seconds(choices)
        return self.problem.undecided + mine, moved + sum(seconds for _, seconds in self._settled)

    def unhidden(self, choices: Choices) -> float:
        """Returns the seconds of the whole program if arithmetic hides the messages of hidden values."""
        work, sent = self.program_seconds(choices)
        hidden = sum([self.sent(i, choices) for i, reshards in enumerate(self.reshards) if reshards.record.hidden])
        hidden += sum(seconds for record, seconds in self._settled if record.hidden)
        return work + sent - hidden + max(hidden - _HIDES * work, 0.0)

    def decided_seconds(self, choices: Choices) -> tuple[float, float]:
        """Returns the seconds of arithmetic and of communication, of units with a choice."""
        seconds = [self.unit_seconds(unit_class, choice) for unit_class, choice in enumerate(choices)]
        sent = sum([self.sent(i, choices) for i in range(len(self.reshards))])
        return sum(mine for mine, _ in seconds), sent + sum(mine for _, mine in seconds)

    def total(self, choices: Choices) -> float:
        """Returns the seconds of all units with a choice."""
        return sum(self.decided_seconds(choices))

    def _make_reshards(self, record: ValueRecord, count: int) -> ValueReshards:
        key = record.sizes, record.itemsize, record.returned
        if (layouts := self._layouts.get(key)) is None:
            layouts = self._layouts[key] = LayoutCosts(*key, self.problem.prices, self.prices)
        return ValueReshards(record, count, layouts)

    @cached_property
    def _settled(self) -> list[tuple[ValueRecord, float]]:
        """Returns the values between units without a choice, with the seconds of their reshards."""
        return [(record, self._make_reshards(record, n).at(())) for record, n in self.problem.settled.items()]
