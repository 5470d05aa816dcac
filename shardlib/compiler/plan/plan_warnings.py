"""Warnings of a plan, each with a remedy: a table of checks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardlib.compiler.annotations import fixed_body_inputs, fixed_constraints
from shardlib.compiler.plan.groups import INPUT, Item, group
from shardlib.compiler.plan.items import GRADIENT
from shardlib.compiler.plan.redundant_work import WORTH, Redundant
from shardlib.compiler.program import flops
from shardlib.core.name_patterns import star
from shardlib.core.source_lines import format_path_line
from shardlib.core.text_tables import format_si
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.typos import is_near

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

LARGE = 0.1  # the least share of the peak memory that a warning on one tensor reports
_NAMED = 3  # names in one warning
_SMALL = 0.01  # share of the peak memory below which an input is not worth an annotation


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
        has = f"a device of {machine.name or 'the machine'} has {format_si(size, 'B')}"
        text = f"out of memory: the peak is {format_si(peak, 'B')}, {has}"
        yield PlanWarning(text, 'strategy="fsdp", memory=, remat=, a smaller batch or more devices')


def _repeated_work(plan: Plan) -> Iterator[PlanWarning]:
    total, repeated = flops.flops(plan.compiled.program), sum(r.flops for r in plan.redundant)
    if repeated and repeated >= WORTH * total:
        most = plan.redundant[0]
        where = f"{most.op} {'in the backward of' if most.backward else 'at'} {most.line}"
        axes = " ".join(most.axes)
        alike = f"alike on {most.copies} devices along {axes}"
        text = f"redundant work: {repeated / total:.0%} of the FLOPs, most in {where}, {alike}"
        needed = _inputs_of(plan, most)
        free = [x for x in _free_inputs(plan) if x.position in needed and x.bytes >= _SMALL * plan.peak_memory]
        cure = f"annotate {_listed(free)} over {axes}" if free else f"shard its operands over {axes} (sl.shard)"
        yield PlanWarning(text, f"{cure}; plan.redundant lists all such work")


def _inputs_of(plan: Plan, work: Redundant) -> set[int]:
    """Returns the positions of the inputs that redundant calls depend on."""
    graph = plan.compiled.graph
    calls = {op for op in graph.ops if (op.kind, op.backward) == (work.op, work.backward)}
    needed = {v for op in calls if format_path_line(op.line) == work.line for v in op.operands}
    for op in reversed(graph.ops):
        if not needed.isdisjoint(r for r in op.results if r is not None):
            needed.update(op.operands)
    return {at for at, value in enumerate(graph.inputs) if value in needed}


def _large_gathers(plan: Plan) -> Iterator[PlanWarning]:
    """Gathers of values that the compiler decides; gathers of weights and of their gradients are the strategy's."""
    collectives = plan.compiled.program.collectives
    outs = [0 if c.because is None else c.out.nbytes for c in collectives]  # None: of a shard_map body
    gathers = [item for item in plan.items.collectives if item.kind.startswith("all_gather") and not item.role]
    for g in group(item for item in gathers if _is_large(plan, outs[item.position])):
        at, times = g.first.position, f", {g.times} times" if g.times > 1 else ""
        size = format_si(outs[at], "B")
        text = f"large gather: {g.first.kind} at {g.name} makes {size} on every device{times} ({g.first.note})"
        yield PlanWarning(text, f"plan.explain({at}) names what needs it; annotate that value with sl.shard")


def _returned_gradients(plan: Plan) -> Iterator[PlanWarning]:
    """Gradients that are gathered only because the call leaves them in `.grad`."""
    gathered = [i for i in plan.items.collectives if i.role == GRADIENT and i.kind.startswith("all_gather")]
    if gathered and plan.compiled.traced.after.grads:
        text = f"{format_si(sum(i.bytes for i in gathered), 'B')} are sent only to leave gathered gradients in .grad"
        yield PlanWarning(text, "end the step with opt.zero_grad(): it returns none then")


def _whole_inputs(plan: Plan) -> Iterator[PlanWarning]:
    whole = [item for item in _free_inputs(plan) if _is_large(plan, item.bytes)]
    if whole and plan.mesh.size > 1:
        names, held = _listed(whole), format_si(sum(item.bytes for item in whole), "B")
        text = f"not annotated and whole on every device ({held}): {names}"
        yield PlanWarning(text, "give specs: in_specs of sl.jit, sl.shard, or specs of sl.parallelize")


def _ops_without_rule(plan: Plan) -> Iterator[PlanWarning]:
    for op, n in Counter(plan.replicated_ops).items():
        text = f"no rule, runs on whole operands on every device: {op} ({n} times)"
        yield PlanWarning(text, "register one: sl.rule")


def _names_without_rule(plan: Plan) -> Iterator[PlanWarning]:
    """Inputs with names that shard nothing: of large inputs all names, else those that look mistyped.

    A name looks mistyped if no other annotation has it, and it either resembles a name with a rule, or leaves an input
    whole on a mesh with rules.
    """
    rules, items, lone = plan.mesh.rules, plan.items.inputs, _lone_names(plan)
    affected = defaultdict[tuple[Any, ...], list[Item]](list)  # by the names, and whether the input is whole
    for at, fixed in _specs_of_inputs(plan).items():
        names, is_whole = [x for x in _names(fixed) if x not in rules], not fixed.layout.axes
        if not (is_whole and _is_large(plan, items[at].bytes)):
            names = [x for x in names if x in lone and ((is_whole and rules) or _near(x, rules))]
        if names:
            affected[*names, is_whole].append(items[at])
    for (*names, is_whole), some in affected.items():
        verb = "is" if len(some) == 1 else "are"
        held = f"{_listed(some)} {verb} whole on every device" if is_whole else f"dims of {_listed(some)} stay whole"
        near = next(filter(None, (_near(name, rules) for name in names)), None)
        meant = f"did you mean {near!r}? Else " if near else ""
        name = names[0]
        remedy = f'{meant}Mesh(..., rules={{"{name}": axis}}), or rules={{"{name}": None}} if it shall stay whole'
        yield PlanWarning(f"no rule for {' '.join(names)}: {held}", remedy)


def _specs_of_inputs(plan: Plan) -> dict[int, FixedLayout]:
    """Returns the layouts of inputs with a spec; moments of optimizers have those of their parameters."""
    return {at: x for at, x in plan.compiled.fixed_inputs.items() if plan.items.inputs[at].phase == INPUT}


def _names(fixed: FixedLayout) -> list[str]:
    """Returns the names of the factors that no axis shards."""
    factors = (pair for dim in zip(fixed.names, fixed.layout.dims, strict=True) for pair in zip(*dim, strict=True))
    return [name for name, factor in factors if name and not factor.axes]


def _lone_names(plan: Plan) -> set[str]:
    """Returns the names that stand in one annotation alone; those of equal layers are one."""
    compiled, items = plan.compiled, plan.items.inputs
    fixed = [(star(items[at].path.removesuffix(".grad")), x) for at, x in _specs_of_inputs(plan).items()]
    fixed += [(str(at), x) for at, x in compiled.fixed_outputs.items() if x.spec is not None]
    fixed += [(x.source, x) for x in fixed_constraints(compiled.graph, plan.mesh).values()]
    fixed += [(x.source, x) for x in fixed_body_inputs(compiled.graph, plan.mesh).values()]
    uses = {(place, name) for place, x in fixed for names in x.names for name in names}
    return {name for name, n in Counter(name for _, name in uses).items() if n == 1 and name}


def _near(name: str, rules: Iterable[str]) -> str | None:
    return next((rule for rule in rules if is_near(name, rule)), None)


def _free_inputs(plan: Plan) -> list[Item]:
    """Returns the inputs that nothing annotates, and that every device holds whole."""
    layouts = [var.layout for var in plan.compiled.program.inputs]
    free = (item for item in plan.items.inputs if item.position not in plan.items.annotated)
    return [item for item in free if (x := layouts[item.position]) is not None and not x.axes]


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
