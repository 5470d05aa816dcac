"""Samples for `shardlib.rules.ordering`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.prover import Sample

SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = ()
