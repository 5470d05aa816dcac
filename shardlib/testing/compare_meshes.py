"""`compare_meshes`: plans a step on several meshes, and shows the plans side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.compiler.plan.page.write_page import page_text, write_page
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.plan.totals import EXPOSED, FLOPS, PEAK, SENT, STEP, figures
from shardlib.core.text_tables import format_table
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.testing.plan_on_meshes import Arguments, plan_on_meshes

_COLUMNS = {SENT, FLOPS, PEAK, STEP, EXPOSED}


@dataclass(frozen=True)
class MeshComparison:
    """Plans of one function on several meshes, in their order; `print` it, or write it as a page."""

    plans: tuple[Plan, ...]
    machine: Machine | None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for plan in self.plans:
            axes = ", ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
            simulated = None if self.machine is None else plan.simulate(self.machine)
            cells = {figure.name: figure.amount for figure in figures(plan, simulated) if figure.name in _COLUMNS}
            rows = rows or [("mesh", "devices", *cells)]
            rows.append((axes, str(plan.mesh.size), *cells.values()))
        return "\n".join([f"{self.plans[0].name} on {len(self.plans)} meshes", *format_table(rows)])

    __repr__ = __str__

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes all plans as one HTML file with a table of the meshes and a selector.

        Raises `ShardingError` if the file cannot be written.
        """
        write_page(path, page_text(f"{self.plans[0].name} on {len(self.plans)} meshes", self.plans, self.machine))


def compare_meshes(
    step: Any,
    meshes: Sequence[Mesh],
    machine: Machine | str | None = None,
    args: Arguments = (),
    *,
    path: str | os.PathLike[str] | None = None,
) -> MeshComparison:
    """Plans a jitted function on each of `meshes`, and writes one page with all plans to `path`; nothing runs.

    `args` are the function's arguments, the same on every mesh, or a function from a mesh to arguments. They may be
    meta tensors. The page and the table show simulated seconds if a `machine` is named. Raises `ShardingError` for
    other arguments, and if the page cannot be written.

    Example:
        >>> import torch, shardlib as sl
        >>> step = sl.jit(lambda x, w: torch.relu(x @ w).sum(), in_specs=("rows@data _", "_ ff@tensor"))
        >>> x, w = (torch.empty(8192, 8192, device="meta") for _ in range(2))
        >>> meshes = [sl.Mesh.abstract(data=8, tensor=1), sl.Mesh.abstract(data=2, tensor=4)]
        >>> sl.compare_meshes(step, meshes, args=(x, w))
        <lambda> on 2 meshes
        mesh              devices  sent per device  FLOPs per device  peak memory
        data=8, tensor=1  8        7 B              137 GFLOP         336 MB
        data=2, tensor=4  8        7 B              137 GFLOP         235 MB
    """
    plans = plan_on_meshes("compare_meshes", step, meshes, args)
    comparison = MeshComparison(plans, None if machine is None else Machine.convert(machine))
    if path is not None:
        comparison.html(path)
    return comparison
