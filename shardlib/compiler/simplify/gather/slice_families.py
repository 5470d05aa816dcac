"""Finds families: nodes that run one op on slice 0, 1, ... of a stack each, and on operands that all share."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Node
from shardlib.compiler.simplify.gather.batch_rules import LOOKUPS, can_batch, flatten_arguments
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


@dataclass(eq=False)
class Family:
    """Nodes that run one op on their slice of each of `operands`: families, shared operands, and `Own` inputs.

    For a family of slices, `operands` are a tensor, the dim, the begin of the first slice, and the length of each; the
    length is 0 if slices lack the dim. `members` has the first node of each slice.
    """

    size: int
    operands: tuple[Any, ...]
    slices: bool = False
    nodes: list[Node] = field(default_factory=list)
    members: dict[int, Node] = field(default_factory=dict)

    def add(self, node: Node, k: int) -> None:
        self.nodes.append(node)
        self.members.setdefault(k, node)

    @property
    def families(self) -> Iterator[Family]:
        return (x for x in self.operands if isinstance(x, Family))


def find_families(gm: fx.GraphModule) -> dict[Node, tuple[Family, int]]:
    """Returns the family of each node that is in one, and the node's slice."""
    place = dict(_find_slices(gm))
    candidates: dict[Any, Family] = {}
    for node in gm.graph.nodes if place else ():
        inside = {place[x] for x in node.all_input_nodes if x in place}
        if node in place or len({(f.size, k) for f, k in inside}) != 1 or not can_batch(node):
            continue
        first, k = next(iter(inside))
        operands = [_generalize(x, node, place) for x in (node.args, node.kwargs)]
        for number in count():  # a node with other inputs for the same slice is of another family
            key = node.target, _freeze(operands), number
            family = candidates.setdefault(key, Family(first.size, tuple(flatten_arguments(operands))))
            if k not in family.members or _list_inputs(family.members[k]) == _list_inputs(node):
                break
        family.add(node, k)
        place[node] = family, k
    is_whole: dict[Family, bool] = {}
    for family, _ in place.values():  # a family comes before its readers
        if family not in is_whole:
            is_whole[family] = len(family.members) == family.size and all(is_whole[f] for f in family.families)
    return {node: member for node, member in place.items() if is_whole[member[0]]}


@dataclass(frozen=True)
class Own:
    """An index that is an input of the program; each member reads its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _generalize(x: Any, node: Node, place: Mapping[Node, tuple[Family, int]]) -> Any:
    """Returns an argument of a node as its family has it."""
    if isinstance(x, list | tuple):
        return [_generalize(y, node, place) for y in x]
    if isinstance(x, Mapping):
        return {k: _generalize(y, node, place) for k, y in x.items()}
    if not isinstance(x, fx.Node) or x in place:
        return place[x][0] if isinstance(x, fx.Node) else x
    val = x.meta["val"]
    own = node.target in LOOKUPS and x.op == "placeholder" and not val.is_floating_point()
    return Own(tuple(val.shape), val.dtype) if own else x


def _list_inputs(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if x.op == "placeholder"]


def _find_slices(gm: fx.GraphModule) -> Iterator[tuple[Node, tuple[Family, int]]]:
    """Yields the slices of tensors that are sliced completely, and adjacent ranges of one length with equal readers."""
    families: dict[tuple[Any, ...], Family] = {}
    ranges: dict[tuple[Any, ...], dict[int, Node]] = defaultdict(dict)
    for node in gm.graph.nodes:
        if (slice_of := _match_slice(node)) is not None:
            source, dim, k = slice_of
            size = int(source.meta["val"].shape[dim])
            families.setdefault((source, dim), Family(size, (source, dim, 0, 0), slices=True)).add(node, k)
        elif (range_of := _match_range(node)) is not None:
            source, dim, begin, length = range_of
            ranges[source, dim, length, _describe_readers(node, 3)].setdefault(begin, node)
    for (source, dim, length, _), members in ranges.items():
        first, size = min(members), len(members)
        if sorted(members) == [first + k * length for k in range(size)]:
            family = families[source, dim, length, first] = Family(size, (source, dim, first, length), slices=True)
            for begin, node in members.items():
                family.add(node, (begin - first) // length)
    for family in families.values():
        if len(family.members) == family.size > 1:
            yield from ((node, (family, k)) for k, node in family.members.items())


def _match_slice(node: Node) -> tuple[Node, int, int] | None:
    """Returns the operand, the dim and the index of a node that is a slice."""
    if node.target is aten.select.int:
        source = node.args[0]
        shape = source.meta["val"].shape
        dim = get_argument(node, "dim") % len(shape)
        return source, dim, get_argument(node, "index") % shape[dim]
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        source = node.args[0].args[0]
        return source, get_argument(node.args[0], "dim") % source.meta["val"].dim(), node.args[1]
    return None


def _match_range(node: Node) -> tuple[Node, int, int, int] | None:
    """Returns the operand, the dim, the begin and the length of a node that is a range."""
    if node.target is not aten.slice.Tensor or get_argument(node, "step") != 1:
        return None
    source = node.args[0]
    dim = get_argument(node, "dim") % source.meta["val"].dim()
    begin, _, _ = slice(get_argument(node, "start"), get_argument(node, "end")).indices(source.meta["val"].shape[dim])
    length = int(node.meta["val"].shape[dim])
    return (source, dim, begin, length) if length else None


def _describe_readers(node: Node, steps: int) -> Any:
    """Returns the ops that read a node, and the readers of these, so many steps on."""
    readers = ((str(user.target), _describe_readers(user, steps - 1)) for user in node.users if steps)
    return tuple(sorted(readers))


def _freeze(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return tuple(map(_freeze, x))
    return tuple((k, _freeze(v)) for k, v in x.items()) if isinstance(x, Mapping) else (type(x), x)
