"""Numbers that the body of a loop changes where they stand outside: it runs once, and would count one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardlib.calls.state import LENGTH
from shardlib.errors import ShardingError
from shardlib.tracing.lifted import Lifted


@contextmanager
def refuse_counts(body: Callable[..., Any]) -> Iterator[None]:
    """Refuse numbers that are others when `body` has run: of its variables, and of what the traced function holds."""
    before = _numbers(body)
    yield
    wrong = [
        f"{now.name} was {was!r}, is {now.value!r} after one step"
        for place, now in _numbers(body).items()
        if (was := before[place].value if place in before else now.default) is not None and was != now.value
    ]
    if wrong:
        raise ShardingError(
            "the body of scan changes numbers that are not its own",
            wrong,
            rule="a body runs once, for every step: what changes from step to step is its carry",
            remedy="count in the carry, (h, n) -> (h, n + 1), from torch.tensor(0); or outside, where the number of "
            "steps is known",
        )


class _Number(NamedTuple):
    name: str
    value: Any
    default: Any = None  # that of the class


def _numbers(body: Callable[..., Any]) -> dict[Any, _Number]:
    """Numbers by their places."""
    found: dict[Any, _Number] = {}
    names = getattr(getattr(body, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(body, "__closure__", None) or (), strict=True):
        try:
            found[id(cell), ""] = _Number(name, cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    lifted = Lifted.current()
    if lifted is not None and lifted.watch is not None:
        with torch._C.DisableTorchFunction():  # to the body, a look is none of its own
            state = lifted.watch.look()
        cells = {at for at, _ in found}
        for (at, key), x in state.values.items():
            if at not in cells and key is not LENGTH and type(x) in _KINDS:
                default = getattr(type(state.owners.get(at)), key, None) if isinstance(key, str) else None
                found[at, key] = _Number(state.text((at, key)), x, default if type(default) in _KINDS else None)
    return {place: number for place, number in found.items() if type(number.value) in _KINDS}


_KINDS = (int, float)
