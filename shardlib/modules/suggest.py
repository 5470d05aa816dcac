"""`suggest`: a table of specs for a module, from what its traced program does with each weight.

Dims of weights that are the same dim of the program (what one matrix makes and the next contracts, or the heads of
attention) are one *class*: cut together, nothing moves between the matrices, and one sum is left behind the last.
A choice of classes cuts each tensor in one dim at most. Of those choices that cut nearly as much of the weights as
any, `suggest` takes the one whose sums, and whatever must be whole, are the fewest bytes. (Megatron's columns and rows,
Shoeybi et al. 2019, arXiv:1909.08053, come out where a transformer is traced.)
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardlib.errors import ShardingError
from shardlib.graph import Graph, Op, Value
from shardlib.jit import jit
from shardlib.meshes.mesh import Mesh
from shardlib.modules.strategies import TENSOR
from shardlib.plans.plantext import si
from shardlib.propagate.dims import Leaf
from shardlib.propagate.flood import Flood

NEARLY = 0.95  # of the weights that any choice cuts
MOST = 14  # kinds of classes that are combined; the largest

_NUMBER = r"(?<![^.])\d+(?![^.])"
Part = tuple[str, int, int]  # a weight, one of its dims, and which factor of that


class Suggestion(dict[str, str]):
    """A table for `parallelize`; printed, it says why of every line (`why`)."""

    def __init__(self, table: Mapping[str, str], why: Mapping[str, str]) -> None:
        super().__init__(table)
        self.why = dict(why)

    def __str__(self) -> str:
        texts = {pattern: f"{pattern!r}: {spec!r}," for pattern, spec in self.items()}
        width = max(map(len, texts.values()), default=0)
        return "\n".join(f"{text:<{width}}  # {self.why[pattern]}" for pattern, text in texts.items())


@dataclass
class _Kind:
    """Classes that are alike, as those of equal layers: their leaves, the parts of weights in them, and how many
    elements these hold; `bytes` that a device sends, about, where they are cut, by the op that needs it."""

    leaves: set[Leaf]
    parts: set[Part]
    elements: int = 0
    bytes: int = 0


def suggest(module: nn.Module, mesh: Mesh, *example: Any, axis: str | None = None, **more: Any) -> Suggestion:
    """Propose where a module's weights live on one axis of a mesh (default: the one called `tensor`).

    `example` and `more` are arguments of a call, of the sizes that matter; they and the module may be on the meta
    device, and the mesh abstract. The result is a table for `parallelize(module, table)`, in which `*` stands for the
    numbers of layers; print it for the reasons. Weights that are not in it are whole.

    Raises `ShardingError` where the mesh has no such axis, or no weight can be cut over it.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> print(suggest(net, Mesh.abstract(tensor=4), torch.ones(8, 16)))
        '0.weight': 'out@tensor _',  # columns: 2.weight contracts what it makes, so nothing moves between them
        '0.bias': 'out@tensor',      # goes with 0.weight
        '2.weight': '_ in@tensor',   # rows: the sum over devices is left, 512 B of [8, 16]
    """
    axis = axis or next((a for a in mesh.axes if a in TENSOR), None)
    if axis is None or axis not in mesh.axes:
        raise ShardingError(
            f"suggest({type(module).__name__}) on ({', '.join(f'{a}={n}' for a, n in mesh.axes.items())})",
            [f"it has no axis {axis!r}" if axis else f"none of its axes is called {', '.join(TENSOR)}"],
            remedy='name the axis, suggest(module, mesh, *example, axis="model")',
        )
    with Mesh.abstract(mesh.axes):
        compiled = jit(lambda *args, **kwargs: module(*args, **kwargs)).plan(*example, **more).compiled
    weights = {name.removeprefix("module."): value for name, value in compiled.inputs if name.startswith("module.")}
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    weights = {name: value for name, value in weights.items() if name in known and not value.constant}
    flood, graph = compiled.propagated.flood, compiled.graph
    kinds = _kinds(graph, flood, weights, mesh.axes[axis])
    chosen = _best(kinds, [{flood.dims.find(x) for x in flood.leaves(v)} for v in flood.value])
    table: dict[str, str] = {}
    why: dict[str, str] = {}
    for kind in chosen:
        why |= dict(_reasons(graph, flood, weights, kind))
        table |= {name: _spec(flood, weights[name], d, part, axis, why[name]) for name, d, part in kind.parts}
    if not table:
        raise ShardingError(
            f"suggest({type(module).__name__}) finds no weight that {axis!r} could cut",
            rule=f"a dim of a weight is cut {mesh.axes[axis]} ways",
            remedy="write a table: {'*.up.weight': 'ff@tensor embed'}",
        )
    patterns = {name: _pattern(name, table, known) for name in weights if name in table}
    found = {pattern: table[name] for name, pattern in patterns.items()}
    return Suggestion(found, {pattern: why[name] for name, pattern in reversed(patterns.items())})


def _kinds(graph: Graph, flood: Flood, weights: Mapping[str, Value], ways: int) -> list[_Kind]:
    """Classes with parts of weights that are large enough, alike ones together."""
    parts: dict[Leaf, set[Part]] = defaultdict(set)
    for name, value in weights.items():
        for d, dim in enumerate(flood.value[value]):
            for i, leaf in enumerate(dim):
                if (value.shape[d] if i == 0 else flood.dims.size(leaf)) >= ways:
                    parts[flood.dims.find(leaf)].add((name, d, i))
    alike: dict[frozenset[Part], list[Leaf]] = defaultdict(list)
    for leaf, own in parts.items():
        alike[frozenset((_numberless(name), d, i) for name, d, i in own)].append(leaf)
    together = [{flood.dims.find(x) for x in flood.leaves(v)} for v in weights.values()]
    kinds = []
    for leaves in alike.values():
        groups = [leaves] if all(len(v & {*leaves}) < 2 for v in together) else [[leaf] for leaf in leaves]
        kinds += [_Kind({*group}, {p for leaf in group for p in parts[leaf]}) for group in groups]
    sent = [(leaf, _summed(value)) for op in graph.ops for leaf, value in _sent(op, flood)]
    for kind in kinds:
        kind.bytes = sum(value.nbytes for value in {value for leaf, value in sent if leaf in kind.leaves})
        kind.elements = sum(math.prod(weights[name].shape) for name in {name for name, _, _ in kind.parts})
    return sorted(kinds, key=lambda k: -k.elements)[:MOST]


def _sent(op: Op, flood: Flood) -> Iterator[tuple[Leaf, Value]]:
    """What is sent where a class is cut: a result that is summed over it, or an operand that must be whole."""
    if op.rule is None:
        yield from ((leaf, v) for v in op.operands if not v.constant for leaf in _found(flood, flood.leaves(v)))
        return
    for label, leaves in flood.labels.get(op, {}).items():
        for leaf in _found(flood, leaves):
            if label in flood.whole.get(op, ()):
                values: list[Value | None] = [
                    v for v, dims in zip(op.operands, op.rule.operands, strict=True) if any(label in d for d in dims)
                ]
            elif op.rule.reduce.get(label, "none") == "none":
                continue
            else:
                values = [
                    v for v, dims in zip(op.results, op.rule.results, strict=True) if not any(label in d for d in dims)
                ]
            yield from ((leaf, v) for v in values if v is not None and not v.constant)


def _summed(value: Value) -> Value:
    """What a sum becomes part of before anybody else reads it: sums that are added up are sent once."""
    while len(value.readers) == 1 and not value.is_output:
        op, at = value.readers[0]
        passes = op.rule is not None and any(at in s for s in op.rule.linear if len(s) > 1 or op.transparent)
        if not passes or op.results[0] is None:
            break
        value = op.results[0]
    return value


def _found(flood: Flood, leaves: Any) -> set[Leaf]:
    return {flood.dims.find(x) for leaf in leaves for x in flood.dims.leaves([leaf])}


def _best(kinds: list[_Kind], values: list[set[Leaf]]) -> list[_Kind]:
    """The kinds to cut: no two in one tensor, nearly as many elements as any choice, and of those the fewest bytes."""
    apart = [
        {j for j, b in enumerate(kinds) if i != j and any(v & a.leaves and v & b.leaves for v in values)}
        for i, a in enumerate(kinds)
    ]

    def choices(i: int, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if i == len(kinds):
            yield taken
            return
        if not apart[i] & set(taken):
            yield from choices(i + 1, (*taken, i))
        yield from choices(i + 1, taken)

    def elements(taken: tuple[int, ...]) -> int:
        return sum(kinds[i].elements for i in taken)

    every = list(choices(0, ()))
    most = max(map(elements, every))
    best = min(
        (c for c in every if elements(c) >= NEARLY * most), key=lambda c: (sum(kinds[i].bytes for i in c), -elements(c))
    )
    return [kinds[i] for i in best]


def _reasons(graph: Graph, flood: Flood, weights: Mapping[str, Value], kind: _Kind) -> Iterator[tuple[str, str]]:
    """In words, what the cut of a weight is for."""
    names: dict[Value | None, str] = {value: name for name, value in weights.items()}
    rows: dict[str, Value] = {}
    for op in (op for op in graph.ops if not op.backward and op.rule is not None):
        read_here = [names[v] for v in op.operands if v in names]
        if op.transparent and read_here:
            names[op.results[0]] = read_here[0]
            continue
        for leaf, value in _sent(op, flood):
            if leaf in kind.leaves:
                rows |= {name: value for name in read_here if name not in rows}
    own = {name: {flood.dims.find(x) for x in flood.leaves(weights[name])} & kind.leaves for name, _, _ in kind.parts}
    big = [name for name in own if len(weights[name].shape) > 1]
    for name in own:
        others = [x for x in big if x in rows and x != name and own[x] & own[name]]
        if name in rows and len(weights[name].shape) > 1:
            value = rows[name]
            yield name, f"rows: the sum over devices is left, {si(value.nbytes, 'B')} of {list(value.shape)}"
        elif len(weights[name].shape) == 1:
            with_ = next((x for x in big if x not in rows and own[x] & own[name]), None)
            yield name, f"goes with {with_}" if with_ else "goes with what it is added to"
        elif others:
            yield name, f"columns: {others[0]} contracts what it makes, so nothing moves between them"
        else:
            yield name, "columns: what it makes stays cut"


def _spec(flood: Flood, value: Value, d: int, part: int, axis: str, why: str) -> str:
    rank = len(value.shape)
    word = "in" if why.startswith("rows") else "out"
    sizes = [flood.dims.size(leaf) for leaf in flood.value[value][d]]
    cut = f"{word}@{axis}"
    if part:
        cut = f"({' '.join(cut if i == part else f'f{i}={n}' for i, n in enumerate(sizes))})"
    return " ".join(cut if i == d else "_" for i in range(rank))


def _numberless(name: str) -> str:
    return re.sub(_NUMBER, "*", name)


def _pattern(name: str, table: Mapping[str, str], known: Collection[str]) -> str:
    """The pattern for most of those of which the table says the same: no number open, the first one, or every."""
    found = {}
    for pattern in (name, re.sub(_NUMBER, "*", name, count=1), _numberless(name)):
        matched = [x for x in known if fnmatchcase(x, pattern)]
        if {table.get(x) for x in matched} == {table[name]}:
            found[pattern] = len(matched)
    return max(found, key=found.__getitem__)
