"""Patterns applied to calls: from the notation to a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.rules.iteration_space import Dim, Ints, Space, arg, axes, largest, numel, path, present
from shardlib.rules.local_forms.helpers import torch_code
from shardlib.rules.local_forms.stencil import Reach, Stencil
from shardlib.rules.local_forms.window import Window
from shardlib.rules.notation import ELLIPSIS, Pattern, Term, argument, is_own, other, parse, reach, source
from shardlib.rules.rule import Call, Local, Meta, Rule


def pattern(
    text: str,
    *,
    local: Callable[[Local], Any] | None = None,
    form: Callable[..., Any] | None = None,
    flops: Callable[[Call, int], int] | int | None = None,
    stencil: Stencil | None = None,
    unasked: bool = True,
    **fields: Any,
) -> Callable[[Call], Rule]:
    """A rule function from the notation.

    `form` is the local form as torch code, which gets a `Local`, then what the op gets, pieces in place of tensors.
    `flops` says how many a point of the iteration space is, or gets the call and the size of that; without it, a point
    is two operations where operands are contracted; elsewhere there is one for each element of the largest tensor.
    `stencil` says what results read of a dim, where the text does not; `fields` are others of the rule. `unasked` says
    that an empty result is one that nobody asked for (the vectors of `svdvals`): it has no say in what is whole.

    Example:
        >>> import torch
        >>> from shardlib.rules.rule import Call, Meta
        >>> a, b, c = (Meta(shape, torch.float32) for shape in ((2, 3), (3, 4), (2, 4)))
        >>> rule = pattern("m k, k n -> m n | k:sum")(Call(torch.ops.aten.mm.default, (a, b), {}, (a, b), (c,)))
        >>> rule.operands, rule.results
        (((('m',), ('k',)), (('k',), ('n',))), ((('m',), ('n',)),))
        >>> rule.sizes, rule.reduce, rule.flops
        ({'m': 2, 'k': 3, 'n': 4}, {'k': 'sum'}, 48)
    """
    parsed, local = parse(text), torch_code(form) if form else local
    work = (lambda _, points: flops * points) if isinstance(flops, int) else flops
    return lambda call: _apply(parsed, call, local, work, stencil, unasked, fields)


def joint(sets: Iterable[frozenset[int]], here: Sequence[int]) -> list[frozenset[int]]:
    """Linear sets in terms of the operands that are present; a set with an absent member (a number) is not linear."""
    position = {p: i for i, p in enumerate(here)}
    return [frozenset(position[p] for p in s) for s in sets if s <= position.keys()]


def _apply(
    pattern: Pattern,
    call: Call,
    local: Callable[[Local], Any] | None,
    flops: Callable[[Call, int], int] | None,
    stencil: Stencil | None,
    unasked: bool,
    fields: Mapping[str, Any],
) -> Rule:
    here = present(call, len(pattern.operands))
    if len(here) != len(call.operands) or len(pattern.results) != len(call.results):
        raise _misfit(pattern, call, [f"it has {len(call.operands)} operands and {len(call.results)} results"])
    ranks = tuple([None if m is None else m.rank for m in (*call.operands, *call.results)])
    said = arg(call, pattern.named) if pattern.named else None
    form = _form(pattern, tuple(here), ranks, tuple(said) if isinstance(said, Sequence) else said)
    operands = [(t, m.shape) for t, m in zip(form.operands, call.operands, strict=True)]
    results = [(t, _shape(t, m, operands)) for t, m in zip(form.results, call.results, strict=True) if t and m]
    group = {name: list(factors) for name, factors in form.group}
    every = (*operands, *results)
    sizes = _sizes(pattern, call, every)

    space = Space()
    for name, n in sizes.items():
        space.dim(n, name, whole=is_own(name))
    labeled = [_label(t, shape, sizes) for t, shape in operands]
    made = iter([_label(t, shape, sizes) for t, shape in results])
    out = [next(made) if t and m else () for t, m in zip(form.results, call.results, strict=True)]
    reduce: dict[str, str] = {}
    cut_locally, gathers = [], []
    tied: dict[str, dict[str, str]] = {"round": {}, "with": {}, "lend": {}}
    around: dict[str, Reach] = {}
    ints: Ints = {}
    group["..."] = [f for f in space.sizes if f.startswith("*")]
    for name, kind in pattern.notes:
        factors = group[name] if name in group else name.strip("()").split() if name[0] == "(" else [name]
        if kind.startswith("size("):
            listed = name in group and name == argument(kind)
            parts = {f".{k}": (f,) for k, f in enumerate(factors)} if listed else {"": factors}
            for item, dim in parts.items():
                ints |= _sized(call, f"{argument(kind)}{item}", tuple(f for f in dim if f in space.sizes))
            continue
        for f in factors:
            if f not in space.sizes or (kind.startswith("whole(") and not arg(call, str(argument(kind)))):
                space.whole |= {source(f, kind)} & space.sizes.keys() - {f}  # one window
                continue
            if kind.startswith("whole"):
                space.whole.add(f)
            elif (second := other(kind)) is not None:
                word = kind.partition("(")[0]
                if second in space.sizes:
                    tied[word][f] = second
                    if word != "lend":
                        reduce.setdefault(f, "none")
                elif word == "with":
                    space.whole.add(f)  # without a partner, which has size 1; and so stays what goes round
            elif ends := reach(kind):
                read = source(f, kind)
                if read in space.sizes:
                    around[f] = _reach(call, kind, read, sizes[read], sizes[f], ends)
                else:
                    space.whole.add(f)  # windows of one element
            elif kind == "local":
                cut_locally.append(f)
            elif kind == "gather":
                gathers.append(f)
            else:
                reduce[f] = kind
    if around:
        wide = {f for labels in out for d in labels for f in d}
        stencil = Stencil(around, back=any(r.source != f and r.source in wide for f, r in around.items()))
    if stencil:
        local, cut_locally = local or stencil.local, [*cut_locally, *stencil.reach, *stencil.sources]
        ties = {i: o for i, o in stencil.sources.items() if i != o}
        reduce |= dict.fromkeys(ties, "none") | (dict.fromkeys(ties.values(), "sum") if stencil.back else {})
        tied["with"] |= ties
    there = {f for labels in labeled for d in labels for f in d} | {f for _, dim in ints.values() for f in dim}
    # Nothing tells a device to make a piece of what only results have.
    space.whole |= {f for labels in out for d in labels for f in d} - there - {*cut_locally, *reduce}
    returned = [({f for d in labels for f in d}, m) for labels, m in zip(out, call.results, strict=True) if m]
    lacked = {f for dims, _ in returned for f in space.sizes.keys() - dims - reduce.keys()} - space.whole
    if unasked and any(f in dims for f in lacked & there for dims, _ in returned):
        full = [dims for dims, m in returned if numel(m.shape)]
        reduce |= dict.fromkeys(set.intersection(*full, lacked & there) if full else (), "none")
    space.whole |= lacked - reduce.keys()
    points = math.prod(space.sizes.values())
    return space.rule(
        labeled,
        out,
        reduce=reduce,
        linear=joint(pattern.linear, here),
        ints=ints,
        local=local,
        local_factors=cut_locally,
        follows={i: o for i, o in tied["with"].items() if i not in space.whole},
        reads=stencil.reads if stencil else {},
        loose=[f for f in cut_locally if stencil and f not in {*stencil.reach, *stencil.sources}],
        rounds=tied["round"],
        lends=tied["lend"],
        gathers=gathers,
        ones=[f for f, n in sizes.items() if n == 1 and not is_own(f)],
        flops=flops(call, points) if flops else 2 * points if _contracts(labeled, reduce) else largest(call),
        **fields,
    )


def _reach(call: Call, kind: str, read: str, size: int, count: int, ends: tuple[str, ...]) -> Reach:
    """How far a dim reads around itself: numbers, or arguments that are."""
    said = [int(n) if n.isdecimal() else arg(call, n) for n in ends]
    word, limit = kind.partition("(")[0], size if kind.startswith("ring") else math.inf
    least = (1, 1, 0) if word == "windows" else (0, 0)
    checked = zip(ends, said, least, strict=True)
    wrong = [f"{name} is {n!r}" for name, n, low in checked if type(n) is not int or not low <= n <= limit]
    if wrong:
        what = f"`{word}({', '.join([*([read] if word == 'windows' else []), *ends])})` in the rule of {call.target}"
        remedy = "write a number, t:halo(3, 0), or an argument that is a whole one and not negative"
        most = ", at most once round" if word == "ring" else ""
        raise ShardingError(what, list(dict.fromkeys(wrong)), rule=f"it counts elements{most}", remedy=remedy)
    if word == "windows":
        window = Window(said[0], said[1], said[2])
        many = max((size + 2 * window.padding - window.span) // window.stride + 1, 0)
        if many != count:
            what = f"`windows({', '.join([read, *map(str, said)])})` in the rule of {call.target}"
            raise ShardingError(what, [f"`{read}` of {size} elements has {many} such windows, and there are {count}"])
        return Reach.windows(read, size, count, window)
    return Reach.around(word, read, size, *said)


def _sized(call: Call, name: str, dim: Dim) -> Ints:
    """The argument of this name is the size of the dim; `n.0` is the first in the list `n`."""
    name, _, item = name.partition(".")
    return {(*path(call, name), *([int(item)] if item else [])): (1, dim)}


def _contracts(operands: Sequence[Sequence[Dim]], reduce: Mapping[str, str]) -> bool:
    """Whether products of operands are added up."""
    summed = [f for f, kind in reduce.items() if kind == "sum"]
    return any(sum(any(f in d for d in o) for o in operands) > 1 for f in summed)


def _sizes(pattern: Pattern, call: Call, tensors: Sequence[tuple[_Placed, tuple[int, ...]]]) -> dict[str, int]:
    """The size of every factor, in the order in which the pattern names them."""
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
        sizes |= {f: n for f, n in _counted(pattern, call) if f in missing}
    # A dim of several factors gives the size of the one that is still unknown; each round settles one dim at least.
    for _ in range(len(open_dims) + 1):
        for dim, n in open_dims:
            known = 1
            for f in dim:
                known *= sizes.get(f, 1)
            unknown = [f for f in dim if f not in sizes]
            if (len(unknown) == 1 and (not known or n % known)) or (not unknown and known != n):
                wrong.append(f"a dim of size {n} is no `({' '.join(dim)})` with {known} for the sizes that are known")
                sizes.update(dict.fromkeys(unknown, 1))
            elif len(unknown) == 1:
                sizes[unknown[0]] = n // known
    wrong += [f"the size of `{f}` does not follow" for d, _ in open_dims for f in d if f not in sizes]
    if wrong:
        raise _misfit(pattern, call, list(dict.fromkeys(wrong)))
    return sizes


def _counted(pattern: Pattern, call: Call) -> Iterator[tuple[str, int]]:
    """The sizes that arguments say: `h` and its size, where `h:size(heads)` is written."""
    for f, kind in pattern.notes:
        name, _, item = (argument(kind) or "").partition(".")
        if kind.startswith("size(") and f[0] != "(" and name != pattern.named:
            n = arg(call, name)
            n = n[int(item)] if item and isinstance(n, Sequence) else n
            if type(n) is int and n > 0:
                yield f, n


def _shape(placed: _Placed, result: Meta, operands: Sequence[tuple[_Placed, tuple[int, ...]]]) -> tuple[int, ...]:
    """The shape of a result: where torch would have to be asked, it is what operands tell, if they do."""
    dims = placed[1]
    if result.at_hand or dims is None or any(len(dim) > 1 for dim in dims):
        return result.shape
    told = {
        dim[0]: n
        for (term, known), shape in operands
        for dim, n in zip(known or (), shape, strict=known is not None)
        if len(dim) == 1 and (n != 1 or not (term.fits or dim[0].startswith("*")))
    }
    known_here = all(f in told for dim in dims for f in dim)
    return tuple([math.prod(told[f] for f in dim) for dim in dims]) if known_here else result.shape


def _label(placed: _Placed, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Dim, ...]:
    dims = placed[1] or ()
    return tuple([() if n == 1 else tuple([f for f in d if sizes[f] != 1]) for d, n in zip(dims, shape, strict=True)])


# Terms dim by dim: what follows from ranks alone ----------------------------------------------------------------------

_Placed = tuple[Term, tuple[Dim, ...] | None]  # a term, and the factors of each dim of a tensor; None: it does not fit


@dataclass(frozen=True)
class _Form:
    """A pattern for tensors of given ranks; None stands for what is no tensor.

    `group`: the factors that an argument names, and those of `...`, by what the pattern calls them.
    """

    operands: tuple[_Placed, ...]
    results: tuple[_Placed | None, ...]
    group: tuple[tuple[str, tuple[str, ...]], ...] = ()


@lru_cache(maxsize=4096)
def _form(pattern: Pattern, here: tuple[int, ...], ranks: tuple[int | None, ...], said: Any) -> _Form:
    """`here` are the operands that there are, `said` is what the argument says that names dims."""
    terms = [*(pattern.operands[p] for p in here), *pattern.results]
    group: tuple[tuple[str, tuple[str, ...]], ...] = ()
    name = pattern.named
    if name is not None:
        rank = next(n for t, n in zip(terms, ranks, strict=True) if t.named and n is not None)
        counted = (name, f"size({name})") in pattern.notes  # it lists the sizes of the last dims
        where = list(range(rank))[rank - len(said) :] if counted else [d for d in axes(said, rank) if d < rank]
        factors = tuple(name if k == 0 else f"{name}{k}" for k in range(len(where)))
        group = ((name, factors),)
        named = dict(zip(where, factors, strict=True))
        terms = [t if n is None else _named(t, n, rank, name, named) for t, n in zip(terms, ranks, strict=True)]
    placed = [None if n is None else (t, _dims(t, n)) for t, n in zip(terms, ranks, strict=True)]
    return _Form(tuple(p for p in placed[: len(here)] if p), tuple(placed[len(here) :]), group)


def _named(term: Term, count: int, rank: int, name: str, named: Mapping[int, str]) -> Term:
    """The term of a tensor of `count` dims, dim by dim: of all, of those that an argument names, or of the others."""
    own = term.named if term.named and is_own(term.named) else None
    its = {d: f"{own}000{k}" for k, d in enumerate(named)} if own else named
    dims = [(*term.majors, its[d]) if d in named else (f"*{rank - 1 - d}",) for d in range(rank)]
    if term.named and count == rank:
        return Term(tuple(dims), term.fits)
    if term.dims == ((name,),) and count == len(named):
        return Term(tuple((named[d],) for d in named), term.fits)
    if term.dims == (ELLIPSIS,) and count == rank - len(named):
        return Term(tuple(dim for d, dim in enumerate(dims) if d not in named), term.fits)
    if term.dims == (ELLIPSIS,) and count == rank:
        return Term(tuple(() if d in named else dim for d, dim in enumerate(dims)), term.fits)
    return term


def _dims(term: Term, rank: int) -> tuple[Dim, ...] | None:
    """The factors of every dim; those of `...` are `*0`, `*1` from the right, so that they broadcast."""
    dims = list(term.dims)
    if ELLIPSIS in dims:
        at = dims.index(ELLIPSIS)
        dims[at : at + 1] = [(f"*{i}",) for i in reversed(range(rank - term.rank))]
    fits = rank == len(dims) or (term.fits and rank < len(dims))
    return tuple(dims[len(dims) - rank :]) if fits else None


def _misfit(pattern: Pattern, call: Call, wrong: list[str]) -> ShardingError:
    given = ", ".join(str(list(m.shape)) for m in call.operands)
    return ShardingError(f"the rule `{pattern}` does not fit the call {call.target}({given})", wrong)
