"""Which values of a device can be there in parts: what steps may do to some rows after the others.

One dim of one value is cut, and rules say where it comes from and where it goes: what they let devices cut, a device
may work on in turns.
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
from shardlib.core.torch_private import OpOverload, without_modes
from shardlib.rules import rule_for
from shardlib.rules.rule import Call, Labels, Meta, Path, Rule
from shardlib.sharding.mesh.axis import group_size


class Cut(NamedTuple):
    """Dim `dim` of a local tensor in parts: seen as (`outer`, parts, rest), part i is all that has i in the middle."""

    dim: int
    outer: int = 1


class Way(NamedTuple):
    """How a step works on a part: how each of its operands and results is cut (None: not at all), and, by path, the
    integers among its arguments that are sizes of parts. A result that is not cut is the sum of what parts make."""

    operands: tuple[Cut | None, ...]
    results: tuple[Cut | None, ...]
    ints: Mapping[Path, int] = {}


@dataclass
class Region:
    """Steps that one cut leads through; `cuts` are those of their values, and `sums` what parts add up, which is then
    there as a whole."""

    cuts: dict[Var, Cut]
    ways: dict[Step, Way] = field(default_factory=dict)
    sums: set[Var] = field(default_factory=set)


class Cutter:
    """Finds what of a program can be in `n` parts."""

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
        """The shape that a value has on every device; () where nobody knows."""
        x = None if v in self.uneven else self.device.held(v)
        return () if x is None or 0 in x.shape else x.shape

    def seeds(self, v: Var) -> Iterator[Cut]:
        """Every dim of a value that can be cut."""
        return (Cut(d) for d, size in enumerate(self.shape(v)) if size % self.n == 0)

    def region(self, v: Var, cut: Cut) -> Region:
        """All that a cut leads to."""
        found, todo = Region({v: cut}), deque([v])
        while todo:
            for step in self.around[todo.popleft()]:
                if step in found.ways or (way := self._way(step, found)) is None:
                    continue
                found.ways[step] = way
                found.sums.update(_summed(step, way))
                todo += [v for v, _ in _said(step, way) if v not in found.cuts]
                found.cuts |= _said(step, way)
        return found

    def _way(self, step: Step, region: Region) -> Way | None:
        """How a step works in parts, some of whose values are cut; None: it does not."""
        cuts = region.cuts
        if isinstance(step, Start):
            ways = self._sent(step.moves, cuts)
        elif isinstance(step, Compute):
            ways = self._computed(step, cuts)
        else:
            return None
        for way in ways:
            said = dict[Var, Cut]()
            same = all(said.setdefault(v, cuts.get(v, cut)) == cut for v, cut in _said(step, way))
            if same and region.sums.isdisjoint(said) and cuts.keys().isdisjoint(_summed(step, way)):
                return way
        return None

    def _computed(self, step: Compute, cuts: Mapping[Var, Cut]) -> Iterator[Way]:
        """A way along each factor that is cut."""
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
        """The factor of a dim that a cut cuts, and what is outside the cut in it."""
        for f in dim:
            if sizes[f] % (outer * self.n) == 0:
                return f, outer
            if outer % sizes[f]:
                return None
            outer //= sizes[f]
        return None

    def _call(self, step: Compute) -> Call | None:
        """A call as rules see it; None where they would not see all that matters."""
        metas = {v: x for v in (*step.operands, *step.made) if (x := self._meta(v)) is not None}
        if not all(v in metas for v in (*step.operands, *step.made)) or not isinstance(step.target, OpOverload):
            return None
        if len(step.told) > len(step.operands) and torch.Tag.pointwise not in step.target.tags:
            return None  # told of sizes or places, which are those of all rows

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
        """A way of a message along what is cut of what it brings or takes."""
        (c,) = moves if len(moves) == 1 else (None,)
        if c is None or c.kind not in _DIMS or not self.shape(c.source) or not self.shape(c.out):
            return
        n = group_size(c.axes)
        parted, joined = (c.params.get(key) for key in _DIMS[c.kind])  # dims that it cuts, and that it joins
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
    """A cut behind a message that parts a dim among so many members, and joins another of theirs."""
    if cut.dim == parted:
        return Cut(cut.dim, cut.outer // n) if cut.outer % n == 0 else None
    return Cut(cut.dim, cut.outer * n) if cut.dim == joined else cut


# By kind of message, which of what it is told are the dim that it cuts, and the one that it joins.
_DIMS = {
    "all_reduce": ("", ""),
    "all_gather": ("", "dim"),
    "reduce_scatter": ("dim", ""),
    "all_to_all": ("split_dim", "concat_dim"),
    "ppermute": ("", ""),
}


# By what it is told of a dim, what it is told of sizes along it.
SIZES = {"dim": "sizes", "split_dim": "split_sizes", "concat_dim": "concat_sizes"}


def _sizes(c: Collective) -> Iterator[Sequence[Any]]:
    return (c.params[key] for key in SIZES.values() if c.params.get(key))


def _fixed(rule: Rule) -> set[str]:
    """The factors of which an op must have all, or more than its own rows."""
    pairs = {
        *rule.ties.ring.items(),
        *rule.ties.follows.items(),
        *((f, x.by) for f, x in rule.accesses.windows.items()),
    }
    found = {
        *rule.whole,
        *rule.local.factors,
        *(f for pair in pairs for f in pair),
        *(h.factor for h in rule.accesses.blocks),
    }
    found |= {rule.accesses.groups.factor, rule.accesses.groups.along} if rule.accesses.groups else set()
    return found | ({*rule.accesses.lookup.rows} if rule.accesses.lookup else set())


def _cut(labels: Labels, f: str, outer: int, sizes: Mapping[str, int]) -> Cut | None:
    """The cut of a tensor of which a factor is cut."""
    for d, dim in enumerate(labels):
        if f in dim:
            return Cut(d, outer * math.prod(sizes[x] for x in dim[: dim.index(f)]))
    return None


def _values(step: Step) -> tuple[Var | None, ...]:
    """The operands and results of a step, each as often as it occurs."""
    if isinstance(step, Start):
        return (*step.sources, *step.outs)
    return (*step.operands, *step.outs) if isinstance(step, Compute) else ()


def _said(step: Step, way: Way) -> list[tuple[Var, Cut]]:
    """The values of a step that are cut, and how."""
    pairs = zip(_values(step), (*way.operands, *way.results), strict=True)
    return [(v, cut) for v, cut in pairs if v is not None and cut is not None]


def _summed(step: Step, way: Way) -> list[Var]:
    """The results of a step that are sums of what parts make."""
    outs = step.outs if isinstance(step, Compute) else ()
    return [v for v, cut in zip(outs, way.results, strict=False) if v is not None and cut is None]


def _uneven(program: Program) -> set[Var]:
    """Values of which devices may hold pieces of different sizes."""
    found = {v for v in program.given if _differs(v)}
    for step in program.steps:
        made = gives(step)
        told = isinstance(step, Compute) and len(step.told) > len(step.operands)
        if isinstance(step, Compute) and torch.Tag.pointwise in getattr(step.target, "tags", ()):
            told = False  # numbers, not sizes
        elif isinstance(step, Start):
            told = not all(type(n) is int and n == sizes[0] for c in step.moves for sizes in _sizes(c) for n in sizes)
        lost = told or not found.isdisjoint(reads(step))
        found.update(v for v in made if _differs(v) or (v.layout is None and lost))
    return found


def _differs(v: Var) -> bool:
    return v.layout is not None and not all(f.is_even for f in v.layout.factors)
