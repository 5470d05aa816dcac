"""`suggest`: proposes a table of specs for a module from its traced program.

Dims of weights that are one dim of the program (the output dim of one matrix and the contracted dim of the next, or the
heads of attention) form a *factor class*. If a class is sharded as a whole, nothing moves between the matrices, and one
sum remains after the last. A choice of classes shards each tensor in at most one dim. Among the choices that shard
nearly the most elements of weights, `suggest` takes the one that sends the fewest bytes for sums and gathers.
(For a transformer this gives Megatron's columns and rows, Shoeybi et al. 2019, arXiv:1909.08053.)
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
from shardlib.core.text_tables import format_si
from shardlib.frontend.hazards.constant_values import answer_by_example
from shardlib.frontend.hazards.rng_state import RandomStates
from shardlib.jit.jit import jit
from shardlib.nn.head_factors import shard_factors
from shardlib.nn.parameters import list_named
from shardlib.nn.spec_table import matches, numberless
from shardlib.nn.strategies import TENSOR
from shardlib.sharding.mesh.mesh import Mesh

NEARLY = 0.95  # of the most elements that a choice shards
MOST = 14  # kinds for which all combinations are tried; with more, the search is greedy

Part = tuple[int, int]  # of a weight: a dim, and the number of a factor in it


class Suggestion(dict[str, str]):
    """A table for `parallelize`; `why` and the printed text give the reason for each line."""

    def __init__(self, table: Mapping[str, str], why: Mapping[str, str]) -> None:
        super().__init__(table)
        self.why = dict(why)

    def __str__(self) -> str:
        texts = {pattern: f"{pattern!r}: {spec!r}," for pattern, spec in self.items()}
        width = max(map(len, texts.values()), default=0)
        return "\n".join(f"{text:<{width}}  # {self.why[pattern]}" for pattern, text in texts.items())


@dataclass
class _Kind:
    """Similar factor classes, such as those of equal layers."""

    factors: set[DimFactor]
    parts: dict[str, Part]  # the sharded part of each weight
    elements: int = 0  # of these weights
    bytes: int = 0  # sent per device if the classes are sharded, roughly


def suggest(module: nn.Module, mesh: Mesh, *example: Any, axis: str | None = None, **more: Any) -> Suggestion:
    """Proposes specs for a module's weights on one axis of a mesh (default: the one called `tensor`).

    `example` and `more` are arguments of a call of typical sizes. They and the module may be on the meta device;
    the mesh may be abstract. If the module branches on values or on Python's random numbers, the table is for the
    branch of this call. The result is a table for `parallelize(module, table)`, in which `*` stands for numbers of
    layers; print it for the reasons. Weights without a line are replicated.

    Raises `ShardingError` if the mesh has no such axis, no weight can be sharded over it, or a shape depends on values.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> print(suggest(net, Mesh.abstract(tensor=4), torch.ones(8, 16)))
        '0.weight': 'out@tensor _',  # columns: 2.weight contracts what it makes, so nothing moves between them
        '0.bias': 'out@tensor',      # goes with 0.weight
        '2.weight': '_ in@tensor',   # rows: the sum over devices is left, 512 B of [8, 16]
    """
    if not isinstance(module, nn.Module) or not isinstance(mesh, Mesh):
        types = f"suggest gets a {type(module).__name__} as its module, a {type(mesh).__name__} as its mesh"
        raise ShardingError(types, remedy="sl.suggest(module, sl.current_mesh(), *example)")
    axis = axis or next((a for a in mesh.axes if a in TENSOR), None)
    if axis is None or axis not in mesh.axes:
        raise ShardingError(
            f"suggest({type(module).__name__}) on ({', '.join(f'{a}={n}' for a, n in mesh.axes.items())})",
            [f"it has no axis {axis!r}" if axis else f"none of its axes is called {', '.join(TENSOR)}"],
            remedy='name the axis, suggest(module, mesh, *example, axis="model"); data axes need no table: '
            'parallelize(module, strategy="fsdp")',
        )
    table, why = propose_specs(module, mesh, axis, example, more)
    if not table:
        raise ShardingError(
            f"suggest({type(module).__name__}) finds no weight that {axis!r} could shard",
            rule=f"a dim of a weight that the call reads is sharded {mesh.axes[axis]} ways",
            remedy="write a table, {'*.up.weight': 'ff@tensor embed'}, or shard weights over data, strategy=\"fsdp\"",
        )
    tensors = list_named(module)
    names = [name for x in tensors for name in x.names]
    patterns = {x.name: _generalize(x.name, table, names) for x in tensors if x.name in table}
    by_pattern = {pattern: table[name] for name, pattern in patterns.items()}
    return Suggestion(by_pattern, {pattern: why[name] for name, pattern in reversed(patterns.items())})


def propose_specs(
    module: nn.Module, mesh: Mesh, axis: str, example: Any, more: Any, decided: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns specs and reasons by weight; leaves out weights that share a factor class with a `decided` one."""
    compiled = _compiled(module, Mesh.abstract(mesh.axes, machine=mesh.machine), example, more)
    propagation, graph = compiled.propagated.propagation, compiled.graph
    names = [x.name for x in list_named(module) if x.tensor.is_floating_point()]
    inputs = zip(compiled.traced.input_leaves, graph.inputs, strict=True)
    weights = {names[i]: value for i, value in inputs if 0 <= i < len(names)}
    kinds = [k for k in _kinds(graph, propagation, weights, mesh.axes[axis]) if k.parts.keys().isdisjoint(decided)]
    best = _choose_kinds(
        kinds, [{propagation.dims.find(x) for x in propagation.dim_factors(v)} for v in propagation.value]
    )
    table: dict[str, str] = {}
    why: dict[str, str] = {}
    for kind in best:
        for name, (is_row, reason) in _reasons(graph, propagation, weights, kind):
            why[name] = reason
            d, part = kind.parts[name]
            sizes = [int(propagation.dims.size(leaf)) for leaf in propagation.value[weights[name]][d]]
            dim = shard_factors(sizes, part, "in" if is_row else "out", axis, mesh.axes[axis])
            table[name] = " ".join(dim if i == d else "_" for i in range(len(weights[name].shape)))
    return table, why


def _compiled(module: nn.Module, mesh: Mesh, example: Any, more: Any) -> Compiled:
    """Compiles the call as a program of the weights, in the module's order; all weights require gradients."""
    weights = {
        x.name: torch.empty(x.tensor.shape, dtype=x.tensor.dtype, device="meta", requires_grad=True)
        for x in list_named(module)
        if x.tensor.is_floating_point()
    }

    def forward(weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        chance = RandomStates(())
        try:
            return functional_call(module, dict(weights), args, kwargs)
        finally:
            chance.put_back()  # the table does not depend on the drawn numbers

    with mesh, answer_by_example():
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


def _kinds(graph: Graph, propagation: Propagation, weights: Mapping[str, Value], ways: int) -> list[_Kind]:
    """Returns kinds of factor classes whose parts of weights are large enough, the largest kind first.

    A class may be two dims of one weight (a recurrent one, or a square one after a residual); it shards the first.
    """
    parts: dict[DimFactor, dict[str, Part]] = defaultdict(dict)
    for name, value in weights.items():
        for d, dim in enumerate(propagation.value[value]):
            for i, leaf in enumerate(map(propagation.dims.find, dim)):
                if (value.shape[d] if i == 0 else propagation.dims.size(leaf)) >= ways:
                    parts[leaf].setdefault(name, (d, i))
    similar: dict[frozenset[tuple[str, Part]], list[DimFactor]] = defaultdict(list)
    for leaf, own in parts.items():
        similar[frozenset((numberless(name), part) for name, part in own.items())].append(leaf)
    weight_factors = [{propagation.dims.find(x) for x in propagation.dim_factors(v)} for v in weights.values()]
    kinds = []
    for leaves in similar.values():
        groups = [leaves] if all(len(v & {*leaves}) < 2 for v in weight_factors) else [[leaf] for leaf in leaves]
        kinds += [_Kind({*group}, {n: at for leaf in group for n, at in parts[leaf].items()}) for group in groups]
    for op, at, name in _reads(graph, weights):
        for label in _labels(op, at, _classes(propagation, propagation.dim_factors(weights[name])), propagation):
            if label in propagation.whole[op]:  # the weight would be gathered there
                kinds = [k for k in kinds if k.factors.isdisjoint(_classes(propagation, propagation.labels[op][label]))]
    sent = [(leaf, _follow_sum(value)) for op in graph.ops for leaf, value in _sent_values(op, propagation)]
    for kind in kinds:
        kind.bytes = _count_bytes({value for leaf, value in sent if leaf in kind.factors})
        kind.elements = sum(math.prod(weights[name].shape) for name in kind.parts)
    return sorted(kinds, key=lambda k: -k.elements)


def _sent_values(op: Op, propagation: Propagation) -> Iterator[tuple[DimFactor, Value]]:
    """Yields the values that are sent if a class is sharded: results summed over it, and operands that must be whole.

    An op may sum over a class and keep it, too (`h @ w.t()`, if h comes from w). Then its operand is gathered or its
    result is scattered, whichever has fewer bytes.
    """
    if op.rule is None:
        yield from (
            (leaf, v)
            for v in op.operands
            if not v.constant
            for leaf in _classes(propagation, propagation.dim_factors(v))
        )
        return
    classes = {label: _classes(propagation, leaves) for label, leaves in propagation.labels.get(op, {}).items()}
    operands = [(v, {x for dim in dims for x in dim}) for v, dims in zip(op.operands, op.rule.operands, strict=True)]
    results = [(v, {x for dim in dims for x in dim}) for v, dims in zip(op.results, op.rule.results, strict=True) if v]
    for label, leaf in ((label, leaf) for label, leaves in classes.items() for leaf in leaves):
        values = [v for v, labels in operands if label in labels]
        if label not in propagation.whole.get(op, ()):
            if op.rule.reduce.get(label, "none") == "none":
                continue
            kept = {x for _, labels in results for x in labels if leaf in classes[x]}
            gathered = [v for v, labels in operands if label in labels and labels.isdisjoint(kept)]
            values = [v for v, labels in results if label not in labels]
            values = min(values, gathered, key=_count_bytes) if kept and gathered else values
        yield from ((leaf, v) for v in values if not v.constant)


def _count_bytes(values: Collection[Value]) -> int:
    return sum(v.nbytes for v in values)


def _follow_sum(value: Value) -> Value:
    """Returns the last value that a partial sum reaches through linear ops alone: added sums are sent once."""
    while len(value.readers) == 1 and not value.is_output:
        op, at = value.readers[0]
        passes = op.rule is not None and any(at in s for s in op.rule.linear if len(s) > 1 or op.transparent)
        if not passes or op.results[0] is None:
            break
        value = op.results[0]
    return value


def _classes(propagation: Propagation, leaves: Any) -> set[DimFactor]:
    """Returns the representatives of the classes of these factors."""
    return {propagation.dims.find(x) for leaf in leaves for x in propagation.dims.resolve([leaf])}


def _choose_kinds(kinds: list[_Kind], values: list[set[DimFactor]]) -> list[_Kind]:
    """Returns the kinds to shard: at most one per tensor, nearly the most elements, and then the fewest bytes."""
    conflicts = [
        {j for j, b in enumerate(kinds) if i != j and any(v & a.factors and v & b.factors for v in values)}
        for i, a in enumerate(kinds)
    ]
    choices = list(_all_choices(conflicts, 0, ()) if len(kinds) <= MOST else _greedy_choices(conflicts, kinds))

    def elements(choice: tuple[int, ...]) -> int:
        return sum(kinds[i].elements for i in choice)

    most = max(map(elements, choices))
    best = min(
        (c for c in choices if elements(c) >= NEARLY * most),
        key=lambda c: (sum(kinds[i].bytes for i in c), -elements(c)),
    )
    return [kinds[i] for i in best]


def _all_choices(conflicts: list[set[int]], i: int, choice: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if i == len(conflicts):
        yield choice
        return
    if not conflicts[i] & set(choice):
        yield from _all_choices(conflicts, i + 1, (*choice, i))
    yield from _all_choices(conflicts, i + 1, choice)


def _greedy_choices(conflicts: list[set[int]], kinds: list[_Kind]) -> Iterator[tuple[int, ...]]:
    """Yields for each kind the choices that add compatible kinds: the largest first, or the cheapest per element."""
    largest = range(len(kinds))
    cheapest = sorted(largest, key=lambda i: kinds[i].bytes / max(kinds[i].elements, 1))
    for first in largest:
        for order in (largest, cheapest):
            choice = [first]
            for i in order:
                if i != first and not conflicts[i] & {*choice}:
                    choice.append(i)
            yield tuple(choice)


def _reasons(
    graph: Graph, propagation: Propagation, weights: Mapping[str, Value], kind: _Kind
) -> Iterator[tuple[str, tuple[bool, str]]]:
    """Yields for every weight of a kind whether its contracted dim is sharded, and the reason in words."""
    find, factors_of = propagation.dims.find, propagation.dim_factors
    own = {name: {find(x) for x in factors_of(weights[name])} & kind.factors for name in kind.parts}
    once = {name for name in own if sum(find(x) in own[name] for x in factors_of(weights[name])) == 1}
    rows: dict[str, Value] = {}
    for op, at, name in _reads(graph, weights):
        if name in once and not op.backward and (value := _summed_over(op, at, own[name], propagation)) is not None:
            rows.setdefault(name, value)
    big = [name for name in own if len(weights[name].shape) > 1]
    for name in own:
        others = [x for x in big if x != name and own[x] & own[name]]
        contracts = next((x for x in others if x in rows), None)
        makers = [x for x in others if x not in rows]
        if name in rows and name in big:
            value = rows[name]
            yield (
                name,
                (True, f"rows: the sum over devices is left, {format_si(value.nbytes, 'B')} of {list(value.shape)}"),
            )
        elif name in big and name not in once:
            yield name, (False, "columns: what it makes is gathered where it comes back")
        elif name in big:
            kept = f"{contracts} contracts what it makes, so nothing moves between them"
            yield name, (False, f"columns: {kept if contracts else 'what it makes stays sharded'}")
        else:
            module = name.rpartition(".")[0]
            maker = next((x for x in makers if x.rpartition(".")[0] == module), makers[0] if makers else None)
            yield name, (False, f"goes with {maker or 'what it is added to'}")


def _reads(graph: Graph, weights: Mapping[str, Value]) -> Iterator[tuple[Op, int, str]]:
    """Yields every op that computes with a weight, or with a view of it, and the number of that operand."""
    names: dict[Value | None, str] = {value: name for name, value in weights.items()}
    for op in graph.ops:
        if op.transparent and op.operands[0] in names:
            names[op.results[0]] = names[op.operands[0]]
        elif op.rule is not None:
            yield from ((op, at, names[v]) for at, v in enumerate(op.operands) if v in names)


def _labels(op: Op, at: int, leaves: set[DimFactor], propagation: Propagation) -> Iterator[str]:
    """Yields the op's factors along one operand that belong to these classes."""
    for dim in op.required_rule.operands[at]:
        yield from (label for label in dim if _classes(propagation, propagation.labels[op][label]) & leaves)


def _summed_over(op: Op, at: int, leaves: set[DimFactor], propagation: Propagation) -> Value | None:
    """Returns the result that is a sum over these classes of an operand, or None."""
    rule = op.required_rule
    for label in _labels(op, at, leaves, propagation):
        if rule.reduce.get(label) == "sum":
            without = zip(op.results, rule.results, strict=True)
            return next((r for r, dims in without if r is not None and not any(label in d for d in dims)), None)
    return None


def _generalize(name: str, table: Mapping[str, str], names: Collection[str]) -> str:
    """Returns the pattern that matches the most names with the same spec: `*` for no number, the first, or all."""
    counts = {}
    for pattern in (name, numberless(name, 1), numberless(name)):
        matched = [x for x in names if matches(pattern, x)]
        if {table.get(x) for x in matched} == {table[name]}:
            counts[pattern] = len(matched)
    return max(counts, key=counts.__getitem__)
