"""Patterns applied to calls: from the notation to a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.rules.iteration_space import Dim, Ints, Space, arg, argument_path, largest_numel, present_operands
from shardlib.rules.local_forms.helpers import from_torch_code
from shardlib.rules.local_forms.stencil import Reach, Stencil
from shardlib.rules.local_forms.window import Window
from shardlib.rules.notation import Note, Pattern, is_anonymous, parse
from shardlib.rules.pattern_terms import dim_labels, factor_sizes, infer_shape, match_terms, misfit
from shardlib.rules.rule import Call, LocalBuilder, Rule, WindowMap

Flops = Callable[[Call, int], int]  # of the call and the number of points of its iteration space


def pattern(
    text: str,
    *,
    emit: Callable[[LocalBuilder], Any] | None = None,
    form: Callable[..., Any] | None = None,
    flops: Flops | int | None = None,
    stencil: Stencil | None = None,
    windows: Mapping[str, WindowMap] | None = None,
    loose: bool = False,
    skips_empty_results: bool = True,
    **fields: Any,
) -> Callable[[Call], Rule]:
    """Returns a rule function for a pattern.

    `form` is the local form as torch code; it gets a `LocalBuilder`, then the op's arguments with shards for tensors.
    `emit` is a local form of instructions. `flops` is a number per point of the iteration space, or a function. By
    default it is 2 where operands are contracted, and elsewhere 1 per element of the largest tensor. `stencil` says
    which elements a result reads, where the text does not. With `loose`, the local form reads no offsets. With
    `skips_empty_results`, an empty result was not requested (the vectors of `svdvals`), and keeps no factor whole.
    `fields` are other fields of the rule.

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
    code = from_torch_code(form) if form else emit
    work: Flops | None = (lambda _, points: flops * points) if isinstance(flops, int) else flops
    options = _Options(parse(text), code, work, stencil, windows or {}, loose, skips_empty_results, fields)
    return lambda call: _apply(options, call)


def joint(sets: Iterable[frozenset[int]], present: Sequence[int]) -> list[frozenset[int]]:
    """Returns the linear sets in terms of the operands that are tensors. A set that contains a number is not linear."""
    position = {p: i for i, p in enumerate(present)}
    return [frozenset(position[p] for p in s) for s in sets if s <= position.keys()]


@dataclass(frozen=True)
class _Options:
    """The arguments of `pattern`."""

    pattern: Pattern
    emit: Callable[[LocalBuilder], Any] | None
    flops: Flops | None
    stencil: Stencil | None
    windows: Mapping[str, WindowMap]
    loose: bool
    skips_empty_results: bool
    fields: Mapping[str, Any]


def _apply(options: _Options, call: Call) -> Rule:
    """Returns the rule of a call, step by step: terms, sizes, notes, stencil, and what has to stay whole."""
    pattern = options.pattern
    present = present_operands(call, len(pattern.operands))
    if len(present) != len(call.operands) or len(pattern.results) != len(call.results):
        raise misfit(pattern, call, [f"it has {len(call.operands)} operands and {len(call.results)} results"])
    ranks = tuple([None if m is None else m.rank for m in (*call.operands, *call.results)])
    named = arg(call, pattern.named) if pattern.named else None
    matched = match_terms(pattern, tuple(present), ranks, tuple(named) if isinstance(named, Sequence) else named)
    operands = [(t, m.shape) for t, m in zip(matched.operands, call.operands, strict=True)]
    results = [(t, infer_shape(t, m, operands)) for t, m in zip(matched.results, call.results, strict=True) if t and m]
    sizes = factor_sizes(pattern, call, (*operands, *results))

    space = Space()
    for name, n in sizes.items():
        space.dim(n, name, whole=is_anonymous(name))
    inputs = [dim_labels(t, shape, sizes) for t, shape in operands]
    labels = iter([dim_labels(t, shape, sizes) for t, shape in results])
    outputs = [next(labels) if t and m else () for t, m in zip(matched.results, call.results, strict=True)]
    notes = _Notes(call, space, sizes, {**dict(matched.groups), "...": [f for f in space.sizes if f.startswith("*")]})
    for note in pattern.notes:
        notes.add(note)
    written = _factors(outputs)
    stencil = options.stencil
    if notes.reach:
        stencil = Stencil(notes.reach, back=any(r.source != f and r.source in written for f, r in notes.reach.items()))
    if stencil:
        notes.add_stencil(stencil)
    available = _factors(inputs) | {f for _, dim in notes.ints.values() for f in dim}
    # A device has no input from which to tell its shard of a factor that only results have.
    space.whole |= written - available - {*notes.local_factors, *notes.reduce}
    _keep_unreduced_whole(notes, outputs, available, skips_empty=options.skips_empty_results)
    points = math.prod(space.sizes.values())
    loose = [
        f for f in notes.local_factors if options.loose or (stencil and f not in {*stencil.reach, *stencil.sources})
    ]
    if options.flops:
        flops = options.flops(call, points)
    else:  # only here are the results' shapes needed, which cost an eager call a run on meta tensors
        flops = 2 * points if _contracts(inputs, notes.reduce) else largest_numel(call)
    return space.rule(
        inputs,
        outputs,
        reduce=notes.reduce,
        linear=joint(pattern.linear, present),
        ints=notes.ints,
        emit=options.emit or (stencil.local if stencil else None),
        local_factors=notes.local_factors,
        loose=loose,
        ones=[f for f, n in sizes.items() if n == 1 and not is_anonymous(f)],
        windows={**(stencil.windows if stencil else {}), **options.windows},
        follows={i: o for i, o in notes.ties["with"].items() if i not in space.whole},
        ring=notes.ties["round"],
        lends=notes.ties["lend"],
        gathers=notes.gathers,
        flops=flops,
        **options.fields,
    )


def _factors(tensors: Iterable[Sequence[Dim]]) -> set[str]:
    return {f for labels in tensors for d in labels for f in d}


def _keep_unreduced_whole(
    notes: _Notes, outputs: Sequence[Sequence[Dim]], available: set[str], *, skips_empty: bool
) -> None:
    """Keeps factors whole that some result lacks without a note on its reduction.

    With `skips_empty`, results without elements do not count.
    """
    space, reduce = notes.space, notes.reduce
    returned = [(_factors([labels]), m) for labels, m in zip(outputs, notes.call.results, strict=True) if m]
    lacked = {f for dims, _ in returned for f in space.sizes.keys() - dims - reduce.keys()} - space.whole
    if skips_empty and any(f in dims for f in lacked & available for dims, _ in returned):
        full = [dims for dims, m in returned if math.prod(m.shape)]
        reduce |= dict.fromkeys(set.intersection(*full, lacked & available) if full else (), "none")
    space.whole |= lacked - reduce.keys()


@dataclass
class _Notes:
    """The notes after the bar of a pattern, read for one call. `groups` are the factors of `[dim]` and of `...`."""

    call: Call
    space: Space
    sizes: Mapping[str, int]
    groups: Mapping[str, Sequence[str]]
    reduce: dict[str, str] = field(default_factory=dict)
    local_factors: list[str] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    ties: dict[str, dict[str, str]] = field(default_factory=lambda: {"round": {}, "with": {}, "lend": {}})
    reach: dict[str, Reach] = field(default_factory=dict)
    ints: Ints = field(default_factory=dict)

    def add(self, note: Note) -> None:
        """Reads a note."""
        factors = self.groups.get(note.factors, note.names)
        if note.word == "size":
            self._add_size(note, factors)
            return
        for f in factors:
            self._add_to_factor(f, note._replace(factors=f))

    def _add_to_factor(self, f: str, note: Note) -> None:
        """Reads a note on the factor `f` alone."""
        space = self.space
        if f not in space.sizes:
            space.whole |= {note.source} & space.sizes.keys()  # one window, which reads all of its source
        elif note.word == "whole":
            if note.argument is None or arg(self.call, note.argument):
                space.whole.add(f)
        elif note.other is not None:
            self._add_tie(f, note.word, note.other)
        elif note.extent:
            if note.source in space.sizes:
                self.reach[f] = _reach(self.call, note, self.sizes[note.source], self.sizes[f])
            else:
                space.whole.add(f)  # windows of one element
        elif note.word == "local":
            self.local_factors.append(f)
        elif note.word == "gather":
            self.gathers.append(f)
        else:
            self.reduce[f] = note.word

    def _add_size(self, note: Note, factors: Sequence[str]) -> None:
        """Reads a `size` note; an argument that names dims lists their sizes."""
        is_list = note.factors in self.groups and note.factors == note.argument
        parts = {f".{k}": (f,) for k, f in enumerate(factors)} if is_list else {"": factors}
        for item, dim in parts.items():
            self.ints |= _size_argument(
                self.call, f"{note.argument}{item}", tuple(f for f in dim if f in self.space.sizes)
            )

    def _add_tie(self, factor: str, word: str, other: str) -> None:
        if other in self.space.sizes:
            self.ties[word][factor] = other
            if word != "lend":
                self.reduce.setdefault(factor, "none")
        elif word == "with":  # the other one has size 1
            self.space.whole.add(factor)

    def add_stencil(self, stencil: Stencil) -> None:
        """Adds the factors that results read around."""
        self.local_factors += [*stencil.reach, *stencil.sources]
        follows = {i: o for i, o in stencil.sources.items() if i != o}
        self.reduce |= dict.fromkeys(follows, "none") | (dict.fromkeys(follows.values(), "sum") if stencil.back else {})
        self.ties["with"] |= follows


def _reach(call: Call, note: Note, size: int, count: int) -> Reach:
    """Returns the reach of a `halo`, `ring` or `windows` note, whose numbers may be arguments of the op.

    `size` and `count` are the sizes of the factor that the note reads, and of its own factor.
    """
    word, read, extent = note.word, note.source, note.extent or ()
    numbers = [int(n) if n.isdecimal() else arg(call, n) for n in extent]
    limit = size if word == "ring" else math.inf
    least = (1, 1, 0) if word == "windows" else (0, 0)
    checked = zip(extent, numbers, least, strict=True)
    wrong = [f"{name} is {n!r}" for name, n, low in checked if type(n) is not int or not low <= n <= limit]
    if wrong:
        place = f"`{word}({', '.join([*([read] if word == 'windows' else []), *extent])})` in the rule of {call.target}"
        remedy = "write a number, t:halo(3, 0), or an argument that is a whole one and not negative"
        limit_text = ", at most once round" if word == "ring" else ""
        raise ShardingError(place, list(dict.fromkeys(wrong)), rule=f"it counts elements{limit_text}", remedy=remedy)
    if word == "windows":
        window = Window(numbers[0], numbers[1], numbers[2])
        fitting = max((size + 2 * window.padding - window.span) // window.stride + 1, 0)
        if fitting != count:
            place = f"`windows({', '.join([read, *map(str, numbers)])})` in the rule of {call.target}"
            wrong = [f"`{read}` of {size} elements has {fitting} such windows, and there are {count}"]
            raise ShardingError(place, wrong)
        return Reach.windows(read, size, count, window)
    return Reach.around(word, read, size, *numbers)


def _size_argument(call: Call, name: str, dim: Dim) -> Ints:
    """Returns the `ints` entry of an argument that holds the size of `dim`; `n.0` is the first item of the list `n`."""
    name, _, item = name.partition(".")
    return {(*argument_path(call, name), *([int(item)] if item else [])): (1, dim)}


def _contracts(operands: Sequence[Sequence[Dim]], reduce: Mapping[str, str]) -> bool:
    """Returns whether the op sums products of its operands."""
    summed = [f for f, kind in reduce.items() if kind == "sum"]
    return any(sum(any(f in d for d in labels) for labels in operands) > 1 for f in summed)
