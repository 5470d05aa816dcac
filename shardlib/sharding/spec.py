"""Specs: how a user shards one tensor, and the layout that a spec gives a shape on a mesh.

A spec is a string (the grammar is in `grammar.py`), JAX's positional `P`, or a parsed `Spec`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import EllipsisType
from typing import Any, overload

from shardlib.core.errors import ShardingError
from shardlib.sharding.grammar import SpecDim, SpecFactor, parse_axes, parse_dims
from shardlib.sharding.layout import Factor, Layout, ShardSizes
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.partition_spec import is_partition_spec, list_entries
from shardlib.sharding.placement import FactorNames, FixedLayout
from shardlib.sharding.resolve import Fault, find_dim_axes, resolve_dims

Entry = str | tuple[str, ...] | None  # of a `P`


@dataclass(frozen=True, init=False, repr=False, eq=False)
class P(Sequence[Entry]):
    """JAX's positional form of a spec: per dim None, a mesh axis, or a tuple of mesh axes (major first).

    Shorter than the rank leaves the remaining dims whole; `P()` is replicated. It reads as the sequence of its entries:
    it iterates, unpacks, adds, has a length and indices, and equals a tuple of these; `("data",)` is `"data"` and `()`
    is None, as in JAX (`P("data") != P("data", None)`). An entry may also be any text that may follow `@` in a spec: a
    part of an axis (`"tensor:(1)8"`), or chosen shard sizes (`"data=[5 3 8 0]"`, `"(pod data)=[5 3 8 0]"`).

    Example:
        >>> P(None, "tensor"), str(Spec.convert(P(None, ("pod", "data"))))
        (P(None, 'tensor'), '_ _@(pod data) ...')
        >>> P.parse("P(None, 'tensor')") == P(None, "tensor")
        True
        >>> rows, columns = P("data", ("tensor",))
        >>> rows, columns, len(P("data")), P("data") + P(None)[:1]
        ('data', 'tensor', 1, P('data', None))
    """

    parts: tuple[Entry, ...]

    def __init__(self, *parts: str | Sequence[str] | None) -> None:
        tidy = tuple(tuple(part) if isinstance(part, list | tuple) else part for part in parts)
        wrong = [part for part in tidy if not (part is None or isinstance(part, tuple) or _is_axes(part))]
        wrong += [axis for part in tidy if isinstance(part, tuple) for axis in part if not _is_axes(axis, 1)]
        if wrong:
            raise ShardingError(
                f"P({', '.join(map(repr, parts))}) cannot be read",
                [f"{axis!r} is not a mesh axis" for axis in wrong],
                rule='an entry of P is None, an axis "a" or several ("a", "b"), a part "a:(1)8", shard sizes "a=[5 3]"',
            )
        object.__setattr__(self, "parts", tuple(map(_normalize_entry, tidy)))

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, i: int) -> Entry: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, i: int | slice) -> Entry | tuple[Entry, ...]:
        return self.parts[i]

    def __add__(self, other: P | tuple[Entry, ...]) -> P:
        return P(*self.parts, *other) if isinstance(other, P | tuple) else NotImplemented

    def __radd__(self, other: tuple[Entry, ...]) -> P:
        return P(*other, *self.parts) if isinstance(other, tuple) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, P):
            return self.parts == other.parts
        return isinstance(other, tuple) and self.parts == tuple(map(_normalize_entry, other))

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.parts))})"

    @staticmethod
    def parse(text: str) -> P:
        """Parses the text that `str` prints."""
        try:
            if not (text.startswith("P(") and text.endswith(")")):
                raise ValueError(text)
            parts = ast.literal_eval(f"[{text[2:-1]}]")
        except (SyntaxError, ValueError) as error:
            raise ShardingError(f"{text!r} cannot be read as a P", remedy="write P(None, 'tensor')") from error
        return P(*parts)


@dataclass(frozen=True)
class Spec:
    """A parsed spec: per dim a `SpecDim`, or `...` once.

    Example:
        >>> spec = Spec.convert("(three heads@tensor hd) embed?")
        >>> str(spec), spec.names
        ('(three heads@tensor hd) embed?', ('three', 'heads', 'hd', 'embed'))
        >>> parse(str(spec)) == spec
        True
    """

    dims: tuple[SpecDim | EllipsisType, ...]

    @staticmethod
    def convert(x: str | P | Spec) -> Spec:
        """Converts a string, a `P`, a `Spec`, or a PartitionSpec of JAX, whose UNCONSTRAINED dims are open."""
        if isinstance(x, Spec):
            return x
        if isinstance(x, str):
            return parse(x)
        if isinstance(x, P):
            return _positional(x)
        if is_partition_spec(x):
            parts, free = list_entries(x)
            dims = _positional(P(*parts)).dims[: len(parts)]
            return Spec((*(replace(dim, open=is_open) for dim, is_open in zip(dims, free, strict=True)), ...))
        raise ShardingError(f"{x!r} is not a spec", remedy='write a string ("batch seq"), a P(...) or a Spec')

    @property
    def factors(self) -> tuple[SpecFactor, ...]:
        return tuple(f for dim in self.dims if isinstance(dim, SpecDim) for f in dim.factors)

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(f.name for f in self.factors)

    @staticmethod
    def from_layout(layout: Layout, names: FactorNames, *, pieces: bool = False) -> Spec:
        """The spec of `layout`; with `pieces` it lists the shard sizes even of chunks."""

        def factor(f: Factor, name: str | None, alone: bool) -> SpecFactor:
            sizes = f.pieces if f.axes and (pieces or isinstance(f.size, ShardSizes)) else None
            return SpecFactor(name, tuple(map(str, f.axes)), None if alone else int(f.size), sizes)

        return Spec(
            tuple(
                SpecDim(tuple(factor(f, name, len(dim) == 1) for f, name in zip(dim, words, strict=True)))
                for dim, words in zip(layout.dims, names, strict=True)
            )
        )

    def resolve(
        self, shape: Sequence[int], mesh: Mesh, *, sizes: Sizes | None = None, name: str = "tensor"
    ) -> FixedLayout:
        """Returns the layout that this spec gives a tensor of `shape` on `mesh`.

        `sizes` map the name of a factor to its size, or to its shard sizes.

        Raises one `ShardingError` with everything that does not fit: unknown axes, an axis used twice, the wrong number
        of dims, sizes that contradict or do not divide, shard sizes that do not add up.

        Example:
            >>> from shardlib.sharding.mesh.mesh import Mesh
            >>> mesh = Mesh.abstract(data=2, tensor=4, rules={"heads": "tensor"})
            >>> str(parse("(three heads hd) embed").resolve((384, 128), mesh, sizes={"three": 3, "heads": 8}).layout)
            '(3 8@tensor 16), 128'
        """
        return resolve_many([(name, shape, self, sizes)], mesh)[0]

    def with_sizes(self, sizes: Sizes) -> Spec:
        """Returns the spec with these sizes on the factors of composed dims, and shard sizes on any factor.

        Example:
            >>> str(parse("(three heads hd) embed").with_sizes({"three": 3, "heads": 8}))
            '(three=3 heads=8 hd) embed'
            >>> str(parse("batch@data embed").with_sizes({"batch": [5, 3, 8, 0]}))
            'batch@data=[5 3 8 0] embed'
        """
        if not sizes:
            return self
        return Spec(tuple(_with_sizes(dim, sizes) if isinstance(dim, SpecDim) else dim for dim in self.dims))

    def __str__(self) -> str:
        return " ".join("..." if dim is ... else str(dim) for dim in self.dims)


@lru_cache(maxsize=4096)
def parse(text: str) -> Spec:
    """Parses a spec; raises `ShardingError` that points at the character.

    Example:
        >>> parse("batch seq@(pod data) _").dims[1]
        SpecDim(factors=(SpecFactor(name='seq', axes=('pod', 'data'), size=None, pieces=None),), open=False)
        >>> parse("embed ff@")
        Traceback (most recent call last):
            ...
        shardlib.ShardingError: spec 'embed ff@' cannot be read: a mesh axis is missing
            embed ff@
                     ^
        Rule: a spec is dims separated by spaces: name, name@axis, name@(a b)=[5 3], _, (a b), ..., ? behind open dims
    """
    return Spec(parse_dims(text))


@lru_cache(maxsize=4096)
def _positional(p: P) -> Spec:
    return Spec((*(SpecDim((_entry(part),)) for part in p.parts), ...))


def _normalize_entry(part: Any) -> Any:
    """Returns an axis for a tuple of one axis, and None for an empty tuple."""
    return part if not isinstance(part, tuple) or len(part) > 1 else part[0] if part else None


def _entry(part: str | tuple[str, ...] | None) -> SpecFactor:
    if isinstance(part, str):
        axes, pieces = parse_axes(part)
        return SpecFactor(None, axes, pieces=pieces)
    return SpecFactor(None, tuple(axis for text in part for axis in parse_axes(text)[0]) if part else None)


def _is_axes(text: object, most: int = 0) -> bool:
    """Returns whether a spec may have this text behind `@`; with `most`, at most so many axes and no shard sizes."""
    try:
        axes, pieces = parse_axes(text) if isinstance(text, str) else ((), ())
    except ShardingError:
        return False
    return bool(axes) and (not most or (pieces is None and len(axes) <= most))


Sizes = Mapping[str, int | Sequence[int]]  # by the name of a factor: its size, or its shard sizes
Item = tuple[str, Sequence[int], str | P | Spec, Sizes | None]  # name, shape, spec, sizes


def collect_sizes(sizes: Sizes | int | None, lengths: Mapping[str, int]) -> Sizes:
    """Merges the two ways in which a call passes sizes; a number for `sizes` is the size of a factor of that name."""
    if sizes is None or isinstance(sizes, Mapping):
        return {**(sizes or {}), **lengths}
    return {"sizes": sizes, **lengths}


def _plain_sizes(sizes: Sizes | None) -> dict[str, int | Sequence[int]]:
    """Converts numpy's and torch's numbers to ints, so that a cached program does not depend on them."""
    return {k: n.__index__() if hasattr(n, "__index__") else n for k, n in (sizes or {}).items()}


def resolve_many(items: Sequence[Item], mesh: Mesh | None, *, call: str = "shard") -> list[FixedLayout]:
    """Resolves the specs of several tensors: `(name, shape, spec, sizes)`; errors name the `call`.

    Outside any mesh (None) nothing is sharded and the axes of specs are ignored. Raises one `ShardingError` that lists
    the faults of all specs.
    """
    items = [(name, shape, spec, _plain_sizes(sizes)) for name, shape, spec, sizes in items]
    specs = [_parse_for(call, name, spec) for name, _, spec, _ in items]
    outcomes = [
        resolve_dims(spec.dims, tuple(shape), mesh, tuple(sorted(_hashable(sizes or {}))))
        for spec, (_, shape, _, sizes) in zip(specs, items, strict=True)
    ]
    refused = [(item, outcome) for item, outcome in zip(items, outcomes, strict=True) if isinstance(outcome, tuple)]
    if not refused:
        return [
            replace(outcome, spec=spec.with_sizes(sizes or {}))
            for spec, outcome, (_, _, _, sizes) in zip(specs, outcomes, items, strict=True)
            if isinstance(outcome, FixedLayout)
        ]
    if len(items) == 1:
        name, request = _describe(items[0])
        head = f"{call}({name}) {request}, {_describe_mesh(mesh)}"
        lines = [fault.text for _, faults in refused for fault in faults]
    else:
        head = f"{call}: {len(refused)} of {len(items)} specs do not fit, {_describe_mesh(mesh)}"
        lines = [f"{' '.join(_describe(item))}: {fault.text}" for item, faults in refused for fault in faults]
    raise _error(head, lines, [fault for _, faults in refused for fault in faults])


def axes_of_dims(spec: str | P | Spec, rank: int, mesh: Mesh, call: str) -> list[tuple[Axis, ...]]:
    """Returns the mesh axes over which a spec shards each dim of a tensor with `rank` dims. Raises `ShardingError`."""
    outcome = find_dim_axes(_parse_for(call, "x", spec).dims, rank, mesh)
    if isinstance(outcome, tuple):
        raise _error(f"{call} cannot be laid out", [fault.text for fault in outcome], outcome)
    return outcome


def _error(head: str, lines: Sequence[str], faults: Sequence[Fault]) -> ShardingError:
    rules, remedies = (dict.fromkeys(texts) for texts in ((f.rule for f in faults), (f.remedy for f in faults)))
    return ShardingError(head, lines, rule="; ".join(rules), remedy="; ".join(remedies))


def _parse_for(call: str, name: str, spec: str | P | Spec) -> Spec:
    try:
        return Spec.convert(spec)
    except ShardingError as error:
        raise ShardingError(f"{call}({name}): {error.what}", rule=error.rule, remedy=error.remedy) from None


def _describe(item: Item) -> tuple[str, str]:
    name, shape, spec, sizes = item
    lists = {key: list(size) if isinstance(size, Sequence) else size for key, size in (sizes or {}).items()}
    keywords = "".join(f", {key}={size}" for key, size in lists.items())
    text = repr(spec) if isinstance(spec, P) else repr(str(spec))
    return name, f"with spec {text}{keywords} on shape {list(shape)}"


def _describe_mesh(mesh: Mesh | None) -> str:
    if mesh is None:
        return "outside any mesh"
    return f"mesh ({', '.join(f'{name}={size}' for name, size in mesh.axes.items())})"


def _hashable(sizes: Sizes) -> Iterator[tuple[str, int | tuple[int, ...]]]:
    for name, size in sizes.items():
        yield name, tuple(size) if isinstance(size, list | tuple) else size  # type: ignore[misc] # checked in `resolve_dims`


def _with_sizes(dim: SpecDim, sizes: Sizes) -> SpecDim:
    def resized(f: SpecFactor) -> SpecFactor:
        size = sizes.get(f.name or "_")
        if isinstance(size, Sequence):
            return replace(f, pieces=tuple(size))
        return f if size is None or len(dim.factors) == 1 else replace(f, size=size)

    return replace(dim, factors=tuple(map(resized, dim.factors)))
