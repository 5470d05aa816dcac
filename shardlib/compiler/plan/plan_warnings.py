"""What in a plan may surprise its reader, each with a remedy: a table of checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardlib.compiler.plan.groups import Item, group
from shardlib.compiler.plan.items import GRADIENT
from shardlib.compiler.plan.redundant_work import sentence
from shardlib.compiler.program import flops
from shardlib.core.text_tables import format_si
from shardlib.sharding.mesh.machine import Machine

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

LARGE = 0.1  # the least share of the peak memory that a warning on one tensor reports
_NAMED = 3  # names in one warning


@dataclass(frozen=True)
class PlanWarning:
    """A fact that costs time or memory, and what to do about it."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text} -> {self.remedy}"


def plan_warnings(plan: Plan) -> tuple[PlanWarning, ...]:
    """Returns the warnings of all checks, in the order of the table."""
    return tuple(warning for check in _CHECKS for warning in check(plan))


def _memory(plan: Plan) -> Iterator[PlanWarning]:
    if plan.mesh.machine is None:
        return
    machine = Machine.convert(plan.mesh.machine)
    peak, size = plan.peak_memory, machine.device.memory
    if peak > size:
        text = f"out of memory: the peak is {format_si(peak, 'B')}, a device of {machine} has {format_si(size, 'B')}"
        yield PlanWarning(text, 'strategy="fsdp", memory="80%", remat=..., a smaller batch or more devices')


def _repeated_work(plan: Plan) -> Iterator[PlanWarning]:
    if text := sentence(plan.redundant, flops.flops(plan.compiled.program)):
        axes = " ".join(plan.redundant[0].axes)
        text = f"work done twice: {text.removeprefix('redundant: ')}"
        yield PlanWarning(text, f"shard an operand there over {axes}; plan.redundant lists all such work")


def _large_gathers(plan: Plan) -> Iterator[PlanWarning]:
    """Gathers of values; gathers of weights and of their gradients are the strategy's."""
    collectives = plan.compiled.program.collectives
    large = [
        item
        for item in plan.items.collectives
        if item.kind.startswith("all_gather") and not item.role and _is_large(plan, collectives[item.position].out.nbytes)
    ]
    for g in group(large):
        size = format_si(collectives[g.first.position].out.nbytes, "B")
        times = f", {g.times} times" if g.times > 1 else ""
        text = f"large gather: {g.first.kind} at {g.name} makes {size} on every device{times} ({g.first.note})"
        yield PlanWarning(text, f"plan.explain({g.first.position}) says who asks for it: annotate that value with sl.shard")


def _returned_gradients(plan: Plan) -> Iterator[PlanWarning]:
    """Gradients that are gathered only because the call leaves them in `.grad`."""
    gathered = [i for i in plan.items.collectives if i.role == GRADIENT and i.kind.startswith("all_gather")]
    if gathered and plan.compiled.traced.after.grads:
        text = f"{format_si(sum(i.bytes for i in gathered), 'B')} are sent only to leave whole gradients in .grad"
        yield PlanWarning(text, "end the step with opt.zero_grad(): it returns none then")


def _whole_inputs(plan: Plan) -> Iterator[PlanWarning]:
    fixed, program = plan.compiled.fixed_inputs, plan.compiled.program
    if plan.mesh.size == 1:
        return
    whole = [
        item
        for item in plan.items.inputs
        if item.position not in fixed
        and (var := program.inputs[item.position]).layout is not None
        and not var.layout.axes
        and _is_large(plan, item.bytes)
    ]
    if whole:
        names, held = _listed(whole), format_si(sum(item.bytes for item in whole), "B")
        text = f"not annotated and whole on every device ({held}): {names}"
        yield PlanWarning(text, "give specs: in_specs of sl.jit, sl.shard, or specs of sl.parallelize")


def _ops_without_rule(plan: Plan) -> Iterator[PlanWarning]:
    for op, n in Counter(plan.replicated_ops).items():
        text = f"no rule, runs on whole operands on every device: {op} ({n} times)"
        yield PlanWarning(text, "register one: sl.rule")


def _names_without_rule(plan: Plan) -> Iterator[PlanWarning]:
    factors = [f for x in plan.compiled.fixed_inputs.values() if x.spec is not None for f in x.spec.factors]
    sharded = {f.name for f in factors if f.axes} | set(plan.mesh.rules)
    names = dict.fromkeys(f.name for f in factors if f.name and f.name not in sharded)
    if names:
        text = f"names without a rule, so whole: {', '.join(names)}"
        yield PlanWarning(text, f'if one should be sharded: Mesh(..., rules={{"{next(iter(names))}": axis}})')


def _is_large(plan: Plan, nbytes: float) -> bool:
    return nbytes >= LARGE * plan.peak_memory


def _listed(items: list[Item]) -> str:
    names = [g.name for g in group(items)]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


_CHECKS = (
    _memory,
    _repeated_work,
    _large_gathers,
    _returned_gradients,
    _whole_inputs,
    _ops_without_rule,
    _names_without_rule,
)
