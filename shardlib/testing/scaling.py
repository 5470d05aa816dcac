"""`scaling`: simulates how the time of a step changes with the number of devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.compiler.simulate.simulated import Simulated, clock
from shardlib.core.plots import new_figure
from shardlib.core.text_tables import format_table
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.testing.plan_on_meshes import plan_on_meshes


@dataclass(frozen=True)
class Scaling:
    """Simulated steps on several meshes, in their order; `weak` if the data grew with the mesh.

    `efficiency` is relative to the first mesh: for strong scaling the speed-up divided by the ratio of devices, for
    weak scaling the ratio of seconds.
    """

    steps: tuple[Simulated, ...]
    weak: bool

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(step.program.mesh.size for step in self.steps)

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(step.seconds for step in self.steps)

    @property
    def efficiency(self) -> tuple[float, ...]:
        first, n = self.steps[0].seconds, self.devices[0]
        ideal = [first * (1.0 if self.weak else n / m) for m in self.devices]
        return tuple(best / seconds for best, seconds in zip(ideal, self.seconds, strict=True))

    def __str__(self) -> str:
        rows = [("mesh", "devices", "seconds", "exposed", "efficiency", "peak memory")]
        for step, n, share in zip(self.steps, self.devices, self.efficiency, strict=True):
            axes = ", ".join(f"{name}={size}" for name, size in step.program.mesh.axes.items())
            gib = f"{step.peak_memory / 2**30:.3g} GiB"
            rows.append((axes, str(n), clock(step.seconds), clock(step.exposed), f"{share:.1%}", gib))
        first = self.steps[0]
        kind = "weak" if self.weak else "strong"
        return "\n".join(
            [f"{kind} scaling of {first.name} on {first.machine}: simulated, not measured", *format_table(rows)]
        )

    __repr__ = __str__

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws efficiency over devices into a file, in the format of its suffix (`.png`, `.svg`)."""
        figure = new_figure(6, 4)
        axes = figure.subplots()
        axes.plot(self.devices, self.efficiency, marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1 * max(self.efficiency))
        axes.set_xlabel("devices")
        axes.set_ylabel("weak efficiency" if self.weak else "strong efficiency")
        axes.set_title(f"{self.steps[0].name} on {self.steps[0].machine}, simulated")
        figure.savefig(os.fspath(path))


def scaling(
    step: Any,
    meshes: Sequence[Mesh],
    machine: Machine | str | None = None,
    args: Sequence[Any] | Callable[[Mesh], Sequence[Any]] = (),
    *,
    fused: bool = False,
) -> Scaling:
    """Plans a jitted function on each of `meshes` and simulates it on `machine`; nothing runs.

    `args` are the function's arguments, the same on every mesh (strong scaling), or a function from a mesh to arguments
    (weak scaling: more data on more devices). They may be meta tensors. `fused` is as in `Plan.simulate`.

    Calls with arguments of equal shapes, on meshes of the same axes, are traced once, unless the function asks for the
    current mesh.

    Example:
        >>> import torch, shardlib as sl
        >>> def loss(x, w):
        ...     return torch.relu(x @ w).sum()
        >>> step = sl.jit(sl.grad(loss, argnums=1), in_specs=("rows@data _", None))
        >>> meshes = [sl.Mesh.abstract(data=n) for n in (8, 64, 512)]
        >>> w = torch.empty(8192, 8192, device="meta")
        >>> strong = sl.scaling(step, meshes, "h100", (torch.empty(1 << 20, 8192, device="meta"), w))
        >>> weak = sl.scaling(step, meshes, "h100", lambda m: (torch.empty(2048 * m.size, 8192, device="meta"), w))
        >>> weak.efficiency[-1] > strong.efficiency[-1], weak.devices
        (True, (8, 64, 512))
    """
    plans = plan_on_meshes("scaling", step, meshes, args)
    return Scaling(tuple(plan.simulate(machine, fused=fused) for plan in plans), callable(args))
