"""What looks one table after the other up, of all that one tensor holds, and puts the results side by side, looks all
of them up at once: else no device could have some of the tables.

A family counts only if all that reads it is another, or puts its members in a row, and a lookup leads there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.gather.batch_rules import LOOKUPS, batched
from shardlib.compiler.simplify.gather.slice_families import Family, Own, families
from shardlib.compiler.simplify.gather.table_gather import Emit, origin
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
Node = Any  # of fx, whose arguments are what its op takes


def look_up_at_once(gm: fx.GraphModule) -> None:
    """Rewrite families that lookups are among."""
    place = families(gm)
    ends = {node: runs for node in gm.graph.nodes if (runs := _runs(node, place) or _sum(node, place))}
    needed = _needed(ends, place)
    if not _cut(gm, needed):
        return
    made: dict[Family, Any] = {}
    order = {node: n for n, node in enumerate(gm.graph.nodes)}
    for family in sorted(needed, key=lambda f: order[f.nodes[0]]):
        first = min(family.nodes, key=order.__getitem__)
        made[family] = _stacked(Emit(gm, first), family, made)
    for node, runs in ends.items():
        if mine := [run for run in runs if run[0] in needed]:
            _in_a_row(Emit(gm, node), node, mine, made)


def _cut(gm: fx.GraphModule, needed: set[Family]) -> bool:
    """Returns whether devices have some of the tables, or of what is looked up in them: otherwise every part is where
    it is.

    Arguments say it of what is made of them. Where nothing is, whatever has the size of a stack and is cut there
    decides, as annotations do that are on the way.
    """
    stacks = [(origin(family.of[0]), family.of[1]) for family in needed if family.slices]
    known = [(x, dim) for x, dim in stacks if x is not None]
    if any(dim in x.meta.get("cut", [dim]) for x, dim in known):
        return True
    sizes = {family.size for family in needed}
    for node in gm.graph.nodes if sizes else ():
        if has_trait(node.target, "constrains") or (node.op == "placeholder" and not known):
            shape = getattr(node.meta["val"], "shape", ())
            if any(shape[d] in sizes for d in node.meta.get("cut", range(len(shape)))):
                return True
    return False


def _runs(node: Node, place: Mapping[Node, tuple[Family, int]]) -> list[tuple[Family, int, int]]:
    """The families that a node puts in a row, each with where its members begin and end among what it is given."""
    if node.target not in (aten.stack.default, aten.cat.default):
        return []
    given, found, i = node.args[0], [], 0
    while i < len(given):
        family = place[given[i]][0] if given[i] in place else None
        n = 0 if family is None else family.size
        if family is not None and [place.get(x) for x in given[i : i + n]] == [(family, j) for j in range(n)]:
            found.append((family, i, i + n))
            i += n
        else:
            i += 1
    return found if node.target is aten.cat.default or [(i, j) for _, i, j in found] == [(0, len(given))] else []


def _sum(node: Node, place: Mapping[Node, tuple[Family, int]]) -> list[tuple[Family, int, int]]:
    """The family of which a node is the sum."""
    if node.target is not aten.add.Tensor or node.meta["val"].dtype not in (torch.float32, torch.float64):
        return []
    family, _ = place.get(_first_term(node), (None, 0))
    if family is None or family.slices or len(terms := _terms(node, family.size)) != family.size:
        return []
    same = all(x.meta["val"].shape == node.meta["val"].shape for x in terms)
    return [(family, 0, family.size)] if same and {place.get(x) for x in terms} == _whole(family) else []


def _whole(family: Family) -> set[tuple[Family, int]]:
    return {(family, k) for k in range(family.size)}


def _first_term(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is aten.add.Tensor:
        node = node.args[0]
    return node


def _terms(node: Node, most: int) -> list[Node]:
    """What is added up to make a node, where nobody else reads what is made on the way; no more than so many."""
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


def _needed(
    ends: Mapping[Node, list[tuple[Family, int, int]]], place: Mapping[Node, tuple[Family, int]]
) -> set[Family]:
    """The families that lead to ends, with lookups among them, and that nobody else reads."""
    behind = {node: _closure(f for f, _, _ in runs) for node, runs in ends.items()}
    part_of = {x: node for node in ends if node.target is aten.add.Tensor for x in _added(node)}
    behind = {node: found for node, found in behind.items() if any(map(_looks_up, found))}
    while True:
        needed = set[Family]().union(*behind.values())
        foreign = {
            family
            for family in needed
            for user in (user for node in family.nodes for user in node.users)
            if not family.slices
            and part_of.get(user, user) not in behind
            and (user not in place or place[user][0] not in needed)
        }
        if not foreign:
            return needed
        behind = {node: found for node, found in behind.items() if foreign.isdisjoint(found)}


def _added(node: Node) -> Iterator[Node]:
    """The additions that make a sum."""
    yield node
    for x in node.all_input_nodes:
        if x.target is aten.add.Tensor:
            yield from _added(x)


def _closure(families: Iterator[Family]) -> set[Family]:
    found, queue = set[Family](), list(families)
    while queue:
        if (family := queue.pop()) not in found:
            found.add(family)
            queue += family.families
    return found


def _looks_up(family: Family) -> bool:
    return not family.slices and family.found[0].target in LOOKUPS


def _stacked(emit: Emit, family: Family, made: Mapping[Family, Any]) -> Any:
    """What holds all members of a family, in front."""
    if family.slices:
        source, dim, begin, length = family.of
        if length:
            shape, n = list(source.meta["val"].shape), family.size
            source = emit(aten.slice.Tensor, source, dim, begin, begin + n * length)
            source = emit(aten.reshape.default, source, [*shape[:dim], n, length, *shape[dim + 1 :]])
        return emit.moved(source, dim, 0)
    node = family.found[0]
    feed = iter(family.of)

    def given(each: tuple[Any, ...]) -> Any:
        if isinstance(each[0], list | tuple):
            return [given(x) for x in zip(*each, strict=True)]
        of = next(feed)
        if isinstance(of, Own):
            return each[0] if len({*each}) == 1 else emit(aten.stack.default, list(each))
        return made[of] if isinstance(of, Family) else each[0]

    members = [family.found[k].args for k in range(family.size)]
    args = [given(each) for each in zip(*members, strict=True)]
    return batched(emit, node, args, family.size)


def _in_a_row(emit: Emit, node: Node, runs: Sequence[tuple[Family, int, int]], made: Mapping[Family, Any]) -> None:
    """Write a `stack`, a `cat` or a sum with what families are made of."""
    if node.target is aten.add.Tensor:
        node.replace_all_uses_with(emit(aten.sum.dim_IntList, made[runs[0][0]], [0]))
        return
    dim, val = get_argument(node, "dim"), node.meta["val"]
    dim %= val.dim()
    given = list(node.args[0])
    for family, begin, end in reversed(runs):
        x = emit.moved(made[family], 0, dim)
        if node.target is aten.cat.default:
            shape = list(x.meta["val"].shape)
            x = emit(aten.reshape.default, x, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])
        given[begin:end] = [x]
    node.replace_all_uses_with(given[0] if len(given) == 1 else emit(aten.cat.default, given, dim))
