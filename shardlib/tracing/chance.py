"""Numbers drawn from Python's and numpy's generators while a function is traced: every call would use the same ones."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

from shardlib.errors import ShardingError


class Chance:
    """Knows where generators stand: the global ones, and those that a function holds."""

    def __init__(self, held: Iterable[Any]) -> None:
        numpy = sys.modules.get("numpy.random")
        kinds = (random.Random,) if numpy is None else (random.Random, numpy.Generator, numpy.RandomState)
        self.held = [x for x in held if isinstance(x, kinds) and not isinstance(x, random.SystemRandom)]  # has no state
        self.before = self._states()

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"Python's random": random.getstate()}
        if (numpy := sys.modules.get("numpy.random")) is not None:
            _, key, *rest = numpy.get_state()
            states["numpy.random"] = (key.tobytes(), rest)
        for i, x in enumerate(self.held):
            states[f"a {type(x).__name__}" + " " * i] = x.getstate() if isinstance(x, random.Random) else _state(x)
        return states

    def refuse_draws(self, name: str) -> None:
        """Raise the error if numbers were drawn since."""
        now = self._states()
        drawn = [of.strip() for of, state in self.before.items() if now.get(of) != state]
        if drawn:
            raise ShardingError(
                f"{name} draws random numbers from {' and '.join(drawn)}",
                rule="Python runs once, while a function is traced: every call would use the same numbers",
                remedy="torch.rand(()), which draws anew in each call; or draw outside, and pass the number",
            )


def _state(x: Any) -> bytes:
    """Where one of numpy's generators stands, of the new kind or the old."""
    return pickle.dumps(x.get_state(legacy=False) if hasattr(type(x), "get_state") else x.bit_generator.state)
