"""Reads the current values of the variables that a function and the code reached from it use."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import islice
from typing import Any

from shardlib.frontend.guards.code_refs import CodeReads, CodeReadsCache
from shardlib.frontend.guards.state_walk import StateWalk


class Closure:
    """Reads the variables of a function, and of all code that is reached from it and its arguments."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._own = (fn,) if isinstance(fn, types.FunctionType) else ()
        self._cache = CodeReadsCache()
        self._first = self._cache.get(self._own, None)

    def read(self, state: StateWalk, facts: list[Any]) -> None:
        """Adds tensors to `state` and key facts to `facts`; `state` already holds the arguments' part."""
        state.is_read = True
        if not self._own:
            state.visit_variable("self", self.fn, facts)
        if not self._first.is_current():
            self._first = self._cache.get(self._own, None)
        _add(self._first, state, facts)
        read_reached_code(self._cache, self._first, state, facts)


def read_reached_code(cache: CodeReadsCache, reads: CodeReads | None, state: StateWalk, facts: list[Any]) -> None:
    """Adds the variables of all code in `state`, and of code reached from these variables, after those of `reads`."""
    done = 0
    while done < len(state.definitions):
        reads = cache.get(islice(state.definitions.values(), done, None), reads)
        done = len(state.definitions)
        _add(reads, state, facts)


def _add(reads: CodeReads, state: StateWalk, facts: list[Any]) -> None:
    facts.append(reads)
    state.add_reads(reads)
    for name, get, container, key in reads.variables:
        state.visit_variable(name, get(), facts, container, key)
