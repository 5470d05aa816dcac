"""Samples for `shardlib.rules.nn_ops.recurrence`: every cell, with and without what it may leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from shardlib.ops.recurrence.op import GATES
from tests.helpers.prover import Sample
from tests.rules.samples.make import f, s

_STEPS, _ROWS, _UNITS = 3, 5, 2


def recurrences() -> Iterator[Sample]:
    """Both directions, rows of different lengths, and a projection to one unit."""
    lengths = torch.tensor([3, 1, 2, 3, 2])
    cases = [(cell, None, reverse) for cell in GATES for reverse in (False, True)] + [("lstm", 1, False)]
    for cell, projected, reverse in cases:
        gates, states = GATES[cell] * _UNITS, projected or _UNITS
        projection = None if projected is None else f(projected, _UNITS)
        first = f(_ROWS, states), f(_ROWS, _UNITS) if cell == "lstm" else None, lengths if reverse else None
        weight, bias = f(gates, states), f(gates) if reverse else None
        args = f(_STEPS, _ROWS, gates), weight, bias, projection, *first, cell, reverse
        yield s("shardlib::recurrence", *args)
        hs, cs, activations = torch.ops.shardlib.recurrence(*args)
        for grad_cs in (None,) if cs is None else (None, f(*cs.shape)):
            read = (weight, projection, *first, hs, cs, activations, cell, reverse)
            yield s("shardlib::recurrence_backward", f(*hs.shape), grad_cs, *read)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (recurrences,)
