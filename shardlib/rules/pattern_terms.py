"""The terms of a pattern matched with the tensors of a call: the factors of each dim, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.rules.iteration_space import Dim, arg, normalize_dims
from shardlib.rules.notation import ELLIPSIS, Note, Pattern, Term, is_anonymous
from shardlib.rules.rule import Call, Meta

PlacedTerm = tuple[Term, tuple[Dim, ...] | None]  # a term, and the factors of each dim of its tensor; None: no match


@dataclass(frozen=True)
class MatchedTerms:
    """A pattern for tensors of given ranks; None stands for a result that is no tensor.

    `groups`: the factors that `[dim]` stands for, by the argument's name.
    """

    operands: tuple[PlacedTerm, ...]
    results: tuple[PlacedTerm | None, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()


@lru_cache(maxsize=4096)
def match_terms(pattern: Pattern, present: tuple[int, ...], ranks: tuple[int | None, ...], dims: Any) -> MatchedTerms:
    """Matches terms by the ranks alone.

    `present`: the positions of the operands that are tensors. `dims`: the value of the argument that names dims.
    """
    terms = [*(pattern.operands[p] for p in present), *pattern.results]
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    name = pattern.named
    if name is not None:
        rank = next(n for t, n in zip(terms, ranks, strict=True) if t.named and n is not None)
        lists_sizes = Note(name, "size", (name,)) in pattern.notes  # the argument lists the sizes of the last dims
        at = range(rank)[rank - len(dims) :] if lists_sizes else [d for d in normalize_dims(dims, rank) if d < rank]
        factors = tuple(name if k == 0 else f"{name}{k}" for k in range(len(at)))
        groups = ((name, factors),)
        named = dict(zip(at, factors, strict=True))
        terms = [t if n is None else _expand_named(t, n, rank, name, named) for t, n in zip(terms, ranks, strict=True)]
    placed = [None if n is None else (t, _expand_ellipsis(t, n)) for t, n in zip(terms, ranks, strict=True)]
    return MatchedTerms(tuple(p for p in placed[: len(present)] if p), tuple(placed[len(present) :]), groups)


def _expand_named(term: Term, count: int, rank: int, name: str, named: Mapping[int, str]) -> Term:
    """Returns the term of a tensor of `count` dims, with `[dim]` and `...` written out dim by dim."""
    own = term.named if term.named and is_anonymous(term.named) else None
    factors = {d: f"{own}000{k}" for k, d in enumerate(named)} if own else named
    dims = [(*term.majors, factors[d]) if d in named else (f"*{rank - 1 - d}",) for d in range(rank)]
    if term.named and count == rank:
        return Term(tuple(dims), term.fits)
    if term.dims == ((name,),) and count == len(named):
        return Term(tuple((named[d],) for d in named), term.fits)
    if term.dims == (ELLIPSIS,) and count == rank - len(named):
        return Term(tuple(dim for d, dim in enumerate(dims) if d not in named), term.fits)
    if term.dims == (ELLIPSIS,) and count == rank:
        return Term(tuple(() if d in named else dim for d, dim in enumerate(dims)), term.fits)
    return term


def _expand_ellipsis(term: Term, rank: int) -> tuple[Dim, ...] | None:
    """Returns the factors of every dim. Those of `...` are `*0`, `*1` from the right, so that they broadcast."""
    dims = list(term.dims)
    if ELLIPSIS in dims:
        at = dims.index(ELLIPSIS)
        dims[at : at + 1] = [(f"*{i}",) for i in reversed(range(rank - term.rank))]
    fits = rank == len(dims) or (term.fits and rank < len(dims))
    return tuple(dims[len(dims) - rank :]) if fits else None


def factor_sizes(pattern: Pattern, call: Call, tensors: Sequence[tuple[PlacedTerm, tuple[int, ...]]]) -> dict[str, int]:
    """Returns the size of every factor, in the order in which the pattern names them."""
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    open_dims: list[tuple[Dim, int]] = []
    for (term, dims), shape in tensors:
        if dims is None:
            wrong.append(f"{list(shape)} does not have the dims of `{term}`")
            continue
        for dim, n in zip(dims, shape, strict=True):
            stretched = n == 1 and (term.fits or (dim and dim[0].startswith("*")))
            if not dim and n != 1:
                wrong.append(f"{list(shape)} has size {n} where `{term}` says 1")
            elif len(dim) == 1 and not stretched and sizes.setdefault(dim[0], n) != n:
                wrong.append(f"`{dim[0]}` is {n} in {list(shape)} and {sizes[dim[0]]} before")
            elif len(dim) > 1 and not stretched:
                open_dims.append((dim, n))
    if missing := {f for dim, _ in open_dims for f in dim} - sizes.keys():
        sizes |= {f: n for f, n in _sizes_from_arguments(pattern, call) if f in missing}
    # A dim of several factors gives the size of the one that is still unknown; each round settles one dim at least.
    for _ in range(len(open_dims) + 1):
        for dim, n in open_dims:
            unknown = [f for f in dim if f not in sizes]
            product = math.prod(sizes[f] for f in dim if f in sizes)
            if (len(unknown) == 1 and (not product or n % product)) or (not unknown and product != n):
                wrong.append(f"a dim of size {n} is no `({' '.join(dim)})` with {product} for the sizes that are known")
                sizes.update(dict.fromkeys(unknown, 1))
            elif len(unknown) == 1:
                sizes[unknown[0]] = n // product
    wrong += [f"the size of `{f}` does not follow" for d, _ in open_dims for f in d if f not in sizes]
    if wrong:
        raise misfit(pattern, call, list(dict.fromkeys(wrong)))
    return sizes


def _sizes_from_arguments(pattern: Pattern, call: Call) -> Iterator[tuple[str, int]]:
    """Yields the factors with a note `size(argument)`, with the values of these arguments."""
    for note in pattern.notes:
        name, _, item = (note.argument or "").partition(".")
        if note.word == "size" and note.names == [note.factors] and name != pattern.named:
            n = arg(call, name)
            n = n[int(item)] if item and isinstance(n, Sequence) else n
            if type(n) is int and n > 0:
                yield note.factors, n


def infer_shape(
    placed: PlacedTerm, result: Meta, operands: Sequence[tuple[PlacedTerm, tuple[int, ...]]]
) -> tuple[int, ...]:
    """Returns the shape of a result, from the operands where these determine it and torch would have to infer it."""
    dims = placed[1]
    if result.is_shape_known or dims is None or any(len(dim) > 1 for dim in dims):
        return result.shape
    sizes = {
        dim[0]: n
        for (term, factors), shape in operands
        for dim, n in zip(factors or (), shape, strict=factors is not None)
        if len(dim) == 1 and (n != 1 or not (term.fits or dim[0].startswith("*")))
    }
    if any(f not in sizes for dim in dims for f in dim):
        return result.shape
    return tuple([math.prod(sizes[f] for f in dim) for dim in dims])


def dim_labels(placed: PlacedTerm, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Dim, ...]:
    """Returns the factors of each dim, without those of size 1."""
    dims = placed[1] or ()
    return tuple([() if n == 1 else tuple([f for f in d if sizes[f] != 1]) for d, n in zip(dims, shape, strict=True)])


def misfit(pattern: Pattern, call: Call, wrong: list[str]) -> ShardingError:
    """Returns the error for a call that a pattern does not fit."""
    shapes = ", ".join(str(list(m.shape)) for m in call.operands)
    return ShardingError(f"the rule `{pattern}` does not fit the call {call.target}({shapes})", wrong)
