"""Splits a batch into parts: a device computes one part while a message of the other is in flight.

This hides the sums of tensor parallelism, which the next step waits for (Wang et al., "Domino", 2024,
arXiv:2409.15241). Each part sends the same messages, with fewer bytes. Sums over rows, such as gradients of weights,
are sums of the parts, so values are the same up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.lower.arguments import put
from shardlib.compiler.passes.comm.bucket_collectives import bundle
from shardlib.compiler.passes.comm.hide_messages import schedule
from shardlib.compiler.passes.comm.row_splits import SIZES, Cut, Cutter, Region, Way
from shardlib.compiler.program.abstract_device import Local
from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import Collective, Compute, Program, Start, Step, Var, Wait, makes, reads
from shardlib.compiler.schedule_options import DEFAULT, Schedule
from shardlib.compiler.simulate.timeline import Timeline, timeline
from shardlib.core.aten.op_names import ADD, ADDED, CAT, NARROW, RESHAPE
from shardlib.core.torch_internals.torch_private import without_modes
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.machine import Machine

_WORTH = 0.05  # required saving, as a fraction of a program's seconds
_NOTE = "part"  # marks steps that slice and concatenate
_TRIED = 4  # messages with the longest waits that are tried
_WRITTEN = 3  # regions around them that are written


def parts(program: Program, how: Schedule = DEFAULT) -> Program:
    """Splits rows into as many parts as the schedule names, or into two if the mesh's machine predicts a gain.

    The machine must know the launch time of calls, and overlap messages with arithmetic. Programs that offload saved
    values are not split by default.
    """
    n, machine = how.parts, Machine.convert(program.mesh.machine)
    decides = n is None and how.saved is None and machine.device.overlaps and machine.device.launch > 0
    if not program.collectives or not (decides or (n or 1) > 1):
        return program

    def timed(program: Program) -> Timeline:
        return timeline(schedule(bundle(program, how)), machine)

    before, least = timed(program), _WORTH if n is None else 0.0
    if before.exposed <= least * before.seconds:
        return program
    cutter = Cutter(program, n or 2)
    every = [_Writer(program, region, cutter).run() for region in _regions(cutter, before, least * before.seconds)]
    best = min(every, key=lambda candidate: timed(candidate).seconds, default=program)
    return best if n is not None or timed(best).seconds < (1 - least) * before.seconds else program


def _regions(cutter: Cutter, before: Timeline, least: float) -> list[Region]:
    """Returns the regions with arithmetic in which devices wait longest, each for more than `least` seconds."""
    late = sorted(before.waits, key=before.waits.__getitem__, reverse=True)
    regions, tried = list[tuple[float, Region]](), set[Any]()
    for c in (c for start in late[:_TRIED] for c in start.moves):
        for cut in cutter.seeds(c.source):
            if (c.source, cut) in tried:
                continue
            region = cutter.region(c.source, cut)
            tried |= {*region.cuts.items()}
            sent = {c for step in region.ways if isinstance(step, Start) for c in step.moves}
            held = sum(seconds for start, seconds in before.waits.items() if not sent.isdisjoint(start.moves))
            if held > least and any(isinstance(step, Compute) and step.flops for step in region.ways):
                regions.append((held, region))
    regions.sort(key=lambda one: one[0], reverse=True)
    return [region for _, region in regions[:_WRITTEN]]


class _Writer:
    """Writes the steps of a region once for each part, alternating at messages; other steps stay whole."""

    def __init__(self, program: Program, region: Region, cutter: Cutter) -> None:
        self.program, self.region, self.n, self.device = program, region, cutter.n, cutter.device
        self.steps: list[Step] = []
        self.now: Step | None = None  # the step that is being written
        self.whole: set[Var] = set(program.entry_values)  # values that exist as a whole
        self.cuts: dict[Var, Cut] = {}  # values that are computed in parts
        self.parts: dict[Var, tuple[Var, ...]] = {}
        self.buffer: list[list[list[Step]]] = []  # per step, the steps of each part
        self.waiting: set[Var] = set()  # results of the buffer

    def run(self) -> Program:
        with without_modes():
            for step in self.program.steps:
                self.now = step
                if isinstance(step, Wait) and step.outs[0] in self.cuts:
                    continue  # each part waits for its own
                way = self.region.ways.get(step)
                if way is None or not self._in_parts(step, way):
                    self._plain(step)
            for v in self.program.results:
                self._join(v)
            self._flush()
        return replace(self.program, steps=self._read())

    def _read(self) -> tuple[Step, ...]:
        """Returns the written steps without slices that no step reads."""
        used, kept = {*self.program.results}, list[Step]()
        for step in reversed(self.steps):
            if not (isinstance(step, Compute) and step.note == _NOTE and used.isdisjoint(step.out_vars)):
                used.update(reads(step))
                kept.append(step)
        return tuple(reversed(kept))

    def _plain(self, step: Step) -> None:
        for v in reads(step):
            self._join(v)
        self.steps.append(step)
        self.whole.update(makes(step))

    def _in_parts(self, step: Step, way: Way) -> bool:
        """Writes a step in parts; returns False if parts do not have the strides that a view needs."""
        assert isinstance(step, Compute | Start)
        operands = step.operands if isinstance(step, Compute) else step.sources
        taken = [self._taken(v, cut) for v, cut in zip(operands, way.operands, strict=True)]
        results = [
            None if v is None else tuple(self._part(v, cut, i) for i in range(self.n))
            for v, cut in zip(step.outs, way.results, strict=True)
        ]
        every: list[list[Step]] = []
        for i in range(self.n):
            outs = tuple(None if parts is None else parts[i] for parts in results)
            steps = self._one(step, way, iter([parts[i] for parts in taken]), outs)
            if not self._gives_parts(steps[0], outs, step.outs, way):
                return False
            every.append(steps)
        for v, cut, parts in zip(step.outs, way.results, results, strict=True):
            if v is None or parts is None:
                continue
            self.waiting.add(v)
            if cut is None:
                self._sum(v, parts, every)
                self.whole.add(v)
            else:
                self.cuts[v], self.parts[v] = cut, parts
        self.buffer.append(every)
        if isinstance(step, Start):
            self._flush()
        return True

    def _one(self, step: Compute | Start, way: Way, taken: Iterator[Var], outs: tuple[Var | None, ...]) -> list[Step]:
        """Returns a step on one part; a message with its wait."""
        if isinstance(step, Compute):
            args, kwargs = rebuild((step.args, dict(step.kwargs)), lambda x: next(taken) if isinstance(x, Var) else x)
            for path, size in way.ints.items():
                args, kwargs = put(args, kwargs, path, size)
            return [replace(step, args=args, kwargs=kwargs, outs=outs, flops=step.flops / self.n)]
        (cut,), (out,), params = way.operands, outs, dict(step.first.params)
        assert cut is not None
        assert out is not None
        for at, sizes in SIZES.items():
            if params.get(at) == cut.dim:
                params[sizes] = [size // self.n for size in params[sizes]]
        part = replace(step.first, source=next(taken), out=out, params=params, bytes=step.first.bytes / self.n)
        return [Start((part,)), Wait((out,))]

    def _gives_parts(self, part: Step, outs: Sequence[Var | None], whole: Sequence[Var | None], way: Way) -> bool:
        """Returns whether a step on a part returns parts of the whole results, as torch's meta kernels see it."""
        results: Sequence[Local | None] = ()
        if isinstance(part, Start):
            results = [self.device.moved(part.first)]
        elif isinstance(part, Compute):
            results = self.device.called(part)
        for r, (v, x, cut) in enumerate(zip(whole, outs, way.results, strict=True)):
            if v is None or x is None:
                continue
            every, have = self.device.held(v), results[r] if r < len(results) else None
            if have is None or every is None or have.shape != _shape(every.shape, cut, self.n):
                return False
            self.device.hold(x, have)
        return True

    def _sum(self, v: Var, parts: Sequence[Var], every: list[list[Step]]) -> None:
        """Adds the parts' results; a product adds to the sum in the same call."""
        total = parts[0]
        for i, (part, steps) in enumerate(zip(parts[1:], every[1:], strict=True), 2):
            last, out = steps[-1], v if i == self.n else self._other(v, f"sum{i}of{self.n}.all")
            assert isinstance(last, Compute)
            if last.target in ADDED:
                steps[-1] = replace(last, target=ADDED[last.target], args=(total, *last.args), outs=(out,))
            else:
                steps.append(self._step(ADD, (total, part), out))
            self.device.run(steps[-1:])
            total = out

    def _flush(self) -> None:
        """Writes the buffer, part after part."""
        for i in range(self.n):
            self.steps += [step for every in self.buffer for step in every[i]]
        self.buffer, self.waiting = [], set()

    # Between parts and the whole ------------------------------------------------------------------------------------

    def _taken(self, v: Var, cut: Cut | None) -> tuple[Var, ...]:
        """Returns the operand of each part of a step."""
        if v in self.parts and cut is not None and self.cuts.get(v, cut) == cut:
            return self.parts[v]
        self._join(v)
        if cut is None:
            return (v,) * self.n
        self.parts[v] = tuple(self._part(v, cut, i) for i in range(self.n))
        self._slice(v, cut, self.parts[v])
        return self.parts[v]

    def _part(self, v: Var, cut: Cut | None, i: int) -> Var:
        name = f"{v.name}.{'sum' if cut is None else ''}{i + 1}of{self.n}"
        shape = None if v.shape is None else _shape(v.shape, cut, self.n)
        layout = v.layout if v.layout is None or cut is None else _layout(v.layout, cut, self.n)
        return replace(v, name=name, layout=layout, shape=shape, part=(i + 1, self.n))

    def _slice(self, v: Var, cut: Cut, parts: Sequence[Var]) -> None:
        """Slices a whole value into parts."""
        held = self.device.held(v)
        assert held is not None
        x, dim, seen = v, cut.dim, held.shape
        if cut.outer > 1:
            seen = _seen(held.shape, cut)
            x, dim = self._call(RESHAPE, (v, [*seen]), self._other(v, "seen")), dim + 1
        size = seen[dim] // self.n
        for i, part in enumerate(parts):
            out = part if x is v else self._other(part, "seen")
            self._call(NARROW, (x, dim, i * size, size), out)
            if out is not part:
                self._call(RESHAPE, (out, [*_shape(held.shape, cut, self.n)]), part)

    def _join(self, v: Var) -> None:
        """Concatenates a value's parts, if it does not exist as a whole."""
        if v in self.waiting:
            self._flush()
        if v in self.whole:
            return
        self.whole.add(v)
        cut, parts, held = self.cuts[v], self.parts[v], self.device.held(v)
        assert held is not None
        if cut.outer == 1:
            self._call(CAT, ([*parts], cut.dim), v)
            return
        seen = [*_seen(_shape(held.shape, cut, self.n), cut)]
        every = [self._call(RESHAPE, (part, seen), self._other(part, "seen")) for part in parts]
        x = self._call(CAT, (every, cut.dim + 1), self._other(v, "seen"))
        self._call(RESHAPE, (x, [*held.shape]), v)

    def _other(self, v: Var, suffix: str) -> Var:
        return Var(f"{v.name}.{suffix}", None, v.dtype)

    def _step(self, target: Any, args: tuple[Any, ...], out: Var) -> Compute:
        at = self.now.first if isinstance(self.now, Start) else self.now
        where = (at.line, at.backward) if isinstance(at, Compute | Collective) else (None, False)
        return Compute(target, args, {}, (out,), *where, note=_NOTE)

    def _call(self, target: Any, args: tuple[Any, ...], out: Var) -> Var:
        self.steps.append(self._step(target, args, out))
        self.device.run(self.steps[-1:])
        return out


def _seen(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """Returns a shape with the dim as two; the second one is split into parts."""
    return (*shape[: cut.dim], cut.outer, shape[cut.dim] // cut.outer, *shape[cut.dim + 1 :])


def _shape(shape: tuple[int, ...], cut: Cut | None, n: int) -> tuple[int, ...]:
    """Returns the shape of a part."""
    return shape if cut is None else (*shape[: cut.dim], shape[cut.dim] // n, *shape[cut.dim + 1 :])


def _layout(layout: Layout, cut: Cut, n: int) -> Layout | None:
    """Returns the layout of a part: a factor of the dim is smaller."""
    outer, dim = cut.outer, layout.dims[cut.dim]
    for k, f in enumerate(dim):
        local = int(f.size) // f.ways
        if local % (outer * n) == 0:
            smaller = (*dim[:k], Factor(int(f.size) // n, f.axes), *dim[k + 1 :])
            return replace(layout, dims=(*layout.dims[: cut.dim], smaller, *layout.dims[cut.dim + 1 :]))
        if outer % local:
            break
        outer //= local
    return None
