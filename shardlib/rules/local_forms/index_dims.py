"""How the dims of an index stand among those of a table and of a result: rows, gather, scatter, advanced indexing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import Dim, Space, arg, axis, broadcast, join, numel
from shardlib.rules.local_forms.helpers import checked, cut
from shardlib.rules.rule import Call, Local, Meta, Rule


def whole(call: Call) -> Rule:
    """The rule of an op of which nothing may be cut."""
    space = Space()
    dims = [
        [] if m is None else space.dims(m.shape, whole=range(len(m.shape))) for m in (*call.operands, *call.results)
    ]
    n = len(call.operands)
    return space.rule(dims[:n], dims[n:], flops=sum(numel(m.shape) for m in call.operands))


@dataclass(frozen=True)
class Places:
    """Which dims of a table an op's indices name, and how the dims of indices stand among those of what lies there.

    * `out`: the labels of what is read or written; of its dims, `behind` stand behind those of the indices.
    * `entries`: the factors that count what goes to one place, or comes from it.
    * `listed`: the op takes a list of indices, else a dim and an index; `wraps`: they may count from the end.
    """

    space: Space
    shape: Sequence[int]
    x: list[Dim]
    dims: list[int]
    indices: list[list[Dim]]
    out: list[Dim]
    entries: tuple[str, ...]
    behind: int = 0
    listed: bool = False
    wraps: bool = False

    @staticmethod
    def advanced(call: Call) -> Places:
        """Of `x[indices]`."""
        given: list[Meta | None] = list(arg(call, "indices"))
        space, shape = Space(), call.operands[0].shape
        x = space.dims(shape)
        dims = [i for i, m in enumerate(given) if m is not None]
        metas = [m for m in given if m is not None]
        index = space.dims(join(m.shape for m in metas), "j")
        adjacent = dims == list(range(dims[0], dims[-1] + 1))
        kept = [i for i in range(len(shape)) if i not in dims]
        # Torch puts the dims of the index where the indexed dims were, or in front when these do not stand together.
        front = [i for i in kept if i < dims[0]] if adjacent else []
        out = [*(x[i] for i in front), *index, *(x[i] for i in kept[len(front) :])]
        entries = tuple(f for d in index for f in d)
        indices = [broadcast(index, m.shape) for m in metas]
        return Places(space, shape, x, dims, indices, out, entries, len(kept) - len(front), listed=True, wraps=True)

    @staticmethod
    def along(call: Call, *, wraps: bool = False) -> Places:
        """Of ops that take a dim, and an index that names rows of it."""
        space, shape = Space(), call.operands[0].shape
        at = axis(arg(call, "dim"), len(shape))
        x, index = space.dims(shape), space.dims(call.operands[1].shape, "j")
        out = [*x[:at], *(index or [()]), *x[at + 1 :]] if shape else []
        return Places(space, shape, x, [at], [index], out, sum(index, ()), max(len(shape) - 1 - at, 0), wraps=wraps)

    @staticmethod
    def beside(call: Call) -> Places | None:
        """Of ops that take a dim, and an index of as many dims as the table; others are shared where sizes agree.

        An index may also have no elements, or be a number.
        """
        shape, index = call.operands[0].shape, call.operands[1].shape
        if len(shape) != len(index):
            return None
        space, at = Space(), axis(arg(call, "dim"), len(shape))
        x, out = [], []
        for i, (n, m) in enumerate(zip(shape, index, strict=True)):
            x.append(space.dim(n, "v") if i == at else space.dim(n, whole=n != m))
            out.append(x[-1] if i != at and n == m else space.dim(m, "j", whole=i != at))
        return Places(space, shape, x, [at], [out], out, out[at] if shape else ())

    @property
    def given_as(self) -> tuple[int, ...]:
        """Which operands of the op the indices are."""
        return tuple(range(1, 1 + len(self.indices)))

    @property
    def until(self) -> int:
        """How many arguments stand behind the table up to the indices: these, and the dim where they are no list."""
        return 1 if self.listed else 2

    @property
    def rows(self) -> tuple[str, ...]:
        """The factors of the table that indices count."""
        return tuple(f for d in self.dims if self.x for f in self.x[d])

    def cuts(self, local: Local) -> dict[int, list[str]]:
        """What cuts each indexed dim here."""
        return {d: cut(local, self.x[d] if self.x else ()) for d in self.dims}

    def ready(self, given: Any, cuts: Mapping[int, Sequence[str]]) -> list[Tensor]:
        """The indices, which are checked where the dim is cut, and counted from the front."""
        given, out = [given] if isinstance(given, Tensor) else [i for i in given if i is not None], []
        for index, (d, factors) in zip(given, cuts.items(), strict=True):
            n = (*self.shape, 1)[d]
            inside = checked(index, n, -n if self.wraps else 0) if factors else index
            out.append(inside % n if factors and self.wraps else inside)
        return out

    def arguments(self, indices: Iterable[Tensor]) -> list[Any]:
        """As the op takes them: with None for every dim that is not indexed, or behind the dim."""
        queue = iter(indices)
        if not self.listed:
            return [*self.dims, *queue]
        return [[next(queue) if i in self.dims else None for i in range(self.dims[-1] + 1)]]


def masks(call: Call) -> bool:
    """Whether some index is a mask: what it selects depends on the data."""
    given = [m for m in arg(call, "indices") if m is not None]
    return not given or any(m.dtype in (torch.bool, torch.uint8) for m in given)
