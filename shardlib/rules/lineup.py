"""How the dims of an index stand among the dims of a table and of a result: gather, scatter and advanced indexing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.rule import Call, Local, Meta, Rule
from shardlib.rules.shards import checked, cut
from shardlib.rules.space import Dim, Space, arg, broadcast, join, numel

aten = torch.ops.aten


def alongside(space: Space, shape: Sequence[int], index: Sequence[int], at: int) -> tuple[list[Dim], list[Dim]]:
    """Labels of a table and of the index into its dim `at`; other dims are shared where their sizes agree."""
    x: list[Dim] = []
    ind: list[Dim] = []
    for i, (n, m) in enumerate(zip(shape, index, strict=False)):
        if i == at:
            x.append(space.dim(n, "v"))
            ind.append(space.dim(m, "j"))
        else:
            same = n == m
            x.append(space.dim(n, whole=not same))
            ind.append(x[-1] if same else space.dim(m, "j", whole=True))
    return x, ind


def whole(call: Call) -> Rule:
    """The rule of an op of which nothing may be cut."""
    space = Space()
    dims = [
        [] if m is None else space.dims(m.shape, whole=range(len(m.shape))) for m in (*call.operands, *call.results)
    ]
    n = len(call.operands)
    return space.rule(dims[:n], dims[n:], flops=sum(numel(m.shape) for m in call.operands))


class Advanced:
    """How `x[indices]` lines up: the indexed dims, and where the dims of the index stand among the result's."""

    def __init__(self, space: Space, call: Call) -> None:
        given: list[Meta | None] = list(arg(call, 1, "indices"))
        self.shape = shape = call.operands[0].shape
        self.x = space.dims(shape)
        self.dims = [i for i, m in enumerate(given) if m is not None]
        metas = [m for m in given if m is not None]
        size = join(m.shape for m in metas)
        self.rank = len(size)
        index = space.dims(size, "j")
        self.indices = [broadcast(index, m.shape) for m in metas]
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        kept = [i for i in range(len(shape)) if i not in self.dims]
        # Torch puts the dims of the index where the indexed dims were, or in front when these do not stand together.
        front = [i for i in kept if i < self.dims[0]] if adjacent else []
        self.behind = len(kept) - len(front)
        self.out = [*(self.x[i] for i in front), *index, *(self.x[i] for i in kept[len(front) :])]
        self.indexed = [self.x[i] for i in self.dims]
        self.index_factors = [f for d in index for f in d]
        self.table_factors = [f for d in self.indexed for f in d]

    def cuts(self, local: Local) -> list[list[str]]:
        """What cuts each indexed dim here."""
        return [cut(local, dim) for dim in self.indexed]

    def positive(self, indices: Iterable[Tensor], cuts: Iterable[Sequence[str]]) -> list[Tensor]:
        """The index tensors, counted from the front where the dim is cut."""
        sizes = (self.shape[d] for d in self.dims)
        return [
            checked(index, n, -n) % n if factors else index
            for index, n, factors in zip(indices, sizes, cuts, strict=True)
        ]

    def listed(self, indices: Iterable[Any]) -> list[Any]:
        """The indices with None for every dim that is not indexed."""
        queue = iter(indices)
        return [next(queue) if i in self.dims else None for i in range(self.dims[-1] + 1)]


def masks(call: Call) -> bool:
    """Whether some index is a mask: what it selects depends on the data."""
    given = [m for m in arg(call, 1, "indices") if m is not None]
    return not given or any(m.dtype in (torch.bool, torch.uint8) for m in given)
