"""Parses specs.

spec   = dim*                    as many as the tensor has, separated by spaces
dim    = "..."                   any number of whole dims, once
       | factor "?"?             "?": the compiler may shard the dim further
       | "(" factor+ ")" "?"?    one dim made of factors, major first
factor = name ("=" size)? ("@" axes)? ("=" pieces)?
name   = logical name | "_"      without "@", the mesh's rules give the axes; no rule, or "_": not sharded
axes   = axis | "(" axis* ")"    mesh axes, major first
axis   = mesh axis (":(" pre ")" size)?   the part of an axis behind more major parts of size pre: `tensor:(2)4`
pieces = "[" size* "]"           the shard size on every device along the axes, major first; otherwise even chunks
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

from shardlib.sharding.scanner import Scanner

_RULE = "a spec is dims separated by spaces: name, name@axis, name@(a b)=[5 3], _, (a b), ..., ? behind open dims"


@dataclass(frozen=True)
class SpecFactor:
    """One factor: `name` (None: `_`), mesh `axes` (None: from the mesh's rules), and `size` if the spec states it.

    An axis is its name, or a part of it as text (`tensor:(2)4`). `pieces` are chosen shard sizes, one for every device
    along the axes; None for even chunks.
    """

    name: str | None
    axes: tuple[str, ...] | None = None
    size: int | None = None
    pieces: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = self.name or "_"
        if self.size is not None:
            text += f"={self.size}"
        if self.axes is not None:
            text += f"@{self.axes[0]}" if len(self.axes) == 1 else f"@({' '.join(self.axes)})"
        return text if self.pieces is None else f"{text}=[{' '.join(map(str, self.pieces))}]"


@dataclass(frozen=True)
class SpecDim:
    """One dim: its factors, major first; the compiler may shard an `open` dim further."""

    factors: tuple[SpecFactor, ...]
    open: bool = False

    def __str__(self) -> str:
        text = " ".join(map(str, self.factors))
        return (text if len(self.factors) == 1 else f"({text})") + "?" * self.open


def parse_dims(text: str) -> tuple[SpecDim | EllipsisType, ...]:
    """Parses the dims of a spec; raises `ShardingError` that points at the character."""
    scan = Scanner(text, "spec", rule=_RULE)
    dims: list[SpecDim | EllipsisType] = []
    while scan.token:
        if not scan.spaced:
            scan.fail("dims are separated by spaces" if scan.is_name or scan.token in ("(", "...") else _stray(scan))
        if scan.token == "..." and ... in dims:
            scan.fail("'...' may stand once")
        dims.append(... if scan.take("...") else _dim(scan))
    return tuple(dims)


def _dim(scan: Scanner) -> SpecDim:
    if not scan.take("("):
        if not scan.is_name:
            scan.fail(_stray(scan))
        return SpecDim((_factor(scan),), scan.take("?"))
    factors = []
    while scan.is_name:
        factors.append(_factor(scan))
    if not factors and scan.token == ")":
        scan.fail("a dim needs a factor; write `_` for a dim of size 1")
    if scan.token == "?":
        scan.fail("'?' opens a whole dim, so it stands behind the ')'")
    scan.expect(")", _stray(scan) if scan.token else "the ')' of this dim is missing")
    return SpecDim(tuple(factors), scan.take("?"))


def _factor(scan: Scanner) -> SpecFactor:
    name = scan.name("a name")
    size, axes, pieces = None, None, None
    equals = scan.take("=")
    if equals and scan.token != "[":
        size, equals = scan.number("a size"), False
    if not equals and scan.take("@"):
        axes = _axes(scan)
    if equals or scan.take("="):
        pieces = scan.numbers("the shard sizes, [5 3 8 0]")
    return SpecFactor(None if name == "_" else name, axes, size, pieces)


def parse_axes(text: str) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Parses the text behind an `@`: axes, and chosen shard sizes or None.

    Example:
        >>> parse_axes("data"), parse_axes("(pod tensor:(1)2)=[5 3 8 0]")
        ((('data',), None), (('pod', 'tensor:(1)2'), (5, 3, 8, 0)))
    """
    scan = Scanner(text, "axes", rule="axes are axis, axis:(2)4 for a part, (a b) for several, =[5 3] for shard sizes")
    axes = _axes(scan)
    pieces = scan.numbers("the shard sizes, [5 3 8 0]") if scan.take("=") else None
    if scan.token:
        scan.fail(f"{scan.token!r} does not belong here")
    return axes, pieces


def _axes(scan: Scanner) -> tuple[str, ...]:
    if not scan.take("("):
        return (_axis(scan),)
    axes = []
    while scan.is_name:
        axes.append(_axis(scan))
    scan.expect(")", _stray(scan) if scan.token else "the ')' of these axes is missing")
    return tuple(axes)


def _axis(scan: Scanner) -> str:
    name, pre, size = scan.axis()
    return name if size is None else f"{name}:({pre}){size}"


def _stray(scan: Scanner) -> str:
    """Returns the fault of a token that does not belong here."""
    return {
        ",": "',' does not belong here; dims are separated by spaces",
        "(": "a factor cannot hold factors",
        "...": "'...' stands for whole dims",
    }.get(scan.token, f"{scan.token!r} does not belong here")
