"""The grammar of specs, and the values that it reads.

spec   = dim*                    as many as the tensor has, separated by spaces
dim    = "..."                   any number of whole dims, once
       | factor "?"?             "?" leaves the dim open for the compiler; otherwise it is closed
       | "(" factor+ ")" "?"?    one dim made of factors, major first
factor = name ("=" size)? ("@" axes)?
name   = logical name | "_"      without "@", the mesh's rules give the axes; no rule, or "_": whole
axes   = axis | "(" axis* ")"    mesh axes, major first
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

from shardlib.scan import Scanner

_RULE = "a spec is dims separated by spaces: name, name@axis, name@(a b), _, (a b), ..., and ? behind an open dim"


@dataclass(frozen=True)
class SpecFactor:
    """One factor: `name` (None: `_`), mesh `axes` (None: through the mesh's rules), `size` where the spec says it."""

    name: str | None
    axes: tuple[str, ...] | None = None
    size: int | None = None

    def __str__(self) -> str:
        text = self.name or "_"
        if self.size is not None:
            text += f"={self.size}"
        if self.axes is None:
            return text
        return f"{text}@{self.axes[0]}" if len(self.axes) == 1 else f"{text}@({' '.join(self.axes)})"


@dataclass(frozen=True)
class SpecDim:
    """One dim: its factors, major first, and whether the compiler may cut it further."""

    factors: tuple[SpecFactor, ...]
    open: bool = False

    def __str__(self) -> str:
        text = " ".join(map(str, self.factors))
        return (text if len(self.factors) == 1 else f"({text})") + "?" * self.open


def read(text: str) -> tuple[SpecDim | EllipsisType, ...]:
    """The dims of a spec; raises `ShardingError` that points at the character."""
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
    size = scan.number("a size") if scan.take("=") else None
    axes: tuple[str, ...] | None = None
    if scan.take("@"):
        axes = _axes(scan) if scan.take("(") else (scan.name("a mesh axis"),)
    return SpecFactor(None if name == "_" else name, axes, size)


def _axes(scan: Scanner) -> tuple[str, ...]:
    axes = []
    while scan.is_name:
        axes.append(scan.name("a mesh axis"))
    scan.expect(")", _stray(scan) if scan.token else "the ')' of these axes is missing")
    return tuple(axes)


def _stray(scan: Scanner) -> str:
    return {
        ",": "',' does not belong here; dims are separated by spaces",
        "(": "a factor cannot hold factors",
        "...": "'...' stands for whole dims",
    }.get(scan.token, f"{scan.token!r} does not belong here")
