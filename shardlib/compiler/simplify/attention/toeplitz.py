"""Values that are the same along a dim are there once, and those that go by the distance of two places by distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGE = 1 << 23  # elements that are worked out at once


class Values(NamedTuple):
    """The values of a node of shape `[..., S, T]`; along a dim where they are the same there is one.

    By distance: the last two dims are one, of the distances `t - s` from `1 - S` to `T - 1`.
    """

    numbers: Tensor
    by_distance: bool = False

    def spread(self, shape: torch.Size) -> Tensor:
        """All of them."""
        numbers = self.numbers
        if self.by_distance:
            numbers = numbers[..., places(shape[-1]) - places(shape[-2])[:, None] + shape[-2] - 1]
        return numbers.expand(shape).contiguous()


def places(n: int) -> Tensor:
    return torch.arange(n, device="cpu")


def distances(shape: torch.Size) -> Tensor:
    return torch.arange(1 - shape[-2], shape[-1], device="cpu")


def line_of(line: Tensor, rank: int) -> Values:
    return Values(line.reshape([1] * (rank - 2) + [-1]), by_distance=True)


def short(made: Values) -> Values:
    """One in place of many that are the same along a dim; a square that goes by distance, by distance."""
    numbers = made.numbers
    for dim, n in enumerate(numbers.shape):
        first = numbers.narrow(dim, 0, 1)
        if n > 1 and are_equal(numbers, first.expand_as(numbers)):
            numbers = first
    if made.by_distance:
        return Values(numbers[..., None]) if numbers.shape[-1] == 1 else Values(numbers, by_distance=True)
    if numbers.dim() > 1 and min(numbers.shape[-2:]) > 1 and are_equal(numbers[..., 1:, 1:], numbers[..., :-1, :-1]):
        return short(Values(torch.cat([numbers[..., :, 0].flip(-1), numbers[..., 0, 1:]], -1), by_distance=True))
    return Values(numbers)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two are the same to the bit: 0.0 is not -0.0."""
    return torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))


def is_large(shape: torch.Size) -> bool:
    """Returns whether there are too many to be worked out."""
    return shape.numel() > _LARGE
