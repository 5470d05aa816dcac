"""Traces functions of Python's `math`: `math.sqrt(1 - beta**n)` gives one program for all n.

Python's own functions would read the value, and the program would serve that value alone. So do functions that code
imported by name, as in `from math import sqrt`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardlib.core.call_scalar import MATH, Scalar
from shardlib.core.torch_internals.private_names import Slot
from shardlib.frontend.guards.number_inputs import TracedNumber, is_traced_number


def _following(function: Callable[..., float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def follow(*args: Any) -> Any:
        numbers = [x for x in args if is_traced_number(x)]
        if not numbers or any(not is_traced_number(x) and type(x) not in (int, float, bool) for x in args):
            return function(*args)
        return TracedNumber.wrap(
            Scalar.apply(function, *(x.scalar if is_traced_number(x) else x for x in args)), numbers[0].numbers
        )

    return follow


_SLOTS = {Slot(name): _following(function) for function, name in MATH.items()}


@contextmanager
def trace_math() -> Iterator[None]:
    """Makes these functions return expressions of traced numbers, inside the context."""
    with ExitStack() as stack:
        for slot, follow in _SLOTS.items():
            stack.enter_context(slot.holding(follow))
        yield
