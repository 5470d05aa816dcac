"""Batches lookups in all tables of one tensor, one after the other, whose results are concatenated or added.

Tables can be sharded only if one op reads all of them. A family is batched if it leads from lookups to a `stack`, `cat`
or sum of all members, and if other families are its only other readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.gather.batch_rules import LOOKUPS, batch_op
from shardlib.compiler.simplify.gather.slice_families import Family, Own, find_families
from shardlib.compiler.simplify.gather.table_gather import find_origin, move_dim
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


def batch_stacked_lookups(gm: fx.GraphModule) -> None:
    """Batches the families that lead from lookups to joins, if their stacks may be sharded."""
    place = find_families(gm)
    joins = {node: runs for node in gm.graph.nodes if (runs := _find_runs(node, place) or _find_sum(node, place))}
    batchable = _find_batchable(joins, place)
    if not _may_shard(gm, batchable):
        return
    batches: dict[Family, Any] = {}
    order = {node: n for n, node in enumerate(gm.graph.nodes)}
    for family in sorted(batchable, key=lambda f: order[f.nodes[0]]):
        first = min(family.nodes, key=order.__getitem__)
        batches[family] = _emit_batch(Emit(gm, first), family, batches)
    for node, runs in joins.items():
        if batched_runs := [run for run in runs if run[0] in batchable]:
            _replace_join(Emit(gm, node), node, batched_runs, batches)


def _may_shard(gm: fx.GraphModule, batchable: set[Family]) -> bool:
    """Returns whether tables, or the indices of lookups, may be sharded by table.

    Inputs decide for stacks that are made of them. Otherwise any input or annotation with a sharded dim of the size of
    a stack decides.
    """
    stacks = [(find_origin(family.operands[0]), family.operands[1]) for family in batchable if family.slices]
    inputs = [(x, dim) for x, dim in stacks if x is not None]
    if any(dim in x.meta.get("cut", [dim]) for x, dim in inputs):
        return True
    sizes = {family.size for family in batchable}
    for node in gm.graph.nodes if sizes else ():
        if has_trait(node.target, "constrains") or (node.op == "placeholder" and not inputs):
            shape = getattr(node.meta["val"], "shape", ())
            if any(shape[d] in sizes for d in node.meta.get("cut", range(len(shape)))):
                return True
    return False


def _find_runs(node: Node, place: Mapping[Node, tuple[Family, int]]) -> list[tuple[Family, int, int]]:
    """Returns the families that a `stack` or `cat` joins, each with the begin and end of its members' operands."""
    if node.target not in (aten.stack.default, aten.cat.default):
        return []
    operands, runs, i = node.args[0], list[tuple[Family, int, int]](), 0
    while i < len(operands):
        family = place[operands[i]][0] if operands[i] in place else None
        n = 0 if family is None else family.size
        if family is not None and [place.get(x) for x in operands[i : i + n]] == [(family, j) for j in range(n)]:
            runs.append((family, i, i + n))
            i += n
        else:
            i += 1
    return runs if node.target is aten.cat.default or [(i, j) for _, i, j in runs] == [(0, len(operands))] else []


def _find_sum(node: Node, place: Mapping[Node, tuple[Family, int]]) -> list[tuple[Family, int, int]]:
    """Returns the family whose members a node adds up."""
    if node.target is not aten.add.Tensor or node.meta["val"].dtype not in (torch.float32, torch.float64):
        return []
    family, _ = place.get(_find_first_term(node), (None, 0))
    if family is None or family.slices or len(terms := _list_terms(node, family.size)) != family.size:
        return []
    have_shape = all(x.meta["val"].shape == node.meta["val"].shape for x in terms)
    members = {(family, k) for k in range(family.size)}
    return [(family, 0, family.size)] if have_shape and {place.get(x) for x in terms} == members else []


def _find_first_term(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is aten.add.Tensor:
        node = node.args[0]
    return node


def _list_terms(node: Node, most: int) -> list[Node]:
    """Returns the terms of a sum, up to `most` + 1; a partial sum with other readers is a term."""
    terms, queue = list[Node](), [node]
    while queue and len(terms) <= most:
        x = queue.pop()
        if x.target is aten.add.Tensor and not x.kwargs and (x is node or len(x.users) == 1):
            if not all(isinstance(y, fx.Node) or y == 0 for y in x.args):
                return []
            queue += [y for y in x.args if isinstance(y, fx.Node)]
        else:
            terms.append(x)
    return terms


def _find_batchable(
    joins: Mapping[Node, list[tuple[Family, int, int]]], place: Mapping[Node, tuple[Family, int]]
) -> set[Family]:
    """Returns the families that lead from lookups to joins, and that other nodes do not read."""
    sources = {node: _find_sources(f for f, _, _ in runs) for node, runs in joins.items()}
    sum_of = {x: node for node in joins if node.target is aten.add.Tensor for x in _list_additions(node)}
    sources = {node: families for node, families in sources.items() if any(map(_looks_up, families))}
    while True:
        batchable = set[Family]().union(*sources.values())
        foreign = {
            family
            for family in batchable
            for user in (user for node in family.nodes for user in node.users)
            if not family.slices
            and sum_of.get(user, user) not in sources
            and (user not in place or place[user][0] not in batchable)
        }
        if not foreign:
            return batchable
        sources = {node: families for node, families in sources.items() if foreign.isdisjoint(families)}


def _list_additions(node: Node) -> Iterator[Node]:
    """Yields the additions of a sum."""
    yield node
    for x in node.all_input_nodes:
        if x.target is aten.add.Tensor:
            yield from _list_additions(x)


def _find_sources(families: Iterator[Family]) -> set[Family]:
    """Returns families and those that they are computed from."""
    sources, queue = set[Family](), list(families)
    while queue:
        if (family := queue.pop()) not in sources:
            sources.add(family)
            queue += family.families
    return sources


def _looks_up(family: Family) -> bool:
    return not family.slices and family.members[0].target in LOOKUPS


def _emit_batch(emit: Emit, family: Family, batches: Mapping[Family, Any]) -> Any:
    """Emits a tensor with all members of a family along dim 0."""
    if family.slices:
        source, dim, begin, length = family.operands
        if length:
            shape, n = list(source.meta["val"].shape), family.size
            source = emit(aten.slice.Tensor, source, dim, begin, begin + n * length)
            source = emit(aten.reshape.default, source, [*shape[:dim], n, length, *shape[dim + 1 :]])
        return move_dim(emit, source, dim, 0)
    node = family.members[0]
    operands = iter(family.operands)

    def batch_argument(each: tuple[Any, ...]) -> Any:
        if isinstance(each[0], list | tuple):
            return [batch_argument(x) for x in zip(*each, strict=True)]
        operand = next(operands)
        if isinstance(operand, Own):
            return each[0] if len({*each}) == 1 else emit(aten.stack.default, list(each))
        return batches[operand] if isinstance(operand, Family) else each[0]

    members = [family.members[k].args for k in range(family.size)]
    args = [batch_argument(each) for each in zip(*members, strict=True)]
    return batch_op(emit, node, args, family.size)


def _replace_join(
    emit: Emit, node: Node, runs: Sequence[tuple[Family, int, int]], batches: Mapping[Family, Any]
) -> None:
    """Replaces a `stack`, a `cat` or a sum by an op on the batches of its families."""
    if node.target is aten.add.Tensor:
        node.replace_all_uses_with(emit(aten.sum.dim_IntList, batches[runs[0][0]], [0]))
        return
    dim, val = get_argument(node, "dim"), node.meta["val"]
    dim %= val.dim()
    operands = list(node.args[0])
    for family, begin, end in reversed(runs):
        x = move_dim(emit, batches[family], 0, dim)
        if node.target is aten.cat.default:
            shape = list(x.meta["val"].shape)
            x = emit(aten.reshape.default, x, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])
        operands[begin:end] = [x]
    node.replace_all_uses_with(operands[0] if len(operands) == 1 else emit(aten.cat.default, operands, dim))
