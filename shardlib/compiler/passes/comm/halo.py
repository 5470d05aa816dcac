"""Traces messages between neighbors back to the range of one value that each device sends."""

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

MOVES = (CAT, NARROW, RESHAPE, SELECT, SPLIT, VIEW)  # calls that prepare a message


class _UnknownError(Exception):
    """A size or a position is unknown, or differs along other axes."""


Range = tuple[int, int]


@dataclass(frozen=True)
class Border:
    """Ranges of dim `dim` of `root` that members of a group, by their positions, send to others.

    `moves` are the messages that the border serves. `parts` has the dim, shape, pairs and ranges of each message.
    """

    root: Var
    dim: int
    shape: tuple[int, ...]  # of the root, but for the dim
    sends: Mapping[int, int]
    ranges: Mapping[int, Range]
    moves: tuple[Collective, ...]
    parts: tuple[tuple[int, tuple[int, ...], Mapping[int, int], Mapping[int, Range]], ...]

    @cached_property
    def kind(self) -> Hashable:
        """Key of borders that may be one message; it includes the distance on the ring."""
        move = self.moves[0]
        far = frozenset((b - a) % group_size(move.axes) for a, b in self.sends.items())
        return self.root, self.dim, move.axes, move.backward, far

    def joined(self, other: Border) -> Border | None:
        """Returns both borders as one, or None if that would send more."""
        if self.kind != other.kind:
            return None
        sends, ranges = {**self.sends, **other.sends}, {**self.ranges, **other.ranges}
        for i in self.sends.keys() & other.sends.keys():
            (low, high), (begin, end) = self.ranges[i], other.ranges[i]
            if self.sends[i] != other.sends[i] or max(low, begin) > min(high, end):
                return None
            ranges[i] = min(low, begin), max(high, end)
        if len({*sends.values()}) < len(sends):  # a member would receive two messages
            return None
        return replace(
            self, sends=sends, ranges=ranges, moves=(*self.moves, *other.moves), parts=(*self.parts, *other.parts)
        )

    def before_repeat(self, root: Var, times: Sequence[int]) -> Border:
        """Returns the border of `root` whose elements were repeated `times`, by dim."""
        n = times[self.dim]
        shape = tuple(size // m for size, m in zip(self.shape, times, strict=True))
        ranges = {i: (low // n, -(-high // n)) for i, (low, high) in self.ranges.items()}
        part = self.dim, shape, self.sends, ranges
        return replace(self, root=root, shape=shape, ranges=ranges, parts=(part,))

    def is_read_where_it_arrives(self, readers: Sequence[Step], program: Program) -> bool:
        """Returns whether members that receive nothing read nothing of the message: their zeros have no meaning."""
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
    """Returns a number on a member of the group, or -1 if it differs along other axes."""
    names = {a.name for a in move.axes}
    if any(a.name not in names for a in axes_of(n)):
        return -1
    return int(local_value(n, _at(move, i, program)))


@dataclass(frozen=True)
class Trace:
    """Finds the origin of messages in a program; `names` are the mesh axes of the messages."""

    program: Program
    names: frozenset[str]

    @cached_property
    def producer(self) -> dict[Var, Compute]:
        return {v: s for s in self.program.steps if isinstance(s, Compute) for v in s.out_vars}

    @cached_property
    def messages(self) -> dict[Var, Collective]:
        return {c.out: c for c in self.program.collectives if c.kind == "ppermute"}

    def border(self, move: Collective) -> Border | None:
        """Returns the border that a message carries; None if a device sends anything else than one range."""
        step = self.producer.get(move.source)
        if step is None or step.target not in (NARROW, CAT) or not all(a.whole for a in move.axes):
            return None
        at = int(step.args[1] if len(step.args) > 1 else 0)
        ranges, roots = dict[int, Range](), set[tuple[Var, int]]()
        try:
            for i, _ in move.params["pairs"]:
                origins = self.origins(move.source, at, _at(move, i, self.program))
                if len(origins) != 1:
                    return None
                root, dim, *ends = origins[0]
                roots.add((root, dim))
                ranges[i] = ends[0], ends[1]
            if len(roots) != 1:
                return None
            ((root, dim),) = roots
            origin = _at(move, 0, self.program)
            shape, sent_shape = (
                [self.size(v, d, origin) if d != own else 0 for d in range(self.rank(v))]
                for v, own in ((root, dim), (move.source, at))
            )
        except _UnknownError:
            return None
        sends = dict(move.params["pairs"])
        part = at, tuple(sent_shape), sends, ranges
        return Border(root, dim, tuple(shape), sends, ranges, (move,), (part,))

    def origins(self, v: Var, dim: int, at: Coords) -> list[tuple[Var, int, int, int]]:
        """Returns the ranges of other values, each with its dim, that a value consists of along a dim on a device."""
        step = self.producer.get(v)
        if step is not None and step.target is NARROW and step.args[1] == dim:
            low, n = (self.number(x, at) for x in step.args[2:])
            if (source := self.producer.get(step.args[0])) is None or source.target not in MOVES:
                return [(step.args[0], dim, low, low + n)][: n > 0]
            return _subrange(self.origins(step.args[0], dim, at), low, low + n)
        if step is not None and step.target is SPLIT and _dim(step, 2) == dim:
            sizes = [self.number(x, at) for x in step.args[1]]
            low = sum(sizes[: step.outs.index(v)])
            return _subrange(self.origins(step.args[0], dim, at), low, low + sizes[step.outs.index(v)])
        if step is not None and step.target is CAT and _dim(step, 1) == dim:
            return _subrange([part for x in step.args[0] for part in self.origins(x, dim, at)], 0)
        if (
            step is not None
            and step.target in (RESHAPE, SELECT, VIEW)
            and (before := self.before(step, dim, at)) is not None
        ):
            return self.origins(step.args[0], before, at)
        return [(v, dim, 0, self.size(v, dim, at))]

    def before(self, step: Compute, dim: int, at: Coords) -> int | None:
        """Returns the dim of a view's operand that a dim of the view shows whole; None if there is none."""
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
        if (move := self.messages.get(v)) is not None:
            return len(move.params["shapes"][0]) if "shapes" in move.params else self.rank(move.source)
        step = self.producer.get(v)
        if step is None or step.target not in MOVES:
            raise _UnknownError
        if step.target in (RESHAPE, VIEW):
            return len(step.args[1])
        return self.rank(step.operands[0]) - (step.target is SELECT)

    def size(self, v: Var, dim: int, at: Coords) -> int:
        """Returns a device's size of a dim."""
        if v.layout is not None:
            if {a.name for f in v.layout.dims[dim] if not f.is_even for a in f.axes} <= self.names:
                return int(v.layout.local_shape(at)[dim])
            raise _UnknownError
        if (move := self.messages.get(v)) is not None:
            sizes = {shape[dim] for shape in move.params.get("shapes", ())}
            if len(sizes) > 1:
                raise _UnknownError
            return self.number(sizes.pop(), at) if sizes else self.size(move.source, dim, at)
        step = self.producer.get(v)
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


def _subrange(origins: Sequence[tuple[Var, int, int, int]], low: int, high: int | None = None) -> list[Any]:
    """Returns a subrange of consecutive ranges; adjacent ranges of one value are merged."""
    result: list[tuple[Var, int, int, int]] = []
    begin = 0
    for root, dim, start, stop in origins:
        first = start + max(0, low - begin)
        last = stop if high is None else min(stop, start + high - begin)
        begin += stop - start
        if first < last:
            if result and result[-1][:2] == (root, dim) and result[-1][3] == first:
                first = result.pop()[2]
            result.append((root, dim, first, last))
    return result
