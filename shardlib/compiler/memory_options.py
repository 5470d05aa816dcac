"""Options on memory and time: rematerialization, memory budget, message schedule, and planning effort."""

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
WORDS = ("none", "full", "attention")  # words of `remat` that are no names; "none" stands alone


@dataclass(frozen=True)
class MemoryOptions:
    """`regather`, `remat`, `schedule` and `planning` as in `jit`; `memory`: bytes that one device may use at once."""

    regather: Regather = "auto"
    remat: Remat = "none"
    memory: int | None = None
    schedule: Schedule = DEFAULT
    planning: Planning = None

    @staticmethod
    def parse(regather: Any, remat: Any, memory: Any, schedule: Any = None, planning: Any = None) -> MemoryOptions:
        """Parses a user's options. Raises `ShardingError` for invalid ones."""
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
        return MemoryOptions(regather, word or tuple(names), budget, Schedule.convert(schedule), planning_of(planning))

    def but(self, remat: Any = None, memory: Any = None, schedule: Any = None, planning: Any = None) -> MemoryOptions:
        """Returns these options with some replaced (None: unchanged); a budget replaces names, and names a budget."""
        if remat is None and memory is None:
            remat, memory = self.remat, self.memory
        schedule = self.schedule if schedule is None else schedule
        planning = self.planning if planning is None else planning
        return MemoryOptions.parse(self.regather, "none" if remat is None else remat, memory, schedule, planning)

    @property
    def text(self) -> str:
        """The options that differ from their defaults, as arguments of `jit`."""
        own = (("remat", self.remat, "none"), ("memory", self.memory, None), ("schedule", self.schedule, DEFAULT))
        return ", ".join(f"{k}={x!r}" for k, x, default in (*own, ("planning", self.planning, None)) if x != default)

    def refuse_inside(self, name: str) -> None:
        """Raises `ShardingError` for options of a jitted function inside another one."""
        if self.text:
            raise ShardingError(
                f"{name} is called inside another jitted function, and says {self.text}",
                rule="what is kept for the backward pass, when messages start, and how long one plans, is decided for "
                "the whole program",
                remedy="say it of the outermost function: jit(step, remat=...)",
            )
