"""Samples for `shardlib.rules.tensor_ops.slice_shift`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f


def slices_of_cut_dims() -> Iterator[Sample]:
    """Shifted by one, in blocks, with steps; shorter than a piece; back into their places."""
    ranges = (9, 1, 9, 1), (9, 0, 8, 1), (12, 2, 10, 1), (8, 6, 8, 1), (11, 2, 10, 3), (6, 0, 6, 2)
    for size, start, stop, step in ranges:
        x = f(2, size)
        part = x[:, start:stop:step]
        yield "slice.Tensor", (x, 1, start, stop, step), {}
        yield "slice_backward", (torch.randn_like(part), [2, size], 1, start, stop, step), {}
        yield "slice_scatter", (x, torch.randn_like(part), 1, start, stop, step), {}


def one_of_a_cut_dim() -> Iterator[Sample]:
    """One block: a sum of what devices have of it."""
    for index in (0, 3, -1):
        yield "select.int", (f(3, 5), 1, index), {}
        yield "select_backward", (f(3), [3, 5], 1, index), {}
        yield "select_scatter", (f(3, 5), f(3), 1, index), {}
    yield "select.int", (f(3, 5) > 0, 1, 2), {}
    yield "select.int", (torch.arange(5), 0, 2), {}
    for start in (2, 4):
        yield "slice.Tensor", (f(6, 2), 0, start, start + 2), {}
        yield "slice_backward", (f(2, 2), [6, 2], 0, start, start + 2, 1), {}
        yield "slice_scatter", (f(6, 2), f(2, 2), 0, start, start + 2), {}


def cats_of_cut_dims() -> Iterator[Sample]:
    yield "cat", ([f(2, 5), f(2, 3), f(2, 1)], 1), {}
    yield "cat", ([f(4, 2), f(8, 2), f(0), f(6, 2)],), {}
    yield "cat", ([f(2, 0), f(2, 3), f(2, 4)], 1), {}
    yield "cat", ([f(2, 0), f(2, 0)], 1), {}


def splices_of_cut_dims() -> Iterator[Sample]:
    """Shifts, fused weights, a filling that is not zero, more than one range of one tensor, nothing of another."""
    yield "shardlib::splice", ([f(7, 2)], 0, [-1, 0], [0, 0], [1, 6], [0, 0]), {}
    yield "shardlib::splice", ([f(2, 7)], 1, [0, 0, -1], [5, 0, 0], [7, 5, 2], [0, 0, 1.5]), {}
    yield "shardlib::splice", ([f(4, 2), f(8, 2)], 0, [1, 0, -1, 1], [4, 2, 0, 0], [8, 4, 2, 4], [0, 0, 0, 0]), {}
    yield "shardlib::splice", ([f(5), f(3)], 0, [0, 1, 0], [4, 0, 0], [5, 3, 5], [0, 0, 0]), {}
    yield "shardlib::splice", ([f(6, 2)], 0, [0], [1], [6], [0]), {}
    halves = ([0, 0, -1], [3, 0, 0], [6, 3, 1], [0, 0, 0.0], [True, False, True])
    yield "shardlib::splice", ([f(6, 2)], 0, *halves), {}
    mirrored = ([0, 0, 0], [1, 0, 4], [4, 7, 6], [0, 0, 0], [], [True, False, True])
    yield "shardlib::splice", ([f(7, 2)], 0, *mirrored), {}
    yield "shardlib::splice", ([f(4, 6)], 1, [0, -1], [2, 0], [6, 2], [0, 0], [True, False], [True, False]), {}


def windows_of_cut_dims() -> Iterator[Sample]:
    """That overlap, that leave gaps, that touch but for the end, one alone."""
    for size, kernel, step in ((9, 4, 1), (9, 2, 3), (10, 3, 2), (5, 2, 2), (4, 4, 1)):
        x = f(2, size)
        yield "unfold", (x, 1, kernel, step), {}
        yield "unfold_backward", (torch.randn_like(x.unfold(1, kernel, step)), [2, size], 1, kernel, step), {}


def flips() -> Iterator[Sample]:
    yield "flip", (f(5, 6), [0]), {}
    yield "flip", (f(5, 6), [-1, 0]), {}


def pads_of_cut_dims() -> Iterator[Sample]:
    yield "constant_pad_nd", (f(2, 6), [1, 2]), {}
    yield "constant_pad_nd", (f(2, 9), [-2, -1]), {}
    yield "constant_pad_nd", (f(2, 2), [4, 2, 0, 4]), {}
    yield "constant_pad_nd", (f(2, 0), [0, 5], 1.5), {}
    yield "constant_pad_nd", (f(6, 4), [2, 4, 3, -1], 1.5), {}


def rolls() -> Iterator[Sample]:
    yield "roll", (f(2, 7), [3], [1]), {}
    yield "roll", (f(5, 6), [-1, 8], [0, 1]), {}
    yield "roll", (f(5, 4), [1, 1], [0, 0]), {}
    yield "roll", (f(6, 4), [0, 1], [0, 1]), {}
    yield "roll", (f(6, 4), [6], [0]), {}
    yield "roll", (f(6, 4), [2, 4], [0, 0]), {}
    yield "roll", (f(3, 0), [1, 2], [0, 1]), {}


def rows_sent() -> Iterator[Sample]:
    """Round, to one end, crosswise and to oneself, nowhere."""
    for sources, rows in (([0, 1, 2], [1, 2, 0]), ([0, 1], [1, 2]), ([0, 1, 2], [2, 1, 0]), ([], [])):
        yield "shardlib::send_rows", (f(3, 5), sources, rows), {}
    yield "shardlib::send_rows", (f(2), [0, 1], [1, 0]), {}
    yield "shardlib::send_rows", (f(2, 5), [1], [0]), {}  # columns may be uneven beside
    yield "shardlib::send_rows", (f(1, 3), [0], [0]), {}


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (
    slices_of_cut_dims,
    one_of_a_cut_dim,
    cats_of_cut_dims,
    pads_of_cut_dims,
    rolls,
    splices_of_cut_dims,
    windows_of_cut_dims,
    flips,
    rows_sent,
)
