"""Stores tensors whose elements repeat: along a dim, or along the diagonals of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_LARGE = 1 << 23  # elements that are computed at once


class Lookup(NamedTuple):
    """A tensor whose element `[i, j, ...]` is `table[offsets[0][i] + offsets[1][j] + ...]`.

    A dim that repeats its elements has equal offsets. An `[S, T]` matrix that depends on `j - i` alone has the offsets
    `S - 1 - i` and `j`: a causal mask of 128k positions is a table of 256k elements.
    """

    table: Tensor
    offsets: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(map(len, self.offsets))

    def to_dense(self) -> Tensor | None:
        """Returns all elements; None if they are too many."""
        if is_large(self.shape):
            return None
        index = torch.zeros((), dtype=torch.int64, device="cpu")
        for offsets in self.offsets:
            index = index[..., None] + offsets
        return self.read(index)

    def read(self, index: Tensor) -> Tensor:
        return self.table.index_select(0, index.flatten()).view(index.shape)

    def reads_equal(self, index: Tensor, other: Tensor) -> bool:
        return are_equal(self.read(index), self.read(other))

    def fold(self) -> Tensor | None:
        """Returns the elements with size 1 for dims that repeat them; None if they are too many."""
        offsets = tuple(each[:1] if _repeats(each) else each for each in self.offsets)
        return self._replace(offsets=offsets).to_dense()

    def expand(self, shape: Sequence[int]) -> Lookup:
        """Broadcasts to `shape`."""
        lead = [torch.zeros(1, dtype=torch.int64, device="cpu")] * (len(shape) - len(self.offsets))
        offsets = zip([*lead, *self.offsets], shape, strict=True)
        return self._replace(offsets=tuple(each.expand(n) for each, n in offsets))

    @property
    def matrix(self) -> tuple[Tensor, Tensor]:
        """The offsets of the rows and of the columns of the first matrix."""
        *lead, rows, columns = self.offsets
        return rows + sum(int(each[0]) for each in lead), columns

    def read_border(self) -> Tensor:
        """Returns the elements of the first column of the first matrix, from the last one up, then those of its row."""
        rows, columns = self.matrix
        return self.read(torch.cat([rows.flip(0) + columns[0], rows[0] + columns[1:]]))

    def find_line(self) -> Tensor | None:
        """Returns the elements by `j - i`, from `1 - S` to `T - 1`, if they depend on nothing else."""
        if len(self.offsets) < 2 or min(self.shape[-2:]) < 2 or not all(map(_repeats, self.offsets[:-2])):
            return None
        rows, columns = self.matrix
        # Elements [i, j] and [i + 1, j + 1] have one place in the table if the steps down and right cancel.
        down, right = rows.diff(), columns.diff()
        step = down.mode().values
        i, j = (down != step).nonzero()[:, 0], (right != -step).nonzero()[:, 0]
        if is_large([len(i), len(columns)]) or is_large([len(j), len(rows)]):
            return None
        for at, to in ((i[:1], j[:1]), (i, j)):  # most matrices that are no such one differ in the first elements
            below = self.reads_equal(rows[at, None] + columns[:-1], rows[at + 1, None] + columns[1:])
            if not below or not self.reads_equal(rows[:-1, None] + columns[to], rows[1:, None] + columns[to + 1]):
                return None
        return self.read_border()


def spread(folded: Tensor, shape: Sequence[int]) -> Lookup:
    """Returns a tensor of `shape` from its elements with size 1 for dims that repeat them."""
    folded = folded.contiguous()
    offsets = (count_up(n) * stride for n, stride in zip(folded.shape, folded.stride(), strict=True))
    return Lookup(folded.flatten(), tuple(offsets)).expand(shape)


def spread_line(line: Tensor, shape: Sequence[int]) -> Lookup:
    """Returns a tensor of matrices from their elements by `j - i`."""
    if are_equal(line, line[:1].expand_as(line)):
        return spread(line[:1], shape)
    s, t = shape[-2:]
    return Lookup(line, (s - 1 - count_up(s), count_up(t))).expand(shape)


def compact(values: Lookup) -> Lookup:
    """Returns the same elements in a smaller table, if some repeat."""
    line = values.find_line()
    if line is None and (folded := values.fold()) is not None:
        for dim, n in enumerate(folded.shape):
            if n > 1 and are_equal(folded, (first := folded.narrow(dim, 0, 1)).expand_as(folded)):
                folded = first
        values = spread(folded, values.shape)
        line = values.find_line()
    return values if line is None else spread_line(line, values.shape)


def count_up(n: int) -> Tensor:
    return torch.arange(n, device="cpu")


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same bits: 0.0 is not -0.0."""
    return torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))


def is_large(shape: Sequence[int]) -> bool:
    """Returns whether a shape has too many elements to compute."""
    return prod(shape) > _LARGE


def _repeats(offsets: Tensor) -> bool:
    return bool((offsets == offsets[:1]).all())
