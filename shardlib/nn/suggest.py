"""`suggest`: a table of specs for a module, from what its traced program does with each weight.

Dims of weights that are the same dim of the program (what one matrix makes and the next contracts, or the heads of
attention) are one *class*: cut together, nothing moves between the matrices, and one sum is left behind the last.
A choice of classes cuts each tensor in one dim at most. Of those choices that cut nearly as much of the weights as
any, `suggest` takes the one whose sums, and whatever must be whole, are the fewest bytes. (Megatron's columns and rows,
Shoeybi et al. 2019, arXiv:1909.08053, come out where a transformer is traced.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.core.errors import NoProgramError, ShardingError
from shardlib.core.text_tables import si
from shardlib.frontend.hazards.constant_values import by_example
from shardlib.frontend.hazards.rng_state import Chance
from shardlib.jit.jit import jit
from shardlib.nn.head_factors import factored
from shardlib.nn.parameters import held
from shardlib.nn.spec_table import matches, numberless
from shardlib.nn.strategies import TENSOR
from shardlib.sharding.mesh.mesh import Mesh

NEARLY = 0.95  # of the weights that any choice cuts
MOST = 14  # kinds of classes, of which every combination is tried; of more, from each what goes with it

Part = tuple[int, int]  # of a weight: a dim, and which factor of that


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

    leaves: set[DimFactor]
    parts: dict[str, Part]
    elements: int = 0
    bytes: int = 0


def suggest(module: nn.Module, mesh: Mesh, *example: Any, axis: str | None = None, **more: Any) -> Suggestion:
    """Propose where a module's weights live on one axis of a mesh (default: the one called `tensor`).

    `example` and `more` are arguments of a call, of the sizes that matter; they and the module may be on the meta
    device, and the mesh abstract. Where the module asks for values, or draws Python's random numbers, the table is of
    the way that this call takes. The result is a table for `parallelize(module, table)`, in which `*` stands for the
    numbers of layers; print it for the reasons. Weights that are not in it are whole.

    Raises `ShardingError` where the mesh has no such axis, no weight can be cut over it, or a shape depends on values.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> print(suggest(net, Mesh.abstract(tensor=4), torch.ones(8, 16)))
        '0.weight': 'out@tensor _',  # columns: 2.weight contracts what it makes, so nothing moves between them
        '0.bias': 'out@tensor',      # goes with 0.weight
        '2.weight': '_ in@tensor',   # rows: the sum over devices is left, 512 B of [8, 16]
    """
    if not isinstance(module, nn.Module) or not isinstance(mesh, Mesh):
        what = f"suggest gets a {type(module).__name__} as its module, a {type(mesh).__name__} as its mesh"
        raise ShardingError(what, remedy="sl.suggest(module, sl.current_mesh(), *example)")
    axis = axis or next((a for a in mesh.axes if a in TENSOR), None)
    if axis is None or axis not in mesh.axes:
        raise ShardingError(
            f"suggest({type(module).__name__}) on ({', '.join(f'{a}={n}' for a, n in mesh.axes.items())})",
            [f"it has no axis {axis!r}" if axis else f"none of its axes is called {', '.join(TENSOR)}"],
            remedy='name the axis, suggest(module, mesh, *example, axis="model")',
        )
    table, why = proposed(module, mesh, axis, example, more)
    if not table:
        raise ShardingError(
            f"suggest({type(module).__name__}) finds no weight that {axis!r} could cut",
            rule=f"a dim of a weight that the call reads is cut {mesh.axes[axis]} ways",
            remedy="write a table, {'*.up.weight': 'ff@tensor embed'}, or cut weights over data, strategy=\"fsdp\"",
        )
    known = [name for x in held(module) for name in x.names]
    patterns = {x.name: _pattern(x.name, table, known) for x in held(module) if x.name in table}
    found = {pattern: table[name] for name, pattern in patterns.items()}
    return Suggestion(found, {pattern: why[name] for name, pattern in reversed(patterns.items())})


def proposed(
    module: nn.Module, mesh: Mesh, axis: str, example: Any, more: Any, decided: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """By the name of a weight, its spec and why; weights that share a dim with one that is `decided` are left out."""
    compiled = _compiled(module, Mesh.abstract(mesh.axes, machine=mesh.machine), example, more)
    flood, graph = compiled.propagated.flood, compiled.graph
    names = [x.name for x in held(module) if x.tensor.is_floating_point()]
    leaves = zip(compiled.traced.input_leaves, graph.inputs, strict=True)
    weights = {names[i]: value for i, value in leaves if 0 <= i < len(names)}
    kinds = [k for k in _kinds(graph, flood, weights, mesh.axes[axis]) if k.parts.keys().isdisjoint(decided)]
    chosen = _best(kinds, [{flood.dims.find(x) for x in flood.leaves(v)} for v in flood.value])
    table: dict[str, str] = {}
    why: dict[str, str] = {}
    for kind in chosen:
        for name, (is_row, reason) in _reasons(graph, flood, weights, kind):
            why[name] = reason
            d, part = kind.parts[name]
            sizes = [int(flood.dims.size(leaf)) for leaf in flood.value[weights[name]][d]]
            cut = factored(sizes, part, "in" if is_row else "out", axis, mesh.axes[axis])
            table[name] = " ".join(cut if i == d else "_" for i in range(len(weights[name].shape)))
    return table, why


def _compiled(module: nn.Module, mesh: Mesh, example: Any, more: Any) -> Compiled:
    """The call as a program of the weights, all of which are wanted a gradient of, by their order in the module."""
    weights = {
        x.name: torch.empty(x.tensor.shape, dtype=x.tensor.dtype, device="meta", requires_grad=True)
        for x in held(module)
        if x.tensor.is_floating_point()
    }

    def forward(weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        chance = Chance(())
        try:
            return functional_call(module, dict(weights), args, kwargs)
        finally:
            chance.put_back()  # a table is as good for other draws

    with mesh, by_example():
        try:
            plan: Plan = jit(forward).plan(weights, example, more)
        except NoProgramError as error:
            raise ShardingError(
                f"suggest({type(module).__name__}) traces a call: {error.what}",
                error.offenders,
                rule="a call that asks is told what the example holds, not what weights do; shapes follow from shapes",
                remedy="give an example with values; leave out what only checks and losses read, labels, say; "
                "or write a table, {'*.up.weight': 'ff@tensor embed'}",
            ) from error
    return plan.compiled


def _kinds(graph: Graph, flood: Propagation, weights: Mapping[str, Value], ways: int) -> list[_Kind]:
    """Classes with parts of weights that are large enough, alike ones together.

    A class that is two dims of one weight (of a recurrent one, or a square one behind a residual) cuts the first.
    """
    parts: dict[DimFactor, dict[str, Part]] = defaultdict(dict)
    for name, value in weights.items():
        for d, dim in enumerate(flood.value[value]):
            for i, leaf in enumerate(map(flood.dims.find, dim)):
                if (value.shape[d] if i == 0 else flood.dims.size(leaf)) >= ways:
                    parts[leaf].setdefault(name, (d, i))
    alike: dict[frozenset[tuple[str, Part]], list[DimFactor]] = defaultdict(list)
    for leaf, own in parts.items():
        alike[frozenset((numberless(name), part) for name, part in own.items())].append(leaf)
    together = [{flood.dims.find(x) for x in flood.leaves(v)} for v in weights.values()]
    kinds = []
    for leaves in alike.values():
        groups = [leaves] if all(len(v & {*leaves}) < 2 for v in together) else [[leaf] for leaf in leaves]
        kinds += [_Kind({*group}, {n: at for leaf in group for n, at in parts[leaf].items()}) for group in groups]
    for op, at, name in _reads(graph, weights):
        for label in _labels(op, at, _found(flood, flood.leaves(weights[name])), flood):
            if label in flood.whole[op]:  # the weight would be gathered there
                kinds = [k for k in kinds if k.leaves.isdisjoint(_found(flood, flood.labels[op][label]))]
    sent = [(leaf, _summed(value)) for op in graph.ops for leaf, value in _sent(op, flood)]
    for kind in kinds:
        kind.bytes = _bytes({value for leaf, value in sent if leaf in kind.leaves})
        kind.elements = sum(math.prod(weights[name].shape) for name in kind.parts)
    return sorted(kinds, key=lambda k: -k.elements)


def _sent(op: Op, flood: Propagation) -> Iterator[tuple[DimFactor, Value]]:
    """What is sent where a class is cut: a result that is summed over it, or an operand that must be whole.

    An op may sum over a class and keep it, too (`h @ w.t()`, where h comes from there): what it sums is gathered, or
    its result is scattered, whichever is less.
    """
    if op.rule is None:
        yield from ((leaf, v) for v in op.operands if not v.constant for leaf in _found(flood, flood.leaves(v)))
        return
    classes = {label: _found(flood, leaves) for label, leaves in flood.labels.get(op, {}).items()}
    operands = [(v, {x for dim in dims for x in dim}) for v, dims in zip(op.operands, op.rule.operands, strict=True)]
    results = [(v, {x for dim in dims for x in dim}) for v, dims in zip(op.results, op.rule.results, strict=True) if v]
    for label, leaf in ((label, leaf) for label, leaves in classes.items() for leaf in leaves):
        values = [v for v, labels in operands if label in labels]
        if label not in flood.whole.get(op, ()):
            if op.rule.reduce.get(label, "none") == "none":
                continue
            kept = {x for _, labels in results for x in labels if leaf in classes[x]}
            gathered = [v for v, labels in operands if label in labels and labels.isdisjoint(kept)]
            values = [v for v, labels in results if label not in labels]
            values = min(values, gathered, key=_bytes) if kept and gathered else values
        yield from ((leaf, v) for v in values if not v.constant)


def _bytes(values: Collection[Value]) -> int:
    return sum(v.nbytes for v in values)


def _summed(value: Value) -> Value:
    """What a sum becomes part of before anybody else reads it: sums that are added up are sent once."""
    while len(value.readers) == 1 and not value.is_output:
        op, at = value.readers[0]
        passes = op.rule is not None and any(at in s for s in op.rule.linear if len(s) > 1 or op.transparent)
        if not passes or op.results[0] is None:
            break
        value = op.results[0]
    return value


def _found(flood: Propagation, leaves: Any) -> set[DimFactor]:
    return {flood.dims.find(x) for leaf in leaves for x in flood.dims.leaves([leaf])}


def _best(kinds: list[_Kind], values: list[set[DimFactor]]) -> list[_Kind]:
    """The kinds to cut: no two in one tensor, nearly as many elements as any choice, and of those the fewest bytes."""
    apart = [
        {j for j, b in enumerate(kinds) if i != j and any(v & a.leaves and v & b.leaves for v in values)}
        for i, a in enumerate(kinds)
    ]

    every = list(_all(apart, 0, ())) if len(kinds) <= MOST else list(_some(apart, kinds))

    def elements(taken: tuple[int, ...]) -> int:
        return sum(kinds[i].elements for i in taken)

    most = max(map(elements, every))
    best = min(
        (c for c in every if elements(c) >= NEARLY * most), key=lambda c: (sum(kinds[i].bytes for i in c), -elements(c))
    )
    return [kinds[i] for i in best]


def _all(apart: list[set[int]], i: int, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every choice of kinds of which no two are apart."""
    if i == len(apart):
        yield taken
        return
    if not apart[i] & set(taken):
        yield from _all(apart, i + 1, (*taken, i))
    yield from _all(apart, i + 1, taken)


def _some(apart: list[set[int]], kinds: list[_Kind]) -> Iterator[tuple[int, ...]]:
    """From each kind on, what goes with it: the largest first, or the fewest bytes for an element first."""
    largest = range(len(kinds))
    cheapest = sorted(largest, key=lambda i: kinds[i].bytes / max(kinds[i].elements, 1))
    for first in largest:
        for order in (largest, cheapest):
            taken = [first]
            for i in order:
                if i != first and not apart[i] & {*taken}:
                    taken.append(i)
            yield tuple(taken)


def _reasons(
    graph: Graph, flood: Propagation, weights: Mapping[str, Value], kind: _Kind
) -> Iterator[tuple[str, tuple[bool, str]]]:
    """Of every weight of a kind, whether it is cut where it is contracted, and in words what for."""
    own = {name: {flood.dims.find(x) for x in flood.leaves(weights[name])} & kind.leaves for name in kind.parts}
    once = {name for name in own if sum(flood.dims.find(x) in own[name] for x in flood.leaves(weights[name])) == 1}
    rows: dict[str, Value] = {}
    for op, at, name in _reads(graph, weights):
        if name in once and not op.backward and (value := _summed_over(op, at, own[name], flood)) is not None:
            rows.setdefault(name, value)
    big = [name for name in own if len(weights[name].shape) > 1]
    for name in own:
        beside = [x for x in big if x != name and own[x] & own[name]]
        contracts = next((x for x in beside if x in rows), None)
        makers = [x for x in beside if x not in rows]
        if name in rows and name in big:
            value = rows[name]
            yield name, (True, f"rows: the sum over devices is left, {si(value.nbytes, 'B')} of {list(value.shape)}")
        elif name in big and name not in once:
            yield name, (False, "columns: what it makes is gathered where it comes back")
        elif name in big:
            kept = f"{contracts} contracts what it makes, so nothing moves between them"
            yield name, (False, f"columns: {kept if contracts else 'what it makes stays cut'}")
        else:
            module = name.rpartition(".")[0]
            maker = next((x for x in makers if x.rpartition(".")[0] == module), makers[0] if makers else None)
            yield name, (False, f"goes with {maker or 'what it is added to'}")


def _reads(graph: Graph, weights: Mapping[str, Value]) -> Iterator[tuple[Op, int, str]]:
    """Every op that computes with a weight, or with a view of it, and which operand that is."""
    names: dict[Value | None, str] = {value: name for name, value in weights.items()}
    for op in graph.ops:
        if op.transparent and op.operands[0] in names:
            names[op.results[0]] = names[op.operands[0]]
        elif op.rule is not None:
            yield from ((op, at, names[v]) for at, v in enumerate(op.operands) if v in names)


def _labels(op: Op, at: int, leaves: set[DimFactor], flood: Propagation) -> Iterator[str]:
    """The factors of an op that are these classes along one of its operands."""
    assert op.rule is not None, "a weight is read by a rule"
    for dim in op.rule.operands[at]:
        yield from (label for label in dim if _found(flood, flood.labels[op][label]) & leaves)


def _summed_over(op: Op, at: int, leaves: set[DimFactor], flood: Propagation) -> Value | None:
    """The result that is a sum over these classes of an operand, if one is."""
    assert op.rule is not None, "a weight is read by a rule"
    for label in _labels(op, at, leaves, flood):
        if op.rule.reduce.get(label) == "sum":
            without = zip(op.results, op.rule.results, strict=True)
            return next((r for r, dims in without if r is not None and not any(label in d for d in dims)), None)
    return None


def _pattern(name: str, table: Mapping[str, str], known: Collection[str]) -> str:
    """The pattern for most of those of which the table says the same: no number open, the first one, or every."""
    found = {}
    for pattern in (name, numberless(name, 1), numberless(name)):
        matched = [x for x in known if matches(pattern, x)]
        if {table.get(x) for x in matched} == {table[name]}:
            found[pattern] = len(matched)
    return max(found, key=found.__getitem__)
