"""Offloads values saved for the backward pass to the host's memory.

A value is copied out when it is computed. Its memory is free when the copy is done, at the latest `prefetch` layers
later. It returns `prefetch` layers before the backward pass reads it; views of it are taken again. The last layers stay
on the device, since the backward pass reads them at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from shardlib.compiler.passes.comm.gather_units import units
from shardlib.compiler.program.buffers import blurred, handed_on, owners_in
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Program,
    Start,
    Step,
    Var,
    Wait,
    makes,
    reads,
    swapped,
    together,
)
from shardlib.compiler.schedule_options import DEFAULT, SAVED, Schedule
from shardlib.core.aten.op_traits import is_view
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of


def offload(program: Program, how: Schedule = DEFAULT, chosen: Collection[Var] = ()) -> Program:
    """Offloads the values that the schedule names, and the `chosen` ones."""
    if how.saved is None and not chosen:
        return program
    saved = _saved(program)
    offloaded = [s for s in saved if s.var in chosen or _named(s.maker, how.saved)]
    ahead = 1 if how.prefetch is None else how.prefetch
    moved = _Moved(program, ahead, saved if chosen else offloaded, offloaded)
    return replace(program, steps=tuple(moved.run())) if moved.due else program


def movable(program: Program) -> tuple[Var, ...]:
    """Returns the values that may be `chosen`, in the order of their producers."""
    return tuple(s.var for s in _saved(program))


def crossing(forward: Program, own: int, how: Schedule) -> tuple[int, ...]:
    """Returns the positions of the saved results of a forward program that the schedule offloads.

    Saved results follow the `own` ones. Results that share memory stay, and so do those of the last layers.
    """
    if how.saved is None:
        return ()
    steps, owner = forward.steps, owners_in(forward)
    kept = {owner.get(v, v) for v in forward.outputs[:own] if isinstance(v, Var)}
    kept |= blurred(steps, owner) | handed_on(steps, owner)
    saved = {v: at for at, v in enumerate(forward.outputs[own:], own)}
    candidates = [
        (v, step)
        for step in steps
        if isinstance(step, Compute) and _named(step, how.saved)
        for v in step.out_vars
        if v in saved and v not in kept and owner.get(v, v) is v and v.nbytes
    ]
    layers = units(
        [(step.target, step.line, v.layout, v.dtype) for v, step in candidates], [v.nbytes for v, _ in candidates], 0
    )
    last = 1 + (1 if how.prefetch is None else how.prefetch)
    return tuple(saved[v] for (v, _), k in zip(candidates, layers, strict=True) if k < len({*layers}) - last)


def refuse_offload(program: Program, how: Schedule, absent: Callable[[str], bool], *, whole: bool) -> None:
    """Raises `ShardingError` for names of ops that the program does not call, and for state that it does not update.

    Names for which `absent` is True are allowed.
    """
    if how.offload is None:
        return
    if how.state and not whole:
        raise ShardingError(
            f"offload={how.offload!r} moves no state: a backward pass is outside of the jitted function",
            rule="state lives in the host's memory between calls of a program that updates it",
            remedy="call .backward(), or torch.autograd.grad, and step the optimizer inside the jitted function, and "
            "return what has no history: loss.detach()",
        )
    ops = dict.fromkeys(_name(s) for s in program.steps if isinstance(s, Compute))
    names = how.saved if isinstance(how.saved, tuple) else ()
    wrong = [name for name in names if name not in ops and not absent(name)]
    if wrong:
        near = {name: get_close_matches(name, ops, 3, 0.5) for name in wrong}
        raise ShardingError(
            "offload names ops that the program does not call",
            [
                f"{name!r} is none" + (f"; near it are {', '.join(map(repr, matches))}" if matches else "")
                for name, matches in near.items()
            ],
            rule=f'a name is that of an op in the plan; "{SAVED}" is all that is kept for the backward pass',
            remedy=f"Schedule(offload={SAVED!r})",
        )


@dataclass(frozen=True, eq=False)
class Saved:
    """A value that the forward pass saves, with the positions of its producer and of its readers and their views."""

    var: Var
    maker: Compute
    position: int  # of the maker
    early: int  # last read by the forward pass
    late: int  # first read by the backward one
    views: Mapping[Var, Compute] = field(default_factory=dict)  # that the forward pass takes


def _saved(program: Program) -> list[Saved]:
    """Returns all saved values in the order of their producers: fresh results that share no memory."""
    steps, owner = program.steps, owners_in(program)
    shown: dict[Var, list[tuple[int, Step]]] = defaultdict(list)  # steps that make the values of a memory
    touched: dict[Var, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        for v in makes(step):
            shown[owner.get(v, v)].append((i, step))
        for v in dict.fromkeys(owner.get(v, v) for v in reads(step)):
            touched[v].append(i)
    kept = {owner.get(v, v) for v in program.results} | blurred(steps, owner) | handed_on(steps, owner)
    turns = _turns(program)
    result = []
    for var, ((position, maker), *others) in shown.items():
        if (
            var in kept
            or not isinstance(maker, Compute)
            or maker.backward
            or var not in maker.out_vars
            or not var.nbytes
        ):
            continue
        turn = turns[position]
        late = next((i for i in touched[var] if i >= turn), None)
        late = late if any(_is_backward(steps[i]) for i in touched[var] if i >= turn) else None
        views = [step for i, step in others if i < turn]
        if late is not None and all(isinstance(s, Compute) and is_view(s.target) and not s.copies for s in views):
            early = max((i for i in touched[var] if i < turn), default=position)
            taken = {v: s for s in views if isinstance(s, Compute) for v in s.out_vars}
            result.append(Saved(var, maker, position, early, late, taken))
    return result


def _turns(program: Program) -> list[int]:
    """Returns, for each step, the position at which the next backward pass begins.

    Steps that only reshape an input or a constant do not begin a pass, because they may run early.
    """
    steps, forms = program.steps, set(program.entry_values)
    begins = []
    for step in steps:
        needed = step.outs if isinstance(step, Wait) else reads(step)
        if len(needed) < 2 and forms.issuperset(needed):
            forms.update(step.outs if isinstance(step, Start) else makes(step))
        begins.append(isinstance(step, Compute) and step.backward and forms.isdisjoint(step.out_vars))
    turns, turn = [0] * len(steps), len(steps)
    for i in reversed(range(len(steps))):
        turn = i if begins[i] else turn
        turns[i] = turn
    return turns


def _is_backward(step: Step) -> bool:
    return step.first.backward if isinstance(step, Start) else isinstance(step, Compute) and step.backward


def _named(maker: Compute, names: str | Sequence[str] | None) -> bool:
    return names == SAVED or (names is not None and _name(maker) in names)


def _name(step: Compute) -> str:
    target = step.target
    name = schema_of(target).name if isinstance(target, OpOverload) else getattr(target, "__name__", "")
    return str(name).split("::")[-1]


class _Moved:
    """Writes the steps with copies out and back; `due` maps a step to the values whose copies back start before it.

    The `layered` values define the layers; the `offloaded` ones move.
    """

    def __init__(self, program: Program, ahead: int, layered: Sequence[Saved], offloaded: Sequence[Saved]) -> None:
        self.program = program
        self.due: dict[int, list[Saved]] = defaultdict(list)
        self.out: dict[int, list[Saved]] = defaultdict(list)  # steps behind which copies out start,
        self.gone: dict[int, list[Saved]] = defaultdict(list)  # and behind which they are waited for
        self.home: dict[Var, Var] = {}  # maps a value to its copy on the host
        self.back: dict[Var, Var] = {}  # maps a value to the copy that returned
        self.flying: dict[Var, tuple[Saved, Var]] = {}
        keys = [(s.maker.target, s.maker.line, s.var.layout, s.var.dtype) for s in layered]
        layers: dict[int, list[Saved]] = defaultdict(list)
        for one, unit in zip(layered, units(keys, [s.var.nbytes for s in layered], 0), strict=True):
            layers[unit].append(one)
        moves = set(offloaded)
        begins = [min(s.position for s in layers[u]) for u in range(len(layers))]
        order = sorted(layers, key=lambda u: min(s.late for s in layers[u]))
        first = [min(s.late for s in layers[u]) for u in order]
        place = {u: k for k, u in enumerate(order)}
        for unit in range(len(layers) - ahead - 1):
            at = first[max(place[unit] - ahead, 0)]
            for one in layers[unit]:
                if one not in moves:
                    continue
                gone = max(one.early, begins[unit + ahead + 1] - 1)
                if gone + 1 < one.late:
                    self.out[one.position].append(one)
                    self.gone[gone].append(one)
                    self.due[min(max(at, gone + 1), one.late)].append(one)

    def run(self) -> list[Step]:
        steps: list[Step] = []
        for i, step in enumerate(self.program.steps):
            for one in self.due.get(i, ()):
                steps.append(self._fetch(one))
            for v in dict.fromkeys(reads(step)):
                steps += self._landed(v)
            steps.append(swapped(step, self.back) if any(v in self.back for v in reads(step)) else step)
            for one in self.out.get(i, ()):
                host = self.home[one.var] = replace(one.var, name=f"{one.var.name}.host", host=True)
                steps.append(together(_copy("to_host", one.var, host, one))[0])
            steps += [together(_copy("to_host", s.var, self.home[s.var], s))[1] for s in self.gone.get(i, ())]
        return steps

    def _fetch(self, one: Saved) -> Start:
        back = replace(one.var, name=f"{one.var.name}.back")
        self.flying |= dict.fromkeys((one.var, *one.views), (one, back))
        return together(_copy("to_device", self.home[one.var], back, one))[0]

    def _landed(self, var: Var) -> list[Step]:
        """Returns the steps that bring a value to its reader: the wait for its copy, and views of the copy."""
        if var not in self.flying:
            return []
        one, back = self.flying.pop(var)
        steps: list[Step] = []
        if one.var not in self.back:
            steps.append(together(_copy("to_device", self.home[one.var], back, one))[1])
            self.back[one.var] = back
            self.flying.pop(one.var, None)
        if (view := one.views.get(var)) is not None:
            steps += self._landed(view.operands[0])
            for v in view.out_vars:  # all results of the view
                self.back[v] = replace(v, name=f"{v.name}.back")
                self.flying.pop(v, None)
            steps.append(swapped(view, self.back))
        return steps


def _copy(kind: str, source: Var, out: Var, one: Saved) -> Collective:
    return Collective(kind, (), source, out, {}, 0.0, line=one.maker.line, backward=kind == "to_device")
