"""Finds the steps that a device may run in parts, on some rows after the others.

A cut splits one dim of one value. The sharding rules show where it comes from and where it leads: a factor that may be
sharded over devices may also be split in time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardlib.compiler.passes.split_backward import gives
from shardlib.compiler.program.steps import Collective, Compute, Program, Start, Step, Var, reads
from shardlib.compiler.program.sym_int import Sym
from shardlib.compiler.program.verify import Measured, Run
from shardlib.core.torch_internals.torch_private import OpOverload, without_modes
from shardlib.rules import rule_for
from shardlib.rules.rule import Call, Labels, Meta, Path, Rule
from shardlib.sharding.mesh.axis import group_size


class Cut(NamedTuple):
    """Splits dim `dim` of a local tensor, seen as (`outer`, parts, rest): part i has index i in the middle."""

    dim: int
    outer: int = 1


class Way(NamedTuple):
    """The way a step runs on a part: the cut of each operand and result (None: whole).

    `ints` are the integers among its arguments that are sizes of parts, by path. A result without a cut is the sum of
    the parts' results.
    """

    operands: tuple[Cut | None, ...]
    results: tuple[Cut | None, ...]
    ints: Mapping[Path, int] = {}


@dataclass
class Region:
    """Steps that one cut leads through, and the `cuts` of their values; `sums` are whole results that parts add up."""

    cuts: dict[Var, Cut]
    ways: dict[Step, Way] = field(default_factory=dict)
    sums: set[Var] = field(default_factory=set)


class Cutter:
    """Finds the regions of a program that can run in `n` parts."""

    def __init__(self, program: Program, n: int) -> None:
        self.n = n
        self.device, self.uneven = Run(program, {}, Measured()), _uneven(program)
        self.around: dict[Var, list[Step]] = defaultdict(list)
        for step in program.steps:
            for v in dict.fromkeys((*reads(step), *gives(step))):
                self.around[v].append(step)
        with without_modes():
            self.device.run(program.steps)

    def shape(self, v: Var) -> tuple[int, ...]:
        """Returns the shape of a value on every device; () if it is unknown or differs."""
        x = None if v in self.uneven else self.device.held(v)
        return () if x is None or 0 in x.shape else x.shape

    def seeds(self, v: Var) -> Iterator[Cut]:
        """Returns a cut of every dim that the number of parts divides."""
        return (Cut(d) for d, size in enumerate(self.shape(v)) if size % self.n == 0)

    def region(self, v: Var, cut: Cut) -> Region:
        """Returns the region that a cut leads to."""
        region, todo = Region({v: cut}), deque([v])
        while todo:
            for step in self.around[todo.popleft()]:
                if step in region.ways or (way := self._way(step, region)) is None:
                    continue
                region.ways[step] = way
                region.sums.update(_summed(step, way))
                todo += [v for v, _ in _cuts_of(step, way) if v not in region.cuts]
                region.cuts |= _cuts_of(step, way)
        return region

    def _way(self, step: Step, region: Region) -> Way | None:
        """Returns the way a step with cut values runs in parts; None if it cannot."""
        cuts = region.cuts
        if isinstance(step, Start):
            ways = self._sent(step.moves, cuts)
        elif isinstance(step, Compute):
            ways = self._computed(step, cuts)
        else:
            return None
        for way in ways:
            step_cuts = dict[Var, Cut]()
            same = all(step_cuts.setdefault(v, cuts.get(v, cut)) == cut for v, cut in _cuts_of(step, way))
            if same and region.sums.isdisjoint(step_cuts) and cuts.keys().isdisjoint(_summed(step, way)):
                return way
        return None

    def _computed(self, step: Compute, cuts: Mapping[Var, Cut]) -> Iterator[Way]:
        """Yields a way along each cut factor."""
        if step.work is not None or not step.is_pure or not (call := self._call(step)) or not (rule := rule_for(call)):
            return
        labels = (*rule.operands, *rule.results)
        fixed = _fixed(rule)
        for v, dims in zip(_values(step), labels, strict=True):
            cut = None if v is None else cuts.get(v)
            along = None if cut is None or cut.dim >= len(dims) else self._factor(dims[cut.dim], rule.sizes, cut.outer)
            if along is None or along[0] in fixed:
                continue
            f, outer = along
            every = [_cut(x, f, outer, rule.sizes) for x in labels]
            operands, results = every[: len(rule.operands)], every[len(rule.operands) :]
            adds = all(
                v is None or c is not None or rule.partial_kind(r, f) == "sum"
                for r, (v, c) in enumerate(zip(step.outs, results, strict=True))
            )
            if adds and any(operands):
                ints = {
                    path: k * math.prod(rule.sizes[x] for x in factors) // self.n
                    for path, (k, factors) in rule.ints.items()
                    if f in factors
                }
                yield Way(tuple(operands), tuple(results), ints)

    def _factor(self, dim: Sequence[str], sizes: Mapping[str, int], outer: int) -> tuple[str, int] | None:
        """Returns the factor of a dim that a cut splits, and the cut's outer size in it."""
        for f in dim:
            if sizes[f] % (outer * self.n) == 0:
                return f, outer
            if outer % sizes[f]:
                return None
            outer //= sizes[f]
        return None

    def _call(self, step: Compute) -> Call | None:
        """Returns a call for the rules; None if its arguments differ by device, or its shapes are unknown."""
        metas = {v: x for v in (*step.operands, *step.out_vars) if (x := self._meta(v)) is not None}
        if not all(v in metas for v in (*step.operands, *step.out_vars)) or not isinstance(step.target, OpOverload):
            return None
        if len(step.arg_leaves) > len(step.operands) and torch.Tag.pointwise not in step.target.tags:
            return None  # its `Sym`s are sizes or positions of all rows

        def seen(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return tuple(map(seen, x))
            return metas[x] if isinstance(x, Var) else 0 if isinstance(x, Sym) else x

        args, kwargs = seen(step.args), {name: seen(x) for name, x in step.kwargs.items()}
        unread = [None if x is None else Meta(x.shape, x.dtype) for x in self.device.called(step)]
        results = tuple(x if v is None else metas[v] for v, x in zip(step.outs, unread, strict=True))
        return Call(step.target, args, kwargs, tuple(metas[v] for v in step.operands), results)

    def _meta(self, v: Var) -> Meta | None:
        x = None if v in self.uneven else self.device.held(v)
        return None if x is None or 0 in x.shape else Meta(x.shape, x.dtype)

    def _sent(self, moves: Sequence[Collective], cuts: Mapping[Var, Cut]) -> Iterator[Way]:
        """Yields the way of a message along the cut of its source or its result."""
        (c,) = moves if len(moves) == 1 else (None,)
        if c is None or c.kind not in _DIMS or not self.shape(c.source) or not self.shape(c.out):
            return
        n = group_size(c.axes)
        parted, joined = (c.params.get(key) for key in _DIMS[c.kind])  # the dims that it scatters and gathers
        is_even = all(type(n) is int and n == sizes[0] for sizes in _sizes(c) for n in sizes)
        if not is_even or "shapes" in c.params or (parted is not None and parted == joined):
            return
        source, result = cuts.get(c.source), cuts.get(c.out)
        if source is not None:
            result = _through(source, n, parted, joined)
        elif result is not None:
            source = _through(result, n, joined, parted)
        if (
            source
            and result
            and all(
                self.shape(v)[cut.dim] % (cut.outer * self.n) == 0 for v, cut in ((c.source, source), (c.out, result))
            )
        ):
            yield Way((source,), (result,))


def _through(cut: Cut, n: int, parted: int | None, joined: int | None) -> Cut | None:
    """Returns a cut behind a message that scatters dim `parted` over `n` members, and gathers dim `joined`."""
    if cut.dim == parted:
        return Cut(cut.dim, cut.outer // n) if cut.outer % n == 0 else None
    return Cut(cut.dim, cut.outer * n) if cut.dim == joined else cut


# Per kind of message, the parameters that name the dim that it scatters, and the dim that it gathers.
_DIMS = {
    "all_reduce": ("", ""),
    "all_gather": ("", "dim"),
    "reduce_scatter": ("dim", ""),
    "all_to_all": ("split_dim", "concat_dim"),
    "ppermute": ("", ""),
}


# Per parameter that names a dim, the parameter that has the sizes along it.
SIZES = {"dim": "sizes", "split_dim": "split_sizes", "concat_dim": "concat_sizes"}


def _sizes(c: Collective) -> Iterator[Sequence[Any]]:
    return (c.params[key] for key in SIZES.values() if c.params.get(key))


def _fixed(rule: Rule) -> set[str]:
    """Returns the factors that cannot be split: the op needs them whole, or reads beyond its own rows."""
    pairs = {
        *rule.ties.ring.items(),
        *rule.ties.follows.items(),
        *((f, x.by) for f, x in rule.accesses.windows.items()),
    }
    factors = {
        *rule.whole,
        *rule.local.factors,
        *(f for pair in pairs for f in pair),
        *(h.factor for h in rule.accesses.blocks),
    }
    factors |= {rule.accesses.groups.factor, rule.accesses.groups.along} if rule.accesses.groups else set()
    return factors | ({*rule.accesses.lookup.rows} if rule.accesses.lookup else set())


def _cut(labels: Labels, f: str, outer: int, sizes: Mapping[str, int]) -> Cut | None:
    """Returns the cut of a tensor along a factor; None if the tensor lacks the factor."""
    for d, dim in enumerate(labels):
        if f in dim:
            return Cut(d, outer * math.prod(sizes[x] for x in dim[: dim.index(f)]))
    return None


def _values(step: Step) -> tuple[Var | None, ...]:
    """Returns the operands and results of a step, each as often as it occurs."""
    if isinstance(step, Start):
        return (*step.sources, *step.outs)
    return (*step.operands, *step.outs) if isinstance(step, Compute) else ()


def _cuts_of(step: Step, way: Way) -> list[tuple[Var, Cut]]:
    """Returns the cut values of a step with their cuts."""
    pairs = zip(_values(step), (*way.operands, *way.results), strict=True)
    return [(v, cut) for v, cut in pairs if v is not None and cut is not None]


def _summed(step: Step, way: Way) -> list[Var]:
    """Returns the results of a step that are sums over the parts."""
    outs = step.outs if isinstance(step, Compute) else ()
    return [v for v, cut in zip(outs, way.results, strict=False) if v is not None and cut is None]


def _uneven(program: Program) -> set[Var]:
    """Returns the values whose shards may differ in size."""
    uneven = {v for v in program.entry_values if _differs(v)}
    for step in program.steps:
        has_syms = isinstance(step, Compute) and len(step.arg_leaves) > len(step.operands)
        if isinstance(step, Compute) and torch.Tag.pointwise in getattr(step.target, "tags", ()):
            has_syms = False  # its `Sym`s are numbers, not sizes
        elif isinstance(step, Start):
            has_syms = not all(
                type(n) is int and n == sizes[0] for c in step.moves for sizes in _sizes(c) for n in sizes
            )
        is_unknown = has_syms or not uneven.isdisjoint(reads(step))
        uneven.update(v for v in gives(step) if _differs(v) or (v.layout is None and is_unknown))
    return uneven


def _differs(v: Var) -> bool:
    return v.layout is not None and not all(f.is_even for f in v.layout.factors)
