"""Numbers drawn from Python's and numpy's generators while a function is traced: every call would use the same ones."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardlib.core.errors import NoProgramError


class _Generator(NamedTuple):
    """A generator: what it is called, its state, and how it gets back there."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    before: Any

    @staticmethod
    def of(name: str, x: Any) -> _Generator:
        """One of Python's, or a module of its functions; or one of numpy's, of the new kind or the old."""
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


class Chance:
    """Knows where generators stand: the global ones, and those that a function holds. Where an error ends the trace,
    who is traced anew, or runs as it is, draws the same."""

    def __init__(self, held: Iterable[Any]) -> None:
        numpy = sys.modules.get("numpy.random")
        kinds = (random.Random,) if numpy is None else (random.Random, numpy.Generator, numpy.RandomState)
        mine = [x for x in held if isinstance(x, kinds) and not isinstance(x, random.SystemRandom)]  # has no state
        known = [("Python's random", random), *([] if numpy is None else [("numpy.random", numpy)])]
        self.generators = [_Generator.of(*x) for x in (*known, *((f"a {type(x).__name__}", x) for x in mine))]

    def __enter__(self) -> None:
        """The trace begins."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.put_back()

    def put_back(self) -> list[_Generator]:
        """Have the next numbers be the same again; returns the generators that have moved."""
        moved = [x for x in self.generators if x.is_moved]
        for x in moved:
            x.set(x.before)
        return moved

    def refuse_draws(self, name: str) -> None:
        """Raise the error if numbers were drawn since; the next ones are the same again."""
        if moved := self.put_back():
            drawn = list(dict.fromkeys(x.name for x in moved))
            raise NoProgramError(
                f"{name} draws random numbers from {' and '.join(drawn)}",
                ["each call draws others"],
                rule="Python runs once, while a function is traced: every call would use the same numbers",
                remedy="torch.rand(()), which draws anew in each call; or draw outside, and pass the number",
            )
