"""Communication budgets: an unexpected collective becomes an error, before anything runs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shardlib.errors import ShardingError

if TYPE_CHECKING:
    from shardlib.plans.plan import Plan

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute")


@dataclass(frozen=True)
class CommBudget:
    """At most `max_bytes` on the wire per device and call, and no collective of a kind in `forbid`.

    An argument of `jit` (`comm_budget=`), or a context around plans and calls.

    Example:
        >>> import torch, shardlib as sl
        >>> total = sl.jit(lambda x: x.sum(), in_specs=("batch@data",))
        >>> with sl.Mesh(data=2), sl.comm_budget(max_bytes=1, forbid=("all_gather",)):
        ...     total.plan(torch.ones(4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        shardlib.errors.ShardingError: <lambda> exceeds its communication budget:
          * 4 bytes are sent per device, the budget is 1
        ...
    """

    max_bytes: float | None = None
    forbid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.forbid if kind not in KINDS]:
            raise ShardingError(
                f"comm_budget(forbid={self.forbid}) is not a budget",
                [f"{kind!r} is no collective" for kind in unknown],
                remedy=f"use some of {', '.join(KINDS)}",
            )

    def check(self, plan: Plan) -> None:
        """Raise `ShardingError` naming every collective that breaks the budget."""
        forbidden = [c for c in plan.collectives if c.kind in self.forbid]
        over = self.max_bytes is not None and plan.comm_bytes > self.max_bytes
        if not forbidden and not over:
            return
        shown = sorted(plan.collectives, key=lambda c: -c.bytes) if over else forbidden
        facts = (
            [f"{plan.comm_bytes:,.0f} bytes are sent per device, the budget is {self.max_bytes:,.0f}"] if over else []
        )
        more = [f"and {len(shown) - 20} more"] if len(shown) > 20 else []
        raise ShardingError(
            f"{plan.name} exceeds its communication budget",
            facts + [str(c) for c in shown[:20]] + more,
            rule=f"comm_budget(max_bytes={self.max_bytes}, forbid={self.forbid})",
            remedy="annotate where values should live (plan.explain(collective) tells why), or raise the budget",
        )

    def __enter__(self) -> Self:
        _stack.set((*_stack.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _stack.set(_stack.get()[:-1])


comm_budget = CommBudget
_stack: ContextVar[tuple[CommBudget, ...]] = ContextVar("shardlib_budgets", default=())


def current_budgets() -> tuple[CommBudget, ...]:
    """The budgets of the `with` blocks that run now."""
    return _stack.get()
