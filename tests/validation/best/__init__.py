"""Programs with the best plan that a specialist would write by hand, and how far shardlib's plan is from it.

`python -m tests.validation.best` prints the table; `tests/validation/best/test_best.py` asserts it. A row's figures are
counted, not timed, on abstract meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from shardlib.compiler.plan.plan import Plan

FIGURES = ("work", "bytes", "collectives", "peak")


@dataclass(frozen=True)
class Row:
    """A program, where its arguments live, and what the best plan by hand costs.

    `bytes` go on the wire per device, in `collectives` messages (ring algorithms); `work` is the FLOPs of all devices,
    each taken to do as much as the one that does most, over those of one that does it all; `peak` is in bytes on one
    device, None where nobody has worked it out. Bounds are 1.05 times these. `short` holds the figures that are not
    reached, as multiples of the best that must hold, and `why` says what stands in the way.
    """

    name: str
    program: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[Any, ...]
    mesh: Mapping[str, int]
    bytes: float = 0
    collectives: int = 0
    work: float = 1
    peak: float | None = None
    out_specs: Any = None
    short: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def plan(self) -> Plan:
        """Shardlib's plan of it."""
        more = {} if self.out_specs is None else {"out_specs": self.out_specs}
        with sl.Mesh(dict(self.mesh)):
            return sl.jit(self.program, in_specs=self.specs, **more).plan(*self.args)

    def measured(self) -> dict[str, tuple[float, float]]:
        """Per figure what the plan has and what the best has."""
        plan = self.plan()
        with sl.Mesh(dict.fromkeys(self.mesh, 1)):
            alone = sl.jit(self.program).plan(*self.args).flops
        found = {"bytes": (plan.comm_bytes, self.bytes), "collectives": (len(plan.collectives), self.collectives)}
        found["work"] = (plan.flops * plan.mesh.size / max(alone, 1), self.work)
        if self.peak is not None:
            found["peak"] = (plan.peak_memory, self.peak)
        return found

    def faults(self) -> list[str]:
        """The figures that are worse than they should be, or better than `short` says."""
        faults = []
        for name, (has, best) in self.measured().items():
            bound = self.short.get(name, 1.05) * best
            if has > bound:
                faults.append(f"{name}: {has:,.6g} is more than {bound:,.6g}; the best is {best:,.6g}")
            elif name in self.short and has <= 1.05 * best:
                faults.append(f"{name}: {has:,.6g} is within the bound; `short` says that it is not")
        return faults


def f32(*shape: int) -> Tensor:
    """A tensor without values."""
    return torch.empty(shape, device="meta")


def bf16(*shape: int) -> Tensor:
    """A tensor of 16 bits without values."""
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


def ints(*shape: int) -> Tensor:
    """A tensor of integers without values."""
    return torch.empty(shape, device="meta", dtype=torch.int64)


def reduced(nbytes: float, devices: int) -> float:
    """Wire bytes per device of an all-reduce of `nbytes`."""
    return 2 * nbytes * (devices - 1) / devices


def gathered(nbytes: float, devices: int) -> float:
    """Wire bytes per device of an all-gather to `nbytes`, or of a reduce-scatter of them."""
    return nbytes * (devices - 1) / devices


def exchanged(nbytes: float, devices: int) -> float:
    """Wire bytes per device of an all-to-all of `nbytes`, which all devices hold together."""
    return nbytes * (devices - 1) / devices**2
