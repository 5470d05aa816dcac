"""Finds the values that depend on others."""

from __future__ import annotations

from collections.abc import Iterable

from shardlib.compiler.program.steps import Var


def find_dependents(steps: Iterable[tuple[Iterable[Var], Iterable[Var]]], sources: Iterable[Var]) -> set[Var]:
    """Returns the values that steps compute from any of `sources`, and `sources`.

    Each step, in the order of the program, is a pair: the values that it reads, and those that it makes.
    """
    result = {*sources}
    for reads, makes in steps:
        if not result.isdisjoint(reads):
            result.update(makes)
    return result
