"""Functions of Python's `math` of numbers that a call gives: `math.sqrt(1 - beta**n)` is one program for all n.

They would ask for the value, which the program would then be for. A name that somebody imported, `from math import
sqrt`, is Python's own, and does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardlib.core.call_scalar import MATH, Scalar
from shardlib.core.private_names import Slot
from shardlib.frontend.guards.number_inputs import TracedNumber, is_traced_number


def _following(function: Callable[..., float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def follow(*args: Any) -> Any:
        given = [x for x in args if is_traced_number(x)]
        if not given or any(not is_traced_number(x) and type(x) not in (int, float, bool) for x in args):
            return function(*args)
        return TracedNumber.wrap(
            Scalar.apply(function, *(x.scalar if is_traced_number(x) else x for x in args)), given[0].numbers
        )

    return follow


_SLOTS = {Slot(name): _following(function) for function, name in MATH.items()}


@contextmanager
def followed() -> Iterator[None]:
    """While on, these functions give expressions of such numbers."""
    with ExitStack() as stack:
        for slot, follow in _SLOTS.items():
            stack.enter_context(slot.holding(follow))
        yield
