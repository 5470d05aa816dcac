"""The dims of a table, of the indices into it, and of the entries read or written: rows, gather, advanced indexing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import Dim, Space, arg, broadcast_labels, broadcast_shapes, normalize_dim
from shardlib.rules.local_forms.helpers import check_index, sharded_factors
from shardlib.rules.rule import Call, LocalBuilder, Meta, Rule


def replicated(call: Call) -> Rule:
    """Returns the rule of an op whose dims must all stay whole."""
    space = Space()
    dims = [
        [] if m is None else space.dims(m.shape, whole=range(len(m.shape))) for m in (*call.operands, *call.results)
    ]
    n = len(call.operands)
    return space.rule(dims[:n], dims[n:], flops=sum(math.prod(m.shape) for m in call.operands))


@dataclass(frozen=True)
class IndexedDims:
    """The dims of a table that an op indexes, and the dims of its indices and entries.

    * `x`: the labels of the table; `dims`: its indexed dims; `indices`: the labels of their indices.
    * `out`: the labels of the entries that are read or written. Its last `inner` dims follow those of the indices.
    * `entries`: the factors of the indices.
    * `listed`: the op takes a list of indices, else a dim and an index; `wraps`: indices may count from the end.
    """

    space: Space
    shape: Sequence[int]
    x: list[Dim]
    dims: list[int]
    indices: list[list[Dim]]
    out: list[Dim]
    entries: tuple[str, ...]
    inner: int = 0
    listed: bool = False
    wraps: bool = False

    @staticmethod
    def advanced(call: Call) -> IndexedDims:
        """For `x[indices]`."""
        by_dim: list[Meta | None] = list(arg(call, "indices"))
        space, shape = Space(), call.operands[0].shape
        x = space.dims(shape)
        dims = [i for i, m in enumerate(by_dim) if m is not None]
        metas = [m for m in by_dim if m is not None]
        index = space.dims(broadcast_shapes(m.shape for m in metas), "j")
        adjacent = dims == list(range(dims[0], dims[-1] + 1))
        others = [i for i in range(len(shape)) if i not in dims]
        # Torch puts the dims of the index where the indexed dims were, or in front if these are not adjacent.
        front = [i for i in others if i < dims[0]] if adjacent else []
        out = [*(x[i] for i in front), *index, *(x[i] for i in others[len(front) :])]
        entries = tuple(f for d in index for f in d)
        indices = [broadcast_labels(index, m.shape) for m in metas]
        return IndexedDims(
            space, shape, x, dims, indices, out, entries, len(others) - len(front), listed=True, wraps=True
        )

    @staticmethod
    def along(call: Call, *, wraps: bool = False) -> IndexedDims:
        """For ops that take a dim and a one-dimensional index into it."""
        space, shape = Space(), call.operands[0].shape
        at = normalize_dim(arg(call, "dim"), len(shape))
        x, index = space.dims(shape), space.dims(call.operands[1].shape, "j")
        out = [*x[:at], *(index or [()]), *x[at + 1 :]] if shape else []
        return IndexedDims(
            space, shape, x, [at], [index], out, sum(index, ()), max(len(shape) - 1 - at, 0), wraps=wraps
        )

    @staticmethod
    def elementwise(call: Call) -> IndexedDims | None:
        """For ops that take a dim and an index of as many dims as the table; None if the index has other dims.

        The other dims share a factor where their sizes agree.
        """
        shape, index = call.operands[0].shape, call.operands[1].shape
        if len(shape) != len(index):
            return None
        space, at = Space(), normalize_dim(arg(call, "dim"), len(shape))
        x, out = [], []
        for i, (n, m) in enumerate(zip(shape, index, strict=True)):
            x.append(space.dim(n, "v") if i == at else space.dim(n, whole=n != m))
            out.append(x[-1] if i != at and n == m else space.dim(m, "j", whole=i != at))
        return IndexedDims(space, shape, x, [at], [out], out, out[at] if shape else ())

    @property
    def index_operands(self) -> tuple[int, ...]:
        """The positions of the indices among the op's operands."""
        return tuple(range(1, 1 + len(self.indices)))

    @property
    def argument_count(self) -> int:
        """The number of arguments that name the indices: a list, or a dim and an index."""
        return 1 if self.listed else 2

    @property
    def rows(self) -> tuple[str, ...]:
        """The factors of the table's indexed dims."""
        return tuple(f for d in self.dims if self.x for f in self.x[d])

    def sharded(self, local: LocalBuilder) -> dict[int, list[str]]:
        """Returns the sharded factors of each indexed dim."""
        return {d: sharded_factors(local, self.x[d] if self.x else ()) for d in self.dims}

    def normalize(self, indices: Any, sharded: Mapping[int, Sequence[str]]) -> list[Tensor]:
        """Returns the indices, with those into sharded dims checked and counted from the front."""
        tensors, out = [indices] if isinstance(indices, Tensor) else [i for i in indices if i is not None], []
        for index, (d, factors) in zip(tensors, sharded.items(), strict=True):
            n = (*self.shape, 1)[d]
            inside = check_index(index, n, -n if self.wraps else 0) if factors else index
            out.append(inside % n if factors and self.wraps else inside)
        return out

    def arguments(self, indices: Iterable[Tensor]) -> list[Any]:
        """Returns the op's arguments for these indices: a list with None for other dims, or a dim and an index."""
        queue = iter(indices)
        if not self.listed:
            return [*self.dims, *queue]
        return [[next(queue) if i in self.dims else None for i in range(self.dims[-1] + 1)]]


def has_mask(call: Call) -> bool:
    """Returns whether the number of entries depends on the data: an index is a mask, or there is no index."""
    indices = [m for m in arg(call, "indices") if m is not None]
    return not indices or any(m.dtype in (torch.bool, torch.uint8) for m in indices)
