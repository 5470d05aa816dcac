"""Refuses loop bodies that change values outside: a body runs once, so they would change for one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.children import closure_items
from shardlib.frontend.guards.value_kinds import PLAIN
from shardlib.frontend.lifted_inputs import LiftedInputs
from shardlib.frontend.side_effects.snapshot import Snapshot


@contextmanager
def refuse_counts(body: Callable[..., Any]) -> Iterator[None]:
    """Refuses changes by `body` of its variables, and of objects that the traced function holds, except tensors."""
    before, cells = _look(), dict(closure_items(body))
    yield
    wrong = [
        f"{name} was {cells[name]!r}, is {now!r} after one step"
        for name, now in closure_items(body)
        if name in cells and now is not cells[name] and not _is_tensor(now)
        if type(now) not in PLAIN or now != cells[name]
    ]
    after = _look()
    if before is not None and after is not None:
        for place in after.changed(before):
            was, now = before.values.get(place), after.values[place]
            if not _is_tensor(now) and not _is_tensor(was) and not after.is_log(place[0]) and place[0] in before.owners:
                default = getattr(type(after.owners.get(place[0])), str(place[1]), None) if was is None else was
                if default is not None or not isinstance(now, _NUMBERS):
                    wrong.append(f"{after.text(place)} was {default!r}, is {now!r} after one step")
    if wrong:
        raise ShardingError(
            "the body of scan changes values that are not its own",
            list(dict.fromkeys(wrong)),
            rule="a body runs once, for every step: what changes from step to step is its carry",
            remedy="count in the carry, (h, n) -> (h, n + 1), from torch.tensor(0); or outside, where the number of "
            "steps is known",
        )


def _look() -> Snapshot | None:
    lifted = LiftedInputs.current()
    if lifted is None or lifted.watch is None:
        return None
    with torch.DisableTorchFunction():  # the snapshot must not count as an action of the body
        return lifted.watch.look()


def _is_tensor(x: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(x))


_NUMBERS = (int, float)
