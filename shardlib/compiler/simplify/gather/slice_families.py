"""Families: nodes that do the same to slice 0, 1, ... of a stack each, and to what is the same for all."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.gather.batch_rules import LOOKUPS, flat, has_form
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
Node = Any  # of fx, whose arguments are what its op takes


@dataclass(eq=False)
class Family:
    """Nodes that do the same to slice 0, 1, ... of what `of` lists: families, what is the same for all, and arguments
    of the program, one for each.

    A family of slices has what they are made of there: a tensor, the dim, where they begin, and how long each is, 0 of
    one element without the dim.
    """

    size: int
    of: tuple[Any, ...]
    slices: bool = False
    nodes: list[Node] = field(default_factory=list)
    found: dict[int, Node] = field(default_factory=dict)

    def add(self, node: Node, k: int) -> None:
        self.nodes.append(node)
        self.found.setdefault(k, node)

    @property
    def families(self) -> Iterator[Family]:
        return (x for x in self.of if isinstance(x, Family))


def families(gm: fx.GraphModule) -> dict[Node, tuple[Family, int]]:
    """The family of each node that is in one, and which of its members it is."""
    place = dict(_slices(gm))
    known: dict[Any, Family] = {}
    for node in gm.graph.nodes if place else ():
        inside = {place[x] for x in node.all_input_nodes if x in place}
        if node in place or len({(f.size, k) for f, k in inside}) != 1 or not has_form(node):
            continue
        first, k = next(iter(inside))
        of = _member(node.args, node, place), _member(node.kwargs, node, place)
        for again in count():  # the same of other arguments is another family
            family = known.setdefault((node.target, _told(of), again), Family(first.size, tuple(flat(of))))
            if k not in family.found or _given(family.found[k]) == _given(node):
                break
        family.add(node, k)
        place[node] = family, k
    whole: dict[Family, bool] = {}
    for family, _ in place.values():  # a family comes before those that are made of it
        if family not in whole:
            whole[family] = len(family.found) == family.size and all(whole[f] for f in family.families)
    return {node: at for node, at in place.items() if whole[at[0]]}


@dataclass(frozen=True)
class Own:
    """An index for each member, which is an argument of the program."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _member(x: Any, node: Node, place: Mapping[Node, tuple[Family, int]]) -> Any:
    """What an argument of a node is to its family."""
    if isinstance(x, list | tuple):
        return [_member(y, node, place) for y in x]
    if isinstance(x, Mapping):
        return {k: _member(y, node, place) for k, y in x.items()}
    if not isinstance(x, fx.Node) or x in place:
        return place[x][0] if isinstance(x, fx.Node) else x
    val = x.meta["val"]
    own = node.target in LOOKUPS and x.op == "placeholder" and not val.is_floating_point()
    return Own(tuple(val.shape), val.dtype) if own else x


def _given(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if x.op == "placeholder"]


def _slices(gm: fx.GraphModule) -> Iterator[tuple[Node, tuple[Family, int]]]:
    """The slices of tensors of which all are there, and ranges of one length, in a row, that are read alike."""
    known: dict[tuple[Any, ...], Family] = {}
    ranges: dict[tuple[Any, ...], dict[int, Node]] = defaultdict(dict)
    for node in gm.graph.nodes:
        if (slice_of := _slice(node)) is not None:
            source, dim, k = slice_of
            size = int(source.meta["val"].shape[dim])
            known.setdefault((source, dim), Family(size, (source, dim, 0, 0), slices=True)).add(node, k)
        elif (range_of := _range(node)) is not None:
            source, dim, begin, length = range_of
            ranges[source, dim, length, _read(node, 3)].setdefault(begin, node)
    for (source, dim, length, _), found in ranges.items():
        first, size = min(found), len(found)
        if sorted(found) == [first + k * length for k in range(size)]:
            family = known[source, dim, length, first] = Family(size, (source, dim, first, length), slices=True)
            for begin, node in found.items():
                family.add(node, (begin - first) // length)
    for family in known.values():
        if len(family.found) == family.size > 1:
            yield from ((node, (family, k)) for k, node in family.found.items())


def _slice(node: Node) -> tuple[Node, int, int] | None:
    """Of which node, and along which of its dims, a node is which slice."""
    if node.target is aten.select.int:
        source = node.args[0]
        shape = source.meta["val"].shape
        dim = get_argument(node, "dim") % len(shape)
        return source, dim, get_argument(node, "index") % shape[dim]
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        source = node.args[0].args[0]
        return source, get_argument(node.args[0], "dim") % source.meta["val"].dim(), node.args[1]
    return None


def _range(node: Node) -> tuple[Node, int, int, int] | None:
    """Of which node, and along which of its dims, a node is a range, where that begins, and its length."""
    if node.target is not aten.slice.Tensor or get_argument(node, "step") != 1:
        return None
    source = node.args[0]
    dim, length = get_argument(node, "dim") % source.meta["val"].dim(), 0
    begin, _, _ = slice(get_argument(node, "start"), get_argument(node, "end")).indices(source.meta["val"].shape[dim])
    length = int(node.meta["val"].shape[dim])
    return (source, dim, begin, length) if length else None


def _read(node: Node, steps: int) -> Any:
    """By what ops a node is read, and what these make."""
    return tuple(sorted((str(user.target), _read(user, steps - 1)) for user in node.users)) if steps else ()


def _told(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return tuple(map(_told, x))
    return tuple((k, _told(v)) for k, v in x.items()) if isinstance(x, Mapping) else (type(x), x)
