"""Stores known values compactly: one number for equal ones along a dim, or one for each distance of two positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGE = 1 << 23  # elements that are computed at once


class Values(NamedTuple):
    """The values of a node of shape `[..., S, T]`; a dim along which they are equal has size 1.

    If `by_distance`, one dim of the list_distances `t - s`, from `1 - S` to `T - 1`, stands for the last two.
    """

    numbers: Tensor
    by_distance: bool = False

    def spread(self, shape: torch.Size) -> Tensor:
        """Returns all elements."""
        numbers = self.numbers
        if self.by_distance:
            numbers = numbers[..., list_positions(shape[-1]) - list_positions(shape[-2])[:, None] + shape[-2] - 1]
        return numbers.expand(shape).contiguous()


def list_positions(n: int) -> Tensor:
    return torch.arange(n, device="cpu")


def list_distances(shape: torch.Size) -> Tensor:
    return torch.arange(1 - shape[-2], shape[-1], device="cpu")


def make_line(line: Tensor, rank: int) -> Values:
    return Values(line.reshape([1] * (rank - 2) + [-1]), by_distance=True)


def compact(values: Values) -> Values:
    """Keeps one element of equal ones along a dim, and one for each distance if diagonals are constant."""
    numbers = values.numbers
    for dim, n in enumerate(numbers.shape):
        first = numbers.narrow(dim, 0, 1)
        if n > 1 and are_equal(numbers, first.expand_as(numbers)):
            numbers = first
    if values.by_distance:
        return Values(numbers[..., None]) if numbers.shape[-1] == 1 else Values(numbers, by_distance=True)
    if numbers.dim() > 1 and min(numbers.shape[-2:]) > 1 and are_equal(numbers[..., 1:, 1:], numbers[..., :-1, :-1]):
        return compact(Values(torch.cat([numbers[..., :, 0].flip(-1), numbers[..., 0, 1:]], -1), by_distance=True))
    return Values(numbers)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same bits: 0.0 is not -0.0."""
    return torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))


def is_large(shape: torch.Size) -> bool:
    """Returns whether a shape has too many elements to compute."""
    return shape.numel() > _LARGE
