"""Borders of a value that is made of others, element by element, need not travel where the borders of these do: whoever
has them makes them there, to the same bits. So squares and products of two images cost no borders beside those of the
images, and multiples of one value are borders of that. Of a value whose elements are there several times, as of an
enlarged image, travels each once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardlib.compiler.passes.comm.halo import Border
from shardlib.compiler.program.steps import Collective, Compute, Var
from shardlib.core.aten.op_traits import has_trait
from shardlib.rules.nn_ops.interpolate import repeated
from shardlib.sharding.layout import Dim, Factor

_DEEP = 4  # ops between one border and others


@dataclass(frozen=True)
class Made:
    """What a message brought, as it is had where it arrives: a border by itself, or an op on those of its operands; or
    a range, `cut`, of what their border is, repeated."""

    move: Collective
    border: Border | None
    step: Compute | None = None
    of: tuple[Made, ...] = ()
    cut: Border | None = None

    def borders(self) -> Iterator[Border]:
        if self.border is not None:
            yield self.border
        for made in self.of:
            yield from made.borders()

    @property
    def value(self) -> Var:
        """Whose border it is."""
        if self.border is not None:
            return self.border.root
        assert self.step is not None
        return self.step.made[0]

    def opened(self, values: Collection[Var], steps: Mapping[Var, Compute]) -> Made:
        """The same, with the borders of some values made of those of their operands."""
        if self.border is None:
            return replace(self, of=tuple(made.opened(values, steps) for made in self.of))
        if self.border.root not in values:
            return self
        step = steps[self.border.root]
        if times := repeats(step):
            of_one = Made(self.move, self.border.of_repeated(step.operands[0], times)).opened(values, steps)
            return Made(self.move, None, step, (of_one,), self.border)
        of = (Made(self.move, replace(self.border, root=x)).opened(values, steps) for x in dict.fromkeys(step.operands))
        return Made(self.move, None, step, tuple(of))


def joined(borders: Iterable[Border]) -> list[Border]:
    """As few borders as these can be."""
    groups = dict[Hashable, list[Border]]()
    for border in borders:
        alike = groups.setdefault(border.kind, [])
        for k, group in enumerate(alike):
            if (both := group.joined(border)) is not None:
                alike[k] = both
                break
        else:
            alike.append(border)
    return [border for alike in groups.values() for border in alike]


def derive(borders: Sequence[Border], steps: Mapping[Var, Compute]) -> list[Made]:
    """How each of these borders is had, in such a way that least is sent."""
    made, better = [Made(border.moves[0], border) for border in borders], True
    while better:
        better, of = False, _by_value(made)
        for path in _ways(of.keys(), steps):
            values = dict.fromkeys([*path, *(x for value in path for x in steps[value].operands)])
            now = [border for value in values for border in of.get(value, ())]
            then = [x for border in now for x in Made(border.moves[0], border).opened(path, steps).borders()]
            if _sent(then) < _sent(now):
                made = [each.opened(path, steps) for each in made]
                better, of = True, _by_value(made)
    return made


def _by_value(made: Iterable[Made]) -> dict[Var, list[Border]]:
    of = dict[Var, list[Border]]()
    for border in (border for each in made for border in each.borders()):
        of.setdefault(border.root, []).append(border)
    return of


def _ways(roots: Collection[Var], steps: Mapping[Var, Compute]) -> list[Collection[Var]]:
    """Sets of values whose borders may be made instead: of others that are sent, or several of one that is not, or of
    one that repeats another."""
    found, of_one = list[Collection[Var]](), dict[Var, list[list[Var]]]()
    for root in roots:
        if (path := _path(root, {*roots} - {root}, steps)) is not None:
            found.append(path)
        value, path = root, []
        while len(path) < _DEEP and (step := _exact(value, steps)) is not None and len({*step.operands}) == 1:
            path, value = [*path, value], step.operands[0]
            of_one.setdefault(value, []).append(path)
    several = [[x for path in paths for x in path] for paths in of_one.values()]
    return found + [path for path in several if len(path) > 1 or repeats(steps[path[0]])]


def _path(value: Var, ends: Collection[Var], steps: Mapping[Var, Compute], deep: int = _DEEP) -> list[Var] | None:
    """The values between one and `ends` that it is made of; None where it is made of others, too."""
    step = _exact(value, steps)
    if step is None or not deep:
        return None
    path = [value]
    for x in step.operands:
        if x not in ends:
            if (more := _path(x, ends, steps, deep - 1)) is None:
                return None
            path += more
    return path


def repeats(step: Compute) -> Sequence[int]:
    """How often, by dim, a step repeats each element of a value that lies as what it makes; empty if it does not."""
    if len(step.operands) != 1 or len(step.made) != 1:
        return ()
    (x,), (value,) = step.operands, step.made
    op = None if value.value is None else value.value.op
    times = () if op is None or op.target is not step.target else repeated(op.call)
    if not times or value.layout is None or x.layout is None:
        return ()
    dims = zip(x.layout.dims, value.layout.dims, times, strict=True)
    return times if all(_in_blocks(*dim) for dim in dims) else ()


def _in_blocks(one: Dim, other: Dim, n: int) -> bool:
    """Returns whether a device has n elements of a dim for each that it has of another one."""
    if not any(f.axes for f in (*one, *other)):
        return True
    *outer, (last, inner) = itertools.zip_longest(one, other, fillvalue=Factor(1))
    same = last.axes == inner.axes and tuple(n * k for k in last.pieces) == inner.pieces
    return same and all(a == b for a, b in outer)


def _exact(value: Var, steps: Mapping[Var, Compute]) -> Compute | None:
    """What makes a value, of others that lie as it does, if that rounds once, or rounds nothing."""
    step = steps.get(value)
    if step is not None and repeats(step):
        return step
    if step is None or not has_trait(step.target, "correctly_rounded") or step.kwargs or value.layout is None:
        return None
    plain = len(step.told) == len(step.operands) > 0 and step.outs == (value,) and value.dtype.is_floating_point
    alike = all(x.layout == value.layout and x.dtype == value.dtype for x in step.operands)
    return step if plain and alike else None


def _sent(borders: Iterable[Border]) -> tuple[int, int]:
    """Elements and messages."""
    groups = joined(borders)
    return sum(map(elements, groups)), len(groups)


def elements(border: Border) -> int:
    """How many some device sends."""
    lines = max(b - a for a, b in border.ranges.values())
    return lines * math.prod(n for d, n in enumerate(border.shape) if d != border.dim)
