"""Cuts a lowered program into one program per stage.

Every stage runs its units in the order of its fragments: those of a schedule, and in front of and behind them what
belongs to no microbatch. A unit that names no microbatch runs as soon as its operands are there. A value that another
stage reads is sent once, by the unit that makes it, in the layout that it is made in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.program.steps import Compute, Program, Step, Var, reads, swapped
from shardlib.compiler.stages.assign import Assignment, Boundary, Unit, assign, list_weight_units, units
from shardlib.compiler.stages.automatic import choose_stages
from shardlib.compiler.stages.fragment_tags import tag_step
from shardlib.compiler.stages.fragments import Fragment, Kind, PipelineShape
from shardlib.compiler.stages.pipeline_shape import choose_shape, count_live
from shardlib.compiler.stages.schedules import order_fragments
from shardlib.compiler.stages.staged import ONCE, Message, Staged
from shardlib.compiler.stages.timetable import Orders
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line
from shardlib.ops.transfers import RECEIVE, SEND


def cut(
    program: Program,
    stages: int,
    inputs: Mapping[Var, int],
    outputs: Mapping[int, Var | int | None],
    cotangents: Mapping[Var, Var],
    parameters: Collection[Var] = (),
    memory: int | None = None,
) -> Staged:
    """Returns the programs of `stages` stages.

    `inputs` are the stages of tensors that live on one, and `outputs`, by position, those that results must be on: a
    stage, all (None), or the first stage whose forward pass reads an input. Others stay where they are made.
    `cotangents` maps inputs to the results whose gradients they are. If the code names no stage, the units that depend
    on `parameters` are cut automatically, so that stages can keep saved values in `memory` bytes, if that is given.

    Raises `ShardingError` for values that flow backwards, a stage without work, and a schedule that cannot run.
    """
    parts = units(program)
    calls = list(dict.fromkeys(u.tag.microbatches for u in parts if u.tag.microbatches is not None))
    if len(calls) > 1:
        raise ShardingError(
            "one program has several calls of sl.microbatch",
            [f"n={x.n}, schedule={x.schedule!r}" for x in calls],
            rule="one call cuts the batch of a pipeline, so that one schedule orders its fragments",
        )
    how = calls[0] if calls else ONCE
    shared = list_weight_units(parts, parameters)
    named: Mapping[Unit, int] = {u: u.tag.stage for u in parts if u.tag.stage is not None and u not in shared}
    shape = choose_shape(how, stages, {*named.values()})
    orders = order_fragments(how.schedule, shape)
    why = None
    is_trained = any(u.backward for u in parts)
    if not named and (is_trained or not any(v in inputs for v in parameters)):
        live = count_live(shape, orders)
        trained = {program.inputs[i] for i in program.replaced}
        named, why = choose_stages(program, parts, shape.chain_length, parameters, trained, live, memory)
    boundary = Boundary(program.inputs, program.outputs, inputs, parameters, cotangents)
    assignment = assign(parts, named, boundary, shape)
    if why is not None and _moves(assignment, shape, inputs):
        assignment, why = assign(parts, {}, boundary, shape), None
    staged = _Cut(program, parts, assignment, shape, orders, outputs, cotangents, parameters).run()
    return replace(staged, partition=why, schedule=how.schedule)


def _moves(assignment: Assignment, shape: PipelineShape, homes: Mapping[Var, int]) -> bool:
    """Returns whether parameters that live on a stage would have to move to the first one that reads them."""
    users = {v: {shape.stage_and_chunk(i)[0] for i in chain} for v, chain in assignment.users.items() if chain}
    return any(v in homes and homes[v] != min(stages) for v, stages in users.items())


class _Cut:
    def __init__(
        self,
        program: Program,
        parts: Sequence[Unit],
        assignment: Assignment,
        shape: PipelineShape,
        orders: Orders,
        outputs: Mapping[int, Var | int | None],
        cotangents: Mapping[Var, Var],
        parameters: Collection[Var],
    ) -> None:
        self.parameters = set(parameters)
        self.late_values = set(cotangents)  # they depend on a cotangent
        for u in parts if cotangents else ():
            if not self.late_values.isdisjoint(u.reads):
                self.late_values.update(u.makes)
        self.is_split = bool(cotangents)
        self.named, self.gradients, self.users = assignment.named, assignment.gradients, assignment.users
        self.program, self.parts, self.shape, self.orders = program, parts, shape, orders
        self.chain, self.home = assignment.units, assignment.values
        self.number = {u: i for i, u in enumerate(parts)}
        self.makers = {v: u for u in parts for v in u.makes}
        self.readers = defaultdict[Var, list[Unit]](list)
        for u in parts:
            for v in dict.fromkeys(u.reads):
                self.readers[v].append(u)
        self.at = [{f: i for i, f in enumerate(order)} for order in orders]
        self.index: dict[tuple[Unit, int], int] = {}  # by unit and stage
        self.fragments: dict[Unit, Fragment] = {}  # of units that belong to one
        self.outputs = {i: at for i, at in outputs.items() if not isinstance(at, Var)}
        self.outputs |= {
            i: s for i, at in outputs.items() if isinstance(at, Var) and (s := self._owner(at)) is not None
        }

    def run(self) -> Staged:
        """Places all units, and writes the programs."""
        self.late = self._weight_gradients() if self.shape.split_weights else frozenset()
        faults: list[str] = []
        for u in self.parts:
            if (chain := self.chain[u]) is not None:
                faults += self._place(u, chain)
        if faults:
            raise ShardingError(
                "the schedule runs fragments before what they need",
                [*dict.fromkeys(faults)][:10],
                rule="a fragment reads values of its own fragment and of earlier ones",
                remedy='schedule="gpipe" runs all forward fragments first; or take the gradients inside the function',
            )
        for u in reversed(self.parts):
            if self.chain[u] is None:
                self._place_copies(u)
        return self._write()

    # Places ---------------------------------------------------------------------------------------------------------

    def _owner(self, v: Var) -> int | None:
        """Returns the first stage whose forward pass reads a parameter."""
        return min((self._device(i)[0] for i in self.users.get(v, ())), default=None)

    def _device(self, chain: int) -> tuple[int, int]:
        return self.shape.stage_and_chunk(chain)

    def _fragment(self, u: Unit, chain: int) -> Fragment | None:
        """Returns the fragment of a unit; None if it belongs to no microbatch, or runs behind the backward pass."""
        microbatch = u.tag.microbatch
        if microbatch is None:
            late = not u.backward and not self.gradients.isdisjoint((*u.reads, *u.makes))
            if self.shape.microbatches > 1 or (late and u not in self.named):
                return None
            microbatch = 0
        stage, chunk = self._device(chain)
        kind: Kind = "W" if u in self.late else "B" if u.backward or not self.gradients.isdisjoint(u.reads) else "F"
        return Fragment(kind, microbatch, stage, chunk)

    def _place(self, u: Unit, chain: int) -> list[str]:
        """Places a unit of one stage; returns the fragments that its own one would run before."""
        stage, chunk = self._device(chain)
        operands = [(v, self._seen(u, v, stage, chunk)) for v in u.reads if v in self.home and v in self.makers]
        latest = max((i for _, i in operands), default=-1)
        own = self._fragment(u, chain)
        self.index[u, stage] = latest if own is None else self.at[stage][own]
        if own is not None:
            self.fragments[u] = own
        if own is None or latest <= self.at[stage][own]:
            return []
        if u.tag.microbatch is None:  # a second pass, outside of `sl.microbatch`, runs behind the first one
            self.index[u, stage] = latest
            return []
        v, at = max(operands, key=lambda item: item[1])
        return [f"{own!r} needs {v.name} of {self.orders[stage][at]!r}, which runs later"]

    def _seen(self, u: Unit, v: Var, stage: int, chunk: int) -> int:
        """Returns the index, on the stage of `u`, of the fragment in which a value is there."""
        maker = self.makers[v]
        home, _ = self._device(self.home[v])
        index = self.index[maker, home]
        if home == stage or index < 0:
            return index
        if not u.backward and u.tag.microbatch is None and v in self.gradients:
            # clipping or an optimizer, which waits for another stage, runs behind all fragments
            return len(self.orders[stage]) - 1
        f = self.orders[home][index]
        return self.at[stage][f._replace(stage=stage, chunk=chunk)]

    def _place_copies(self, u: Unit) -> None:
        """Places a unit that all stages have in front of its first reader on each stage that needs it."""
        outputs = {i for i, x in enumerate(self.program.outputs) if x in u.makes}
        last = {stage: len(order) - 1 for stage, order in enumerate(self.orders)}
        if outputs:
            self.index.update({(u, stage): last[stage] for stage in last})
        for v in u.makes:
            for reader in self.readers[v]:
                for stage in last:
                    if (index := self.index.get((reader, stage))) is not None:
                        self.index[u, stage] = min(index, self.index.get((u, stage), index))

    def _weight_gradients(self) -> frozenset[Unit]:
        """Returns the backward units of each fragment from which no earlier stage needs anything."""
        needed: set[Unit] = set()
        for u in reversed(self.parts):
            for v in u.makes:
                for r in self.readers[v]:
                    same = r.tag.microbatch == u.tag.microbatch and r.backward
                    if same and (r in needed or self.chain[r] != self.chain[u]):
                        needed.add(u)
        return frozenset(u for u in self.parts if u.backward and u.tag.microbatch is not None and u not in needed)

    # Programs -------------------------------------------------------------------------------------------------------

    def _write(self) -> Staged:
        homes = tuple(self._output_home(i, x) for i, x in enumerate(self.program.outputs))
        orders = [self._ordered(stage) for stage in range(self.shape.stages)]
        arrivals = self._arrivals(orders)
        messages: list[Message] = []
        sends = defaultdict[tuple[int, Var], list[Message]](list)  # by sender and value
        for stage, order in enumerate(orders):
            for v in [*(v for v in self.program.inputs if v in self.home), *(v for u in order for v in u.makes)]:
                if self._home(v) == stage:
                    for receiver in sorted(r for r, values in enumerate(arrivals) if v in values):
                        reader = arrivals[receiver][v]
                        m = Message(len(messages), v, stage, receiver, self._source(v), reader)
                        messages.append(m)
                        sends[stage, v].append(m)
        programs = [self._stage_program(stage, order, sends, homes) for stage, order in enumerate(orders)]
        return Staged(self.shape, self.orders, tuple(programs), None, homes, tuple(messages))

    def _home(self, v: Var) -> int | None:
        return None if v not in self.home else self._device(self.home[v])[0]

    def _output_home(self, i: int, x: Any) -> int | None:
        return self.outputs[i] if i in self.outputs else self._home(x) if isinstance(x, Var) else None

    def _source(self, v: Var) -> Fragment | None:
        maker = self.makers.get(v)
        return None if maker is None else self.fragments.get(maker)

    def _ordered(self, stage: int) -> list[Unit]:
        own = [u for u in self.parts if (u, stage) in self.index]
        return sorted(own, key=lambda u: (self.index[u, stage], self.number[u]))

    def _arrivals(self, orders: Sequence[Sequence[Unit]]) -> list[dict[Var, Fragment | None]]:
        """Returns the values of other stages that each stage reads, with the fragment that reads them first."""
        arrivals: list[dict[Var, Fragment | None]] = []
        for stage, order in enumerate(orders):
            values: dict[Var, Fragment | None] = {}
            for u in order:
                for v in u.reads:
                    if v in self.home and self._home(v) != stage and values.get(v) is None:
                        values[v] = self.fragments.get(u)
            for i, at in self.outputs.items():
                x = self.program.outputs[i]
                if at in (None, stage) and isinstance(x, Var) and x in self.home and self._home(x) != stage:
                    values.setdefault(x, None)
            arrivals.append(values)
        return arrivals

    def _stage_program(
        self,
        stage: int,
        order: Sequence[Unit],
        sends: Mapping[tuple[int, Var], Sequence[Message]],
        homes: Sequence[int | None],
    ) -> Program:
        local = {
            m.var: replace(m.var, name=f"{m.var.name}.received")
            for ms in sends.values()
            for m in ms
            if m.receiver == stage
        }
        copies = (v for u in order if self.chain[u] is None for v in u.makes)  # each stage has its own
        local |= {v: replace(v, name=f"{v.name}.s{stage}") for v in copies}
        incoming = _in_order([m for ms in sends.values() for m in ms if m.receiver == stage], order)
        steps: list[Step] = [
            self._send(m) for v in self.program.inputs for m in sends.get((stage, v), ()) if v in self.home
        ]
        for u in order:
            for m in incoming.pop(u, ()):
                steps.append(self._receive(m, local[m.var]))
            steps += [self._tagged(swapped(s, local), self.fragments.get(u)) for s in u.steps]
            steps += [self._send(m) for v in u.makes for m in sends.get((stage, v), ())]
        for m in incoming.pop(None, ()):
            steps.append(self._receive(m, local[m.var]))
        mine = [not isinstance(x, Var) or homes[i] in (None, stage) for i, x in enumerate(self.program.outputs)]
        outputs = tuple(
            (local.get(x, x) if isinstance(x, Var) else x) if own else None
            for x, own in zip(self.program.outputs, mine, strict=True)
        )
        replaced = {i: at for i, at in self.program.replaced.items() if mine[at]}
        program = replace(self.program, steps=tuple(steps), outputs=outputs, replaced=replaced)
        return program.with_vars({v: replace(v, elsewhere=True) for v in self._absent(program, stage)})

    def _absent(self, program: Program, stage: int) -> list[Var]:
        """Returns the inputs that live on other stages, or will: parameters on all stages that only others read."""
        used = {v for step in program.steps for v in reads(step)} | {*program.results}
        return [
            v
            for v in program.inputs
            if v not in used and (self._home(v) not in (None, stage) or (v not in self.home and v in self.parameters))
        ]

    def _send(self, m: Message) -> Step:
        return self._tagged(Compute(SEND, (m.var, m.receiver, m.number), {}, (), *self._origin(m.var)), m.source)

    def _receive(self, m: Message, out: Var) -> Step:
        return self._tagged(Compute(RECEIVE, (m.sender, m.number), {}, (out,), *self._origin(m.var)), m.target)

    def _tagged(self, step: Step, fragment: Fragment | None) -> Step:
        return step if fragment is None else tag_step(step, fragment, self.shape)

    def _origin(self, v: Var) -> tuple[Line | None, bool]:
        """Returns the line of a value, and whether its message belongs to the backward pass."""
        maker = self.makers.get(v)
        backward = v in self.late_values if self.is_split else maker is not None and maker.backward
        return None if maker is None else maker.line, backward


def _in_order(messages: Sequence[Message], order: Sequence[Unit]) -> dict[Unit | None, list[Message]]:
    """Returns the messages that a stage receives in front of each unit; those of one sender keep their order."""
    first: dict[Var, int] = {}
    for i, u in enumerate(order):
        for v in u.reads:
            first.setdefault(v, i)
    received: dict[Unit | None, list[Message]] = defaultdict(list)
    soonest: dict[int, int] = {}  # by sender
    for m in sorted(messages, key=lambda m: -m.number):
        at = min(first.get(m.var, len(order)), soonest.get(m.sender, len(order)))
        soonest[m.sender] = at
        received[order[at] if at < len(order) else None].insert(0, m)
    return received
