"""Collectives as `CommDebugMode` counts them: those of the plan, once for each call, whatever carries them.

Torch's mode counts ops of c10d as they are dispatched. Programs move their pieces in shared memory, in bundles or
inside one process, and ranks say more to each other than the plan shows (the greeting of a turn). So a program runs
where the mode does not look, and tells it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from shardlib.run.ranges import label

if TYPE_CHECKING:
    from shardlib.lower.program import Collective

entered: list[Any] = []  # modes that somebody has entered, in any thread
handling: ContextVar[tuple[Any, ...]] = ContextVar("shardlib_counting", default=())  # those that torch took off

# Torch has no functional permutation; its own `permute_tensor` is an all-to-all.
_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "ppermute": "all_to_all_single",
}


def counted(run: Callable[..., Any], collectives: Sequence[Collective]) -> Callable[..., Any]:
    """`run`, which runs these collectives; modes that count are told."""
    if not collectives:
        return run

    def call(*args: Any) -> Any:
        if not entered:
            return run(*args)
        modes = {id(m): m for m in (*handling.get(), *_get_current_dispatch_mode_stack()) if _counts(m)}
        with unseen():
            out = run(*args)
            for mode in modes.values():
                for collective in collectives:
                    mode.__torch_dispatch__(_Ran(collective), ())
        return out

    return call


@contextmanager
def unseen() -> Iterator[None]:
    """What torch dispatches inside is not counted."""
    if not entered:
        yield
        return
    stack = _get_current_dispatch_mode_stack()
    rest = [mode for mode in stack if not _counts(mode)]
    _exchange(stack, rest)
    try:
        yield
    finally:
        _exchange(rest, stack)


def _exchange(old: Sequence[Any], new: Sequence[Any]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)


def _counts(mode: Any) -> bool:
    return any(mode is other for other in entered)


class _Ran:
    """A collective that has run, as a mode sees an op that it calls."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._overloadpacket = getattr(torch.ops._c10d_functional, _OPS[collective.kind])

    def __call__(self) -> None:
        pass

    def __str__(self) -> str:
        return label([self._collective])
