"""Layouts that the compiler may not choose: the user annotated them, or the tensor already has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardlib.sharding.layout import Layout

if TYPE_CHECKING:
    from shardlib.sharding.spec import Spec

FactorNames = tuple[tuple[str | None, ...], ...]  # per dim, the logical name of every factor


@dataclass(frozen=True)
class FixedLayout:
    """A layout that an annotation or an existing tensor fixes.

    `names`, `open` and `exact` have one entry per dim of `layout`. The compiler may shard an `open` dim further. The
    shards of an `exact` dim are those of the layout; other dims, if sharded, are sharded as in the rest of the program.
    `spec` is the user's spec, if any, with the sizes of the call filled in. `source` says where the layout comes from.
    """

    layout: Layout
    names: FactorNames
    open: tuple[bool, ...]
    exact: tuple[bool, ...]
    spec: Spec | None = None
    source: str = ""

    @staticmethod
    def at(layout: Layout, names: FactorNames | None = None, source: str = "") -> FixedLayout:
        """Fixes a layout with all dims closed and exact."""
        rank = len(layout.dims)
        names = tuple((None,) * len(dim) for dim in layout.dims) if names is None else names
        return FixedLayout(layout, names, (False,) * rank, (True,) * rank, None, source)

    @property
    def required_spec(self) -> Spec:
        """The user's spec; there must be one."""
        assert self.spec is not None, f"{self.layout} has no spec"
        return self.spec

    def by(self, source: str) -> FixedLayout:
        """The same layout with another source."""
        return replace(self, source=source)

    def agrees_with(self, other: FixedLayout) -> bool:
        """Returns whether both fix the same layout; dims that are not exact agree if their axes do."""
        if self.layout.canonical == other.layout.canonical:
            return True
        if any(self.exact) and any(other.exact):
            return False
        return self.layout.chunked.canonical == other.layout.chunked.canonical
