"""Samples for `shardlib.rules.tensor_ops.diagonals`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, s


def diagonals() -> Iterator[Sample]:
    for name in ("diagonal", "diagonal_copy"):
        yield s(name, f(3, 4))
        yield s(name, f(3, 2, 3), 1, 0, -1)
        yield s(name, f(3, 2, 5), 2, 0, -1)
        yield s(name, f(6, 2, 4), -1, 0, 2)
        yield s(name, f(5, 5))
    yield s("diagonal", f(5, 5) > 0)
    yield s("diag_embed", f(5))
    yield s("diag_embed", f(2, 5), 1)
    yield s("diag_embed", f(4, 3), -2, 0, -2)
    yield s("diag_embed", f(4, 3), 0, 2, 0)
    yield s("diagonal_backward", f(5, 3), [5, 3, 4], 0, 1, 2)
    yield s("diagonal_backward", f(4, 2), [3, 4, 3], -1, 0, 2)
    yield s("diagonal_backward", f(4, 3), [4, 4, 3], -1, 1, 2)
    yield s("diagonal_scatter", f(3, 5, 4), f(5, 3), 0, 0, 2)
    yield s("diagonal_scatter", f(5, 5), f(5))
    yield s("diagonal_scatter", f(3, 4), f(3), 1)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (diagonals,)
