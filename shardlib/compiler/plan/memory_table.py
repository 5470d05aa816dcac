"""The memory of one device, by what holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardlib.compiler.plan.totals import stage_label
from shardlib.compiler.program.buffers import owners, peak_by_group, peak_bytes
from shardlib.compiler.program.steps import Compute, Program, Start, Var
from shardlib.core.text_tables import format_si, format_table

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

GRADIENTS, OTHERS = "gradients", "activations"


def memory_table(plan: Plan, labels: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Returns lines with the bytes of each argument, of gradients and of activations on the fullest device.

    The first figure is that at the step at which most memory is in use, so the column adds up to the plan's peak; the
    second is the most at any step. Gradients are values of the backward pass that later code reads or returns;
    activations are all other values of the call: saved and temporary ones, and gathered parameters. `labels` name
    arguments.
    """
    program = max(plan.programs, key=peak_bytes)
    groups = group_values(plan, program)
    figures = peak_by_group(program, lambda v: groups.get(v, OTHERS))
    peak = peak_bytes(program)
    stage = stage_label(plan, program)
    rows = [(f"memory per device{f' ({stage})' if stage else ''}", "at the peak", "at most")]
    rows += [
        (f"  {labels.get(name, name)}", format_si(now, "B"), format_si(most, "B"))
        for name, (now, most) in figures.items()
    ]
    machine = plan.mesh.machine
    limit = "" if machine is None else f"of {format_si(machine.device.memory, 'B')} on {machine}"
    return format_table([*rows, ("  total", format_si(peak, "B"), limit)])


def group_values(plan: Plan, program: Program) -> dict[Var, str]:
    """Maps owners of memory to the argument that they belong to, or to gradients."""
    names = {value: re.split(r"[.\[]", name)[0] for name, value in plan.compiled.inputs}
    groups = {v: names[v.value] for v in program.inputs if v.value is not None}
    owner = owners(program.steps, exact=True)
    calls = [(s.backward, s.out_vars, s.operands) for s in program.steps if isinstance(s, Compute)]
    calls += [(s.first.backward, s.outs, s.sources) for s in program.steps if isinstance(s, Start)]
    results_of_backward = {v for is_backward, outs, _ in calls if is_backward for v in outs}
    read_later = {v for is_backward, _, operands in calls if not is_backward for v in operands}
    for v in results_of_backward & {*read_later, *program.results}:
        groups.setdefault(owner.get(v, v), GRADIENTS)
    return groups
