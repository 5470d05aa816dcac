"""Budgets of plans: a plan that exceeds one is an error, before anything runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

from shardlib.compiler.plan.totals import busiest_sender, scope_label, stage_label
from shardlib.compiler.program import flops
from shardlib.core.errors import ShardingError
from shardlib.core.text_tables import format_si

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute")
_SHOWN = 20  # offenders of one error


@dataclass(frozen=True)
class Budget(ABC):
    """A limit on plans: an argument of `jit`, or a context around plans and calls."""

    subject: ClassVar[str]  # `communication`
    name: ClassVar[str]  # its name as an argument of `jit`, and in `shardlib`
    remedy: ClassVar[str]

    @abstractmethod
    def exceeded(self, plan: Plan) -> tuple[Sequence[str], Sequence[object]]:
        """Returns the figures that exceed the budget, and all offenders; nothing if the plan keeps the budget."""

    def check(self, plan: Plan) -> None:
        """Raises `ShardingError` with the offenders if the plan exceeds the budget."""
        facts, offenders = self.exceeded(plan)
        if not facts and not offenders:
            return
        more = [f"and {len(offenders) - _SHOWN} more"] if len(offenders) > _SHOWN else []
        raise ShardingError(
            f"{plan.name} exceeds its {self.subject} budget",
            [*facts, *map(str, offenders[:_SHOWN]), *more],
            rule=f"{self.name}({', '.join(f'{f.name}={getattr(self, f.name)}' for f in fields(self))})",
            remedy=self.remedy,
        )

    def __enter__(self) -> Self:
        _stack.set((*_stack.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _stack.set(_stack.get()[:-1])


@dataclass(frozen=True)
class CommBudget(Budget):
    """At most `max_bytes` on the wire per device and call, and no collective of a kind in `forbid`.

    An argument of `jit` (`comm_budget=`), or a context around plans and calls.

    Example:
        >>> import torch, shardlib as sl
        >>> total = sl.jit(lambda x: x.sum(), in_specs=("batch@data",))
        >>> with sl.Mesh(data=2), sl.comm_budget(max_bytes=1, forbid=("all_gather",)):
        ...     total.plan(torch.ones(4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        shardlib.ShardingError: <lambda> exceeds its communication budget:
          * 4 bytes are sent per device, the budget is 1
        ...
    """

    max_bytes: float | None = None
    forbid: tuple[str, ...] = ()

    subject = "communication"
    name = "comm_budget"
    remedy = "annotate where values should live (plan.explain(collective) tells why), or raise the budget"

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.forbid if kind not in KINDS]:
            raise ShardingError(
                f"comm_budget(forbid={self.forbid}) is not a budget",
                [f"{kind!r} is no collective" for kind in unknown],
                remedy=f"use some of {', '.join(KINDS)}",
            )

    def exceeded(self, plan: Plan) -> tuple[Sequence[str], Sequence[object]]:
        """Returns all collectives of the busiest stage if it sends too much, else those of a forbidden kind."""
        if self.max_bytes is None or plan.comm_bytes <= self.max_bytes:
            return [], [c for c in plan.collectives if c.kind in self.forbid]
        busiest = busiest_sender(plan)
        where = f" ({label})" if (label := stage_label(plan, busiest)) else ""
        fact = f"{plan.comm_bytes:,.0f} bytes are sent per device{where}, the budget is {self.max_bytes:,.0f}"
        own = {*busiest.collectives}
        steps = zip(plan.compiled.program.collectives, plan.collectives, strict=True)
        return [fact], sorted((c for step, c in steps if step in own), key=lambda c: -c.bytes)


@dataclass(frozen=True)
class RedundancyBudget(Budget):
    """At most `max_flops` of a device, and `max_share` of its FLOPs, may repeat work of other devices.

    An argument of `jit` (`redundancy_budget=`), or a context around plans and calls. `plan.redundant` is counted.

    Example:
        >>> import torch, shardlib as sl
        >>> product = sl.jit(lambda x, w: x @ w)
        >>> with sl.Mesh(data=8), sl.redundancy_budget(max_share=0.05):
        ...     product.plan(torch.ones(4, 4), torch.ones(4, 4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        shardlib.ShardingError: <lambda> exceeds its redundancy budget:
          * 112 FLOP of 128 FLOP per device (87.5 %) are done identically elsewhere, the budget is 5 %
        ...
    """

    max_share: float | None = None
    max_flops: float | None = None

    subject = "redundancy"
    name = "redundancy_budget"
    remedy = "cut a dim of the named ops over the named axes (an input, or sl.shard on a line), or raise the budget"

    def __post_init__(self) -> None:
        if self.max_share is not None and not 0 <= self.max_share <= 1:
            raise ShardingError(
                f"redundancy_budget(max_share={self.max_share}) is not a budget",
                rule="a share is a number from 0 to 1",
                remedy=f"max_flops={self.max_share} if these are FLOPs",
            )

    def exceeded(self, plan: Plan) -> tuple[Sequence[str], Sequence[object]]:
        """Returns all redundant work, most first, if there is too much."""
        twice = sum(r.flops for r in plan.redundant)
        total = flops.flops(plan.compiled.program)  # of a pipeline, all stages, as in `twice`
        share = twice / total if total else 0.0
        scope = ", ".join(filter(None, (f"{100 * share:.3g} %", scope_label(plan))))
        work = f"{format_si(twice, 'FLOP')} of {format_si(total, 'FLOP')} per device ({scope})"
        facts = []
        if self.max_share is not None and share > self.max_share:
            facts.append(f"{work} are done identically elsewhere, the budget is {100 * self.max_share:.3g} %")
        if self.max_flops is not None and twice > self.max_flops:
            facts.append(f"{work} are done identically elsewhere, the budget is {format_si(self.max_flops, 'FLOP')}")
        return facts, [r for r in plan.redundant if r.flops] if facts else []


def checked_budgets(comm_budget: CommBudget | None, redundancy_budget: RedundancyBudget | None) -> tuple[Budget, ...]:
    """Returns the budgets that are given. Raises `ShardingError` for other objects."""
    for budget, kind, example in (
        (comm_budget, CommBudget, "max_bytes=..."),
        (redundancy_budget, RedundancyBudget, "max_share=..."),
    ):
        if budget is not None and not isinstance(budget, kind):
            raise ShardingError(f"{budget!r} is no budget", remedy=f"{kind.name}=sl.{kind.name}({example})")
    return tuple(budget for budget in (comm_budget, redundancy_budget) if budget is not None)


comm_budget = CommBudget
redundancy_budget = RedundancyBudget
_stack: ContextVar[tuple[Budget, ...]] = ContextVar("shardlib_budgets", default=())


def current_budgets() -> tuple[Budget, ...]:
    """Returns the budgets of the enclosing `with` blocks."""
    return _stack.get()
