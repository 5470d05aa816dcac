"""What a user states of memory and time: what is kept from the forward pass to the backward one, how much there may be,
how far messages run ahead, and how long the search for a plan goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.compiler.graph.regather import WAYS, Regather
from shardlib.compiler.propagate.solver.effort import Planning, planning_of
from shardlib.compiler.schedule_options import DEFAULT, Schedule
from shardlib.core.byte_sizes import nbytes
from shardlib.core.errors import ShardingError

Remat = str | tuple[str, ...]
WORDS = ("none", "full", "attention")  # that are no names; "none" is said alone


@dataclass(frozen=True)
class Keeping:
    """`regather`, `remat`, `schedule` and `planning` as in `jit`; `memory`: bytes that one device may use at once."""

    regather: Regather = "auto"
    remat: Remat = "none"
    memory: int | None = None
    schedule: Schedule = DEFAULT
    planning: Planning = None

    @staticmethod
    def of(regather: Any, remat: Any, memory: Any, schedule: Any = None, planning: Any = None) -> Keeping:
        """Of what a user says. Raises `ShardingError` for what says nothing.

        Example:
            >>> Keeping.of("auto", "none", "1.5 GB").memory, Keeping.of("auto", ["mlp", "gelu"], None).remat
            (1500000000, ('mlp', 'gelu'))
        """
        if regather not in WAYS:
            raise ShardingError(f"regather={regather!r} is none of {', '.join(WAYS)}", remedy='regather="always"')
        names = [remat] if isinstance(remat, str) else [*remat] if isinstance(remat, Sequence) else []
        faults = [f"{name!r} is no name" for name in names if not (isinstance(name, str) and name.strip())]
        faults += ["'none' stands alone"] if "none" in names and {*map(repr, names)} != {"'none'"} else []
        if not names or faults:
            raise ShardingError(
                f"remat={remat!r} does not say what is made again",
                faults,
                rule='it is "none", or one or more of "full", "attention", and names of modules or ops, in which `*` '
                "stands for any text",
                remedy='remat="full", or remat=["attention", "mlp", "gelu"]',
            )
        names = [*dict.fromkeys(names)]
        budget = None if memory is None else nbytes(memory, "memory")
        if budget is not None and names != ["none"]:
            raise ShardingError(
                f"remat={remat!r} and memory={memory!r} are both given",
                rule="under a budget, what is made again is chosen value by value",
                remedy="leave one of them out",
            )
        word = names[0] if isinstance(remat, str) or (len(names) == 1 and names[0] in WORDS) else None
        return Keeping(regather, word or tuple(names), budget, Schedule.of(schedule), planning_of(planning))

    def but(self, remat: Any = None, memory: Any = None, schedule: Any = None, planning: Any = None) -> Keeping:
        """The same but for what is said now (None: nothing); a budget stands in place of names, and they of a budget.

        Example:
            >>> full = Keeping(remat="full")
            >>> full.but(memory="1 kB").said, full.but(schedule="Schedule(prefetch=0)").said
            ('memory=1000', "remat='full', schedule=Schedule(prefetch=0)")
        """
        if remat is None and memory is None:
            remat, memory = self.remat, self.memory
        schedule = self.schedule if schedule is None else schedule
        planning = self.planning if planning is None else planning
        return Keeping.of(self.regather, "none" if remat is None else remat, memory, schedule, planning)

    @property
    def said(self) -> str:
        """What is not as by default, as `jit` takes it."""
        own = (("remat", self.remat, "none"), ("memory", self.memory, None), ("schedule", self.schedule, DEFAULT))
        return ", ".join(f"{k}={x!r}" for k, x, default in (*own, ("planning", self.planning, None)) if x != default)

    def refuse_inside(self, name: str) -> None:
        """Raise `ShardingError` for what a jitted function says of itself where it is part of another one."""
        if self.said:
            raise ShardingError(
                f"{name} is called inside another jitted function, and says {self.said}",
                rule="what is kept for the backward pass, when messages start, and how long one plans, is decided for "
                "the whole program",
                remedy="say it of the outermost function: jit(step, remat=...)",
            )
