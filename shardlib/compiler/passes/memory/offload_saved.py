"""What is saved for the backward pass lives in the host's memory meanwhile.

A value is copied out when it is made, and its memory is free when the copy is done, at the latest when the forward pass
is so many layers further as the schedule prefetches. It comes back as many layers before the backward pass reads it:
views that were taken of it are taken again, of what came back. The last layers stay, since they are read at once.
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
from shardlib.core.torch_private import OpOverload, schema_of


def offload(program: Program, how: Schedule = DEFAULT, chosen: Collection[Var] = ()) -> Program:
    """The program with what the schedule names, and the `chosen` values, in the host's memory meanwhile."""
    if how.saved is None and not chosen:
        return program
    saved = _saved(program)
    found = [s for s in saved if s.var in chosen or _named(s.maker, how.saved)]
    ahead = 1 if how.prefetch is None else how.prefetch
    moved = _Moved(program, ahead, saved if chosen else found, found)
    return replace(program, steps=tuple(moved.run())) if moved.due else program


def movable(program: Program) -> tuple[Var, ...]:
    """The values that may be `chosen`, in the order in which they are made."""
    return tuple(s.var for s in _saved(program))


def crossing(forward: Program, own: int, how: Schedule) -> tuple[int, ...]:
    """Of what a forward program returns behind its `own` results, for a backward program, what the schedule names, by
    position: fresh results of calls, but those of the last layers, which are read at once."""
    if how.saved is None:
        return ()
    steps, owner = forward.steps, owners_in(forward)
    kept = {owner.get(v, v) for v in forward.outputs[:own] if isinstance(v, Var)}
    kept |= blurred(steps, owner) | handed_on(steps, owner)
    saved = {v: at for at, v in enumerate(forward.outputs[own:], own)}
    found = [
        (v, step)
        for step in steps
        if isinstance(step, Compute) and _named(step, how.saved)
        for v in step.made
        if v in saved and v not in kept and owner.get(v, v) is v and v.nbytes
    ]
    layers = units([(step.target, step.line, v.layout, v.dtype) for v, step in found], [v.nbytes for v, _ in found], 0)
    last = 1 + (1 if how.prefetch is None else how.prefetch)
    return tuple(saved[v] for (v, _), k in zip(found, layers, strict=True) if k < len({*layers}) - last)


def refuse_offload(program: Program, how: Schedule, absent: Callable[[str], bool], *, whole: bool) -> None:
    """Raise `ShardingError` for names of what no call makes, but for those that are `absent`, and for state that the
    program does not update."""
    if how.offload is None:
        return
    if how.state and not whole:
        raise ShardingError(
            f"offload={how.offload!r} moves no state: a backward pass is outside of the jitted function",
            rule="state lives in the host's memory between calls of a program that updates it",
            remedy="call .backward(), or torch.autograd.grad, and step the optimizer inside the jitted function, and "
            "return what has no history: loss.detach()",
        )
    made = dict.fromkeys(_name(s) for s in program.steps if isinstance(s, Compute))
    names = how.saved if isinstance(how.saved, tuple) else ()
    wrong = [name for name in names if name not in made and not absent(name)]
    if wrong:
        near = {name: get_close_matches(name, made, 3, 0.5) for name in wrong}
        raise ShardingError(
            "offload names ops that the program does not call",
            [
                f"{name!r} is none" + (f"; near it are {', '.join(map(repr, of))}" if of else "")
                for name, of in near.items()
            ],
            rule=f'a name is that of an op in the plan; "{SAVED}" is all that is kept for the backward pass',
            remedy=f"Schedule(offload={SAVED!r})",
        )


@dataclass(frozen=True, eq=False)
class Saved:
    """A value that the forward pass keeps for the backward one, and where steps make and read it, or a view of it."""

    var: Var
    maker: Compute
    made: int
    early: int  # last read by the forward pass
    late: int  # first read by the backward one
    views: Mapping[Var, Compute] = field(default_factory=dict)  # of it, as the forward pass takes them


def _saved(program: Program) -> list[Saved]:
    """All of them, in the order in which they are made: fresh results of calls, of which nobody else has the memory."""
    steps, owner = program.steps, owners_in(program)
    shown: dict[Var, list[tuple[int, Step]]] = defaultdict(list)  # steps that make what shows a memory
    touched: dict[Var, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        for v in makes(step):
            shown[owner.get(v, v)].append((i, step))
        for v in dict.fromkeys(owner.get(v, v) for v in reads(step)):
            touched[v].append(i)
    kept = {owner.get(v, v) for v in program.results} | blurred(steps, owner) | handed_on(steps, owner)
    turns = _turns(program)
    found = []
    for var, ((made, maker), *others) in shown.items():
        if var in kept or not isinstance(maker, Compute) or maker.backward or var not in maker.made or not var.nbytes:
            continue
        turn = turns[made]
        late = next((i for i in touched[var] if i >= turn), None)
        late = late if any(_is_backward(steps[i]) for i in touched[var] if i >= turn) else None
        views = [step for i, step in others if i < turn]
        if late is not None and all(isinstance(s, Compute) and is_view(s.target) and not s.copies for s in views):
            early = max((i for i in touched[var] if i < turn), default=made)
            taken = {v: s for s in views if isinstance(s, Compute) for v in s.made}
            found.append(Saved(var, maker, made, early, late, taken))
    return found


def _turns(program: Program) -> list[int]:
    """For each step, where the backward pass behind it begins.

    That is not with a form of an input or a constant, which may come early.
    """
    steps, forms = program.steps, set(program.given)
    begins = []
    for step in steps:
        needed = step.outs if isinstance(step, Wait) else reads(step)
        if len(needed) < 2 and forms.issuperset(needed):
            forms.update(step.outs if isinstance(step, Start) else makes(step))
        begins.append(isinstance(step, Compute) and step.backward and forms.isdisjoint(step.made))
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
    """Writes the steps anew, with copies out and back; `due` are the values whose copies back start before a step.

    Layers are those of `layered` values, of which those `found` move.
    """

    def __init__(self, program: Program, ahead: int, layered: Sequence[Saved], found: Sequence[Saved]) -> None:
        self.program = program
        self.due: dict[int, list[Saved]] = defaultdict(list)
        self.out: dict[int, list[Saved]] = defaultdict(list)  # behind which step a copy out starts,
        self.gone: dict[int, list[Saved]] = defaultdict(list)  # and is waited for
        self.home: dict[Var, Var] = {}  # of each value, where it is on the host
        self.back: dict[Var, Var] = {}  # what came, or will come, back; what to read in place of a value
        self.flying: dict[Var, tuple[Saved, Var]] = {}
        keys = [(s.maker.target, s.maker.line, s.var.layout, s.var.dtype) for s in layered]
        layers: dict[int, list[Saved]] = defaultdict(list)
        for one, unit in zip(layered, units(keys, [s.var.nbytes for s in layered], 0), strict=True):
            layers[unit].append(one)
        moves = set(found)
        begins = [min(s.made for s in layers[u]) for u in range(len(layers))]
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
                    self.out[one.made].append(one)
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
        """What brings a value that is read: the wait for its copy, and the views that lead there."""
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
            for v in view.made:  # all of a view with several results
                self.back[v] = replace(v, name=f"{v.name}.back")
                self.flying.pop(v, None)
            steps.append(swapped(view, self.back))
        return steps


def _copy(kind: str, source: Var, out: Var, one: Saved) -> Collective:
    return Collective(kind, (), source, out, {}, 0.0, line=one.maker.line, backward=kind == "to_device")
