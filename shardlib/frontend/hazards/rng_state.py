"""Refuses draws from Python's and numpy's generators in a traced function: every call would get the same numbers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardlib.core.errors import NoProgramError


class _Generator(NamedTuple):
    """A generator: its name, its state before the trace, and how to read and set the state."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    before: Any

    @staticmethod
    def read(name: str, x: Any) -> _Generator:
        """Reads a generator or module of Python's, or a generator of numpy's, of the new kind or the old."""
        if hasattr(x, "getstate"):
            get, put = x.getstate, x.setstate
        elif hasattr(x, "get_state"):
            get, put = lambda: x.get_state(legacy=False), x.set_state
        else:
            get, put = lambda: x.bit_generator.state, lambda state: setattr(x.bit_generator, "state", state)
        return _Generator(name, get, put, get())

    @property
    def is_moved(self) -> bool:
        return pickle.dumps(self.get()) != pickle.dumps(self.before)


class RandomStates:
    """The states of the global generators, and of those that a function holds.

    After an error in the trace they are restored, so that the next trace or run draws the same numbers.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        numpy = sys.modules.get("numpy.random")
        kinds = (random.Random,) if numpy is None else (random.Random, numpy.Generator, numpy.RandomState)
        mine = [x for x in held if isinstance(x, kinds) and not isinstance(x, random.SystemRandom)]  # has no state
        everyones = [("Python's random", random), *([] if numpy is None else [("numpy.random", numpy)])]
        self.generators = [_Generator.read(*x) for x in (*everyones, *((f"a {type(x).__name__}", x) for x in mine))]

    def __enter__(self) -> None:
        """Does nothing: the states were read before."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.put_back()

    def put_back(self) -> list[_Generator]:
        """Restores the states; returns the generators whose state had changed."""
        moved = [x for x in self.generators if x.is_moved]
        for x in moved:
            x.set(x.before)
        return moved

    def refuse_draws(self, name: str) -> None:
        """Raises an error if numbers were drawn, after it restored the states."""
        if moved := self.put_back():
            drawn = list(dict.fromkeys(x.name for x in moved))
            raise NoProgramError(
                f"{name} draws random numbers from {' and '.join(drawn)}",
                ["each call draws others"],
                rule="Python runs once, while a function is traced: every call would use the same numbers",
                remedy="torch.rand(()), which draws anew in each call; or draw outside, and pass the number",
            )
