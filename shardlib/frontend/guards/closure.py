"""Reads the current values of the variables that a function and the code reached from it use."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import islice
from typing import Any

from shardlib.frontend.guards.code_refs import Reach, ReachCache
from shardlib.frontend.guards.object_state import State


class Closure:
    """Reads the variables of a function, and of all code that is reached from it and its arguments."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._own = (fn,) if isinstance(fn, types.FunctionType) else ()
        self._reached = ReachCache()
        self._first = self._reached.get(self._own, None)

    def read(self, state: State, facts: list[Any]) -> None:
        """Adds tensors to `state` and key facts to `facts`; `state` already holds the arguments' part."""
        state.is_read = True
        if not self._own:
            state.visit_variable("self", self.fn, facts)
        if not self._first.is_current():
            self._first = self._reached.get(self._own, None)
        _add(self._first, state, facts)
        read_reached_code(self._reached, self._first, state, facts)


def read_reached_code(reached: ReachCache, reach: Reach | None, state: State, facts: list[Any]) -> None:
    """Adds the variables of all code in `state`, and of code reached from these variables, after those of `reach`."""
    done = 0
    while done < len(state.code):
        reach = reached.get(islice(state.code.values(), done, None), reach)
        done = len(state.code)
        _add(reach, state, facts)


def _add(reach: Reach, state: State, facts: list[Any]) -> None:
    facts.append(reach)
    if reach.exact:
        state.exact = True
    if reach.rates:
        state.rates = True
    if reach.seeds:
        state.seeds = True
    state.type_spaces.update(reach.type_spaces)
    state.logs, state.read_names = reach.logs, reach.reads
    for name, get, holder, key in reach.variables:
        state.visit_variable(name, get(), facts, holder, key)
