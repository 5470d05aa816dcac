"""What a function closes over, as it is now: the variables that its code reads, and the code of all that is found."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import islice
from typing import Any

from shardlib.frontend.guards.code_refs import Reach, Reached
from shardlib.frontend.guards.object_state import State


class Closure:
    """Reads what a function, and all code that it and its arguments lead to, closes over."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._own = (fn,) if isinstance(fn, types.FunctionType) else ()
        self._reached = Reached()
        self._first = self._reached.of(self._own, None)

    def read(self, state: State, known: list[Any]) -> None:
        """Add tensors to `state`, facts to `known`; what was read before, of the arguments, is in `state`."""
        state.is_read = True
        if not self._own:
            state.named("self", self.fn, known)
        if not self._first.is_current():
            self._first = self._reached.of(self._own, None)
        _add(self._first, state, known)
        follow(self._reached, self._first, state, known)


def follow(reached: Reached, reach: Reach | None, state: State, known: list[Any]) -> None:
    """Add what all code that was found closes over, and all that this leads to; `reach` is what was read of it."""
    done = 0
    while done < len(state.code):
        reach = reached.of(islice(state.code.values(), done, None), reach)
        done = len(state.code)
        _add(reach, state, known)


def _add(reach: Reach, state: State, known: list[Any]) -> None:
    known.append(reach)
    if reach.exact:
        state.exact = True
    if reach.rates:
        state.rates = True
    if reach.seeds:
        state.seeds = True
    state.type_spaces.update(reach.type_spaces)
    state.logs, state.read_names = reach.logs, reach.reads
    for name, get, holder, key in reach.variables:
        state.named(name, get(), known, holder, key)
