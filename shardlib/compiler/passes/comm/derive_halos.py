"""Derives borders of a pointwise result from the borders of its operands, so that only these are sent.

The receiver computes the same bits. So squares and products of two images need no messages besides those of the images.
If elements are repeated, as in an enlarged image, each is sent once.
"""

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
class DerivedBorder:
    """The border that a message carried: sent itself, or computed by `step` from borders of its operands.

    If `step` repeats elements, the border is the range `repeated_range` of the repeated border.
    """

    move: Collective
    border: Border | None
    step: Compute | None = None
    operands: tuple[DerivedBorder, ...] = ()
    repeated_range: Border | None = None

    def borders(self) -> Iterator[Border]:
        """Yields the borders that are sent."""
        if self.border is not None:
            yield self.border
        for operand in self.operands:
            yield from operand.borders()

    @property
    def value(self) -> Var:
        """The variable whose border this is."""
        if self.border is not None:
            return self.border.root
        assert self.step is not None
        return self.step.out_vars[0]

    def opened(self, values: Collection[Var], steps: Mapping[Var, Compute]) -> DerivedBorder:
        """Returns the border with those of `values` computed from their operands' borders."""
        if self.border is None:
            return replace(self, operands=tuple(x.opened(values, steps) for x in self.operands))
        if self.border.root not in values:
            return self
        step = steps[self.border.root]
        if times := repeats(step):
            single = DerivedBorder(self.move, self.border.before_repeat(step.operands[0], times)).opened(values, steps)
            return DerivedBorder(self.move, None, step, (single,), self.border)
        operands = (
            DerivedBorder(self.move, replace(self.border, root=x)).opened(values, steps)
            for x in dict.fromkeys(step.operands)
        )
        return DerivedBorder(self.move, None, step, tuple(operands))


def joined(borders: Iterable[Border]) -> list[Border]:
    """Merges borders into as few as possible."""
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


def derive(borders: Sequence[Border], steps: Mapping[Var, Compute]) -> list[DerivedBorder]:
    """Returns the derivations of borders that send the fewest elements."""
    derived, better = [DerivedBorder(border.moves[0], border) for border in borders], True
    while better:
        better, by_value = False, _by_value(derived)
        for path in _ways(by_value.keys(), steps):
            values = dict.fromkeys([*path, *(x for value in path for x in steps[value].operands)])
            now = [border for value in values for border in by_value.get(value, ())]
            then = [x for border in now for x in DerivedBorder(border.moves[0], border).opened(path, steps).borders()]
            if _sent(then) < _sent(now):
                derived = [each.opened(path, steps) for each in derived]
                better, by_value = True, _by_value(derived)
    return derived


def _by_value(derived: Iterable[DerivedBorder]) -> dict[Var, list[Border]]:
    borders = dict[Var, list[Border]]()
    for border in (border for each in derived for border in each.borders()):
        borders.setdefault(border.root, []).append(border)
    return borders


def _ways(roots: Collection[Var], steps: Mapping[Var, Compute]) -> list[Collection[Var]]:
    """Returns sets of values whose borders may be computed.

    They depend on other values whose borders are sent; or several depend on one value; or one repeats another.
    """
    paths, by_source = list[Collection[Var]](), dict[Var, list[list[Var]]]()
    for root in roots:
        if (path := _path(root, {*roots} - {root}, steps)) is not None:
            paths.append(path)
        value, path = root, []
        while len(path) < _DEEP and (step := _exact(value, steps)) is not None and len({*step.operands}) == 1:
            path, value = [*path, value], step.operands[0]
            by_source.setdefault(value, []).append(path)
    several = [[x for path in shared for x in path] for shared in by_source.values()]
    return paths + [path for path in several if len(path) > 1 or repeats(steps[path[0]])]


def _path(value: Var, ends: Collection[Var], steps: Mapping[Var, Compute], deep: int = _DEEP) -> list[Var] | None:
    """Returns the values between `ends` and a value computed from them; None if it depends on others, too."""
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
    """Returns the number of repetitions of each element, by dim, if a step repeats a value that is sharded alike."""
    if len(step.operands) != 1 or len(step.out_vars) != 1:
        return ()
    (x,), (value,) = step.operands, step.out_vars
    op = None if value.value is None else value.value.op
    times = () if op is None or op.target is not step.target else repeated(op.call)
    if not times or value.layout is None or x.layout is None:
        return ()
    dims = zip(x.layout.dims, value.layout.dims, times, strict=True)
    return times if all(_in_blocks(*dim) for dim in dims) else ()


def _in_blocks(one: Dim, other: Dim, n: int) -> bool:
    """Returns whether each device has `n` elements of dim `other` for each of its elements of dim `one`."""
    if not any(f.axes for f in (*one, *other)):
        return True
    *outer, (last, inner) = itertools.zip_longest(one, other, fillvalue=Factor(1))
    same = last.axes == inner.axes and tuple(n * k for k in last.pieces) == inner.pieces
    return same and all(a == b for a, b in outer)


def _exact(value: Var, steps: Mapping[Var, Compute]) -> Compute | None:
    """Returns the step that computes a value from others of its layout, if it rounds alike on all devices."""
    step = steps.get(value)
    if step is not None and repeats(step):
        return step
    if step is None or not has_trait(step.target, "correctly_rounded") or step.kwargs or value.layout is None:
        return None
    plain = len(step.arg_leaves) == len(step.operands) > 0 and step.outs == (value,) and value.dtype.is_floating_point
    alike = all(x.layout == value.layout and x.dtype == value.dtype for x in step.operands)
    return step if plain and alike else None


def _sent(borders: Iterable[Border]) -> tuple[int, int]:
    """Returns the elements and the number of messages."""
    groups = joined(borders)
    return sum(map(elements, groups)), len(groups)


def elements(border: Border) -> int:
    """Returns the elements that the busiest device sends."""
    lines = max(b - a for a, b in border.ranges.values())
    return lines * math.prod(n for d, n in enumerate(border.shape) if d != border.dim)
