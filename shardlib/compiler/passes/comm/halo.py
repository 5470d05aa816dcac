"""What a message carries between neighbors, where that is a range of one value on each device that sends."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardlib.compiler.program.steps import Collective, Compute, Program, Step, Var, Wait
from shardlib.compiler.program.sym_int import axes_of, local_value
from shardlib.core.aten.op_names import CAT, NARROW, RESHAPE, SELECT, SPLIT, VIEW
from shardlib.sharding.mesh.axis import Coords, group_size, member_coords

MOVES = (CAT, NARROW, RESHAPE, SELECT, SPLIT, VIEW)  # what messages are cut out with


class _UnknownError(Exception):
    """Nobody knows, for all devices, where something lies."""


Range = tuple[int, int]


@dataclass(frozen=True)
class Border:
    """Ranges of dim `dim` of `root` that members of a group, by their places in it, send to others; `moves` are the
    messages, each with what it has of them, and the dim that this is there."""

    root: Var
    dim: int
    shape: tuple[int, ...]  # of the root, but for the dim
    sends: Mapping[int, int]
    ranges: Mapping[int, Range]
    moves: tuple[Collective, ...]
    parts: tuple[tuple[int, tuple[int, ...], Mapping[int, int], Mapping[int, Range]], ...]

    @cached_property
    def kind(self) -> Hashable:
        """What borders have in common that may be one message; how far round the ring it goes is among it."""
        move = self.moves[0]
        far = frozenset((b - a) % group_size(move.axes) for a, b in self.sends.items())
        return self.root, self.dim, move.axes, move.backward, far

    def joined(self, other: Border) -> Border | None:
        """Both as one, if less is sent then."""
        if self.kind != other.kind:
            return None
        sends, ranges = {**self.sends, **other.sends}, {**self.ranges, **other.ranges}
        for i in self.sends.keys() & other.sends.keys():
            (low, high), (begin, end) = self.ranges[i], other.ranges[i]
            if self.sends[i] != other.sends[i] or max(low, begin) > min(high, end):
                return None
            ranges[i] = min(low, begin), max(high, end)
        if len({*sends.values()}) < len(sends):  # somebody would get two
            return None
        return replace(
            self, sends=sends, ranges=ranges, moves=(*self.moves, *other.moves), parts=(*self.parts, *other.parts)
        )

    def of_repeated(self, root: Var, times: Sequence[int]) -> Border:
        """What is repeated to make it, of `root`; by dim, so often."""
        n = times[self.dim]
        shape = tuple(size // m for size, m in zip(self.shape, times, strict=True))
        ranges = {i: (low // n, -(-high // n)) for i, (low, high) in self.ranges.items()}
        part = self.dim, shape, self.sends, ranges
        return replace(self, root=root, shape=shape, ranges=ranges, parts=(part,))

    def is_read_where_it_arrives(self, readers: Sequence[Step], program: Program) -> bool:
        """Returns whether whoever gets nothing takes nothing of it: the zeros that such devices have mean nothing."""
        (move,), ((at, *_),) = self.moves, self.parts
        others = set(range(group_size(move.axes))) - {*self.sends.values()}
        for step in readers:
            if isinstance(step, Wait):
                continue
            if not isinstance(step, Compute) or step.target is not NARROW or step.args[1] != at:
                return False
            if any(_number(n, move, i, program) for n in step.args[2:] for i in others):
                return False
        return move.out not in program.results


def _at(move: Collective, i: int, program: Program) -> Coords:
    return member_coords(dict.fromkeys(program.mesh.axis_names, 0), move.axes, i)


def _number(n: Any, move: Collective, i: int, program: Program) -> int:
    """What a number is on a member of the group, wherever else it is."""
    names = {a.name for a in move.axes}
    if any(a.name not in names for a in axes_of(n)):
        return -1
    return int(local_value(n, _at(move, i, program)))


@dataclass(frozen=True)
class Found:
    """Where what a program sends comes from; `names` are the mesh axes along which messages go."""

    program: Program
    names: frozenset[str]

    @cached_property
    def made(self) -> dict[Var, Compute]:
        return {v: s for s in self.program.steps if isinstance(s, Compute) for v in s.made}

    @cached_property
    def sent(self) -> dict[Var, Collective]:
        return {c.out: c for c in self.program.collectives if c.kind == "ppermute"}

    def border(self, move: Collective) -> Border | None:
        """What a message carries, if it is a range of one value on each device that sends."""
        step = self.made.get(move.source)
        if step is None or step.target not in (NARROW, CAT) or not all(a.whole for a in move.axes):
            return None
        at = int(step.args[1] if len(step.args) > 1 else 0)
        ranges, roots = dict[int, Range](), set[tuple[Var, int]]()
        try:
            for i, _ in move.params["pairs"]:
                pieces = self.pieces(move.source, at, _at(move, i, self.program))
                if len(pieces) != 1:
                    return None
                root, dim, *ends = pieces[0]
                roots.add((root, dim))
                ranges[i] = ends[0], ends[1]
            if len(roots) != 1:
                return None
            ((root, dim),) = roots
            origin = _at(move, 0, self.program)
            shape, sent = (
                [self.size(v, d, origin) if d != own else 0 for d in range(self.rank(v))]
                for v, own in ((root, dim), (move.source, at))
            )
        except _UnknownError:
            return None
        sends = dict(move.params["pairs"])
        part = at, tuple(sent), sends, ranges
        return Border(root, dim, tuple(shape), sends, ranges, (move,), (part,))

    def pieces(self, v: Var, dim: int, at: Coords) -> list[tuple[Var, int, int, int]]:
        """What a value is made of along a dim on a device: ranges of others, each with its dim."""
        step = self.made.get(v)
        if step is not None and step.target is NARROW and step.args[1] == dim:
            low, n = (self.number(x, at) for x in step.args[2:])
            if (source := self.made.get(step.args[0])) is None or source.target not in MOVES:
                return [(step.args[0], dim, low, low + n)][: n > 0]
            return _cut(self.pieces(step.args[0], dim, at), low, low + n)
        if step is not None and step.target is SPLIT and _dim(step, 2) == dim:
            sizes = [self.number(x, at) for x in step.args[1]]
            low = sum(sizes[: step.outs.index(v)])
            return _cut(self.pieces(step.args[0], dim, at), low, low + sizes[step.outs.index(v)])
        if step is not None and step.target is CAT and _dim(step, 1) == dim:
            return _cut([piece for x in step.args[0] for piece in self.pieces(x, dim, at)], 0)
        if (
            step is not None
            and step.target in (RESHAPE, SELECT, VIEW)
            and (before := self.before(step, dim, at)) is not None
        ):
            return self.pieces(step.args[0], before, at)
        return [(v, dim, 0, self.size(v, dim, at))]

    def before(self, step: Compute, dim: int, at: Coords) -> int | None:
        """Which dim of its operand a dim of a view is; None where it does not show all of that."""
        if step.target is SELECT:
            chosen = step.args[1] % self.rank(step.args[0])
            return dim + (dim >= chosen) if self.size(step.args[0], chosen, at) == 1 else None
        shape = [self.number(n, at) for n in step.args[1]]
        whole = [self.size(step.args[0], d, at) for d in range(self.rank(step.args[0]))]
        same = (d for d, n in enumerate(whole) if n == shape[dim] and math.prod(whole[:d]) == math.prod(shape[:dim]))
        return next(same, None)

    def rank(self, v: Var) -> int:
        if v.layout is not None:
            return len(v.layout.dims)
        if (move := self.sent.get(v)) is not None:
            return len(move.params["shapes"][0]) if "shapes" in move.params else self.rank(move.source)
        step = self.made.get(v)
        if step is None or step.target not in MOVES:
            raise _UnknownError
        if step.target in (RESHAPE, VIEW):
            return len(step.args[1])
        return self.rank(step.operands[0]) - (step.target is SELECT)

    def size(self, v: Var, dim: int, at: Coords) -> int:
        """How much of a dim a device has."""
        if v.layout is not None:
            if {a.name for f in v.layout.dims[dim] if not f.is_even for a in f.axes} <= self.names:
                return int(v.layout.local_shape(at)[dim])
            raise _UnknownError
        if (move := self.sent.get(v)) is not None:
            sizes = {shape[dim] for shape in move.params.get("shapes", ())}
            if len(sizes) > 1:
                raise _UnknownError
            return self.number(sizes.pop(), at) if sizes else self.size(move.source, dim, at)
        step = self.made.get(v)
        if step is None or step.target not in MOVES:
            raise _UnknownError
        if step.target in (RESHAPE, VIEW):
            return self.number(step.args[1][dim], at)
        if step.target is SELECT:
            return self.size(step.args[0], dim + (dim >= step.args[1] % self.rank(step.args[0])), at)
        if step.target is NARROW and step.args[1] == dim:
            return self.number(step.args[3], at)
        if step.target is SPLIT and _dim(step, 2) == dim:
            return self.number(step.args[1][step.outs.index(v)], at)
        if step.target is CAT and _dim(step, 1) == dim:
            return sum(self.size(x, dim, at) for x in step.args[0])
        return self.size(step.operands[0], dim, at)

    def number(self, n: Any, at: Coords) -> int:
        if any(a.name not in self.names for a in axes_of(n)):
            raise _UnknownError
        return int(local_value(n, at))


def _dim(step: Compute, at: int) -> int:
    return int(step.args[at] if len(step.args) > at else step.kwargs.get("dim", 0))


def _cut(pieces: Sequence[tuple[Var, int, int, int]], low: int, high: int | None = None) -> list[Any]:
    """What is in a range of pieces that follow each other, as few as they can be."""
    found: list[tuple[Var, int, int, int]] = []
    begin = 0
    for root, dim, start, stop in pieces:
        first = start + max(0, low - begin)
        last = stop if high is None else min(stop, start + high - begin)
        begin += stop - start
        if first < last:
            if found and found[-1][:2] == (root, dim) and found[-1][3] == first:
                first = found.pop()[2]
            found.append((root, dim, first, last))
    return found
