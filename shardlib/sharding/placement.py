"""What is fixed about one tensor: a layout that somebody says, or that is there already, and who says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardlib.sharding.layout import Layout

if TYPE_CHECKING:
    from shardlib.sharding.spec import Spec

Names = tuple[tuple[str | None, ...], ...]  # per dim, the logical name of every factor


@dataclass(frozen=True)
class Fixed:
    """A layout that is not ours to choose.

    `names` are aligned with `layout.dims`; `open` says per dim whether the compiler may cut it further; `exact` whether
    its pieces are those of the layout (others, if cut, are cut where the rest of the program cuts that dim); `spec` is
    what was written, with the given sizes filled in, if anything was; `source` is who says so.
    """

    layout: Layout
    names: Names
    open: tuple[bool, ...]
    exact: tuple[bool, ...]
    spec: Spec | None = None
    source: str = ""

    @staticmethod
    def at(layout: Layout, names: Names | None = None, source: str = "") -> Fixed:
        """A layout as it is: closed, in just its pieces.

        Example:
            >>> Fixed.at(Layout.parse("8@data, 4", {"data": 2})).open
            (False, False)
        """
        rank = len(layout.dims)
        names = tuple((None,) * len(dim) for dim in layout.dims) if names is None else names
        return Fixed(layout, names, (False,) * rank, (True,) * rank, None, source)

    @property
    def said(self) -> Spec:
        """What was written."""
        assert self.spec is not None, f"{self.layout} was not written down"
        return self.spec

    def by(self, source: str) -> Fixed:
        """The same, said by somebody."""
        return replace(self, source=source)

    def agrees(self, other: Fixed) -> bool:
        """Whether the two say the same of one value."""
        if self.layout.canonical == other.layout.canonical:
            return True
        if any(self.exact) and any(other.exact):
            return False
        return self.layout.chunked.canonical == other.layout.chunked.canonical
