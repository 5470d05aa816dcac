"""Traces schedulers of `torch.optim`: each call of the program runs a scheduler's step on its own numbers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shardlib.core.call_scalar import is_same_number, replace_by_hints
from shardlib.core.context import is_tracing
from shardlib.core.errors import ValueNeededError
from shardlib.core.source_lines import user_line
from shardlib.frontend.guards.host_scalars import Copies, HostStep, ScheduleContents, copy_schedules, fill_numbers
from shardlib.frontend.guards.number_inputs import NumberMode, is_traced_number, to_scalar
from shardlib.frontend.side_effects.containers import put_back
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.tensor.sharded_tensor import typeof

_runs: ContextVar[bool] = ContextVar("shardlib_schedule_runs", default=False)  # on copies, with plain numbers


@contextmanager
def trace_schedulers(watch: MutationTracker | None, numbers: NumberMode | None) -> Iterator[None]:
    """Steps torch's schedulers in this way in the traced function, inside the context."""
    with ExitStack() as stack:
        if watch is not None:
            for kind in [kind for kind in _kinds(LRScheduler) if "step" in vars(kind)]:
                stack.callback(setattr, kind, "step", kind.step)
                kind.step = _traced(kind.step, watch, numbers)  # type: ignore[method-assign]
        yield


def _kinds(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    """Yields torch's own classes: a user's `step` is traced like other code."""
    if kind.__module__.startswith("torch."):
        yield kind
        for below in kind.__subclasses__():
            yield from _kinds(below)


def _traced(step: Callable[..., Any], watch: MutationTracker, numbers: NumberMode | None) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepped(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if not is_tracing() or _runs.get() or not _is_hosted(step, [self, list(args), kwargs], watch, numbers):
            step(self, *args, **kwargs)

    return stepped


def _is_hosted(step: Callable[..., Any], call: list[Any], watch: MutationTracker, numbers: NumberMode | None) -> bool:
    """Steps a scheduler, the first of `call`, by code that each call runs; returns whether that is possible."""
    if wrong := [x for x in (*call[1], *call[2].values()) if isinstance(x, Tensor)]:
        raise ValueNeededError(
            f"{type(call[0]).__name__} is stepped by a value that the traced function computes, {typeof(wrong[0])}",
            [str(user_line(sys._getframe(1)))],
            rule="Python runs once, on shapes; the values of tensors are known only when the program runs",
            remedy="return it, and step behind the jitted function: schedule.step(float(loss)); or pass a number",
        )
    before = ScheduleContents.read(call)
    if numbers is None or not any(map(is_traced_number, before.numbers)):
        return False
    if any(isinstance(x, Tensor) for x in before.others):
        return False
    copies: Copies = {}
    copy = copy_schedules(call, lambda x: replace_by_hints(to_scalar(x)), copies)
    like = {id(new): old for old, new in copies.values()}
    own = not all(map(_is_torchs, (*(type(x) for x, _ in copies.values()), *before.others)))
    if own and any(_changed(watch, copies)):  # it reads values that differ before a call
        return False

    def run() -> None:
        token = _runs.set(True)
        try:
            step(copy[0], *copy[1], **copy[2])
        finally:
            _runs.reset(token)

    run()
    if own and (changed := list(_changed(watch, copies))):  # it does more than compute numbers
        for owner, place in changed:
            put_back(owner, place, watch.before)
        return False
    after = ScheduleContents.read(copy, like)
    if after.facts != before.facts or any(map(is_traced_number, after.numbers)):
        return False
    pairs = zip(before.numbers, after.numbers, strict=True)
    free = [i for i, (a, b) in enumerate(pairs) if is_traced_number(a) or after.own[i] or not is_same_number(a, b)]
    scalars, values = tuple(map(to_scalar, before.numbers)), list(after.numbers)
    hosted = HostStep(run, copy, scalars, tuple(values), after.facts, tuple(free), numbers.leaf_count)
    for i, x in zip(free, numbers.add_host_step(hosted, type(call[0]).__name__), strict=True):
        values[i] = x
    fill_numbers(copy, iter(values), like)
    return True


def _is_torchs(x: Any) -> bool:
    """Returns whether a class or a function is torch's or Python's: its effects depend on its arguments alone."""
    x = x.func if isinstance(x, functools.partial) else x
    return (getattr(x, "__module__", None) or "").partition(".")[0] in ("torch", "builtins", "collections")


def _changed(watch: MutationTracker, copies: Copies) -> Iterator[tuple[Any, Any]]:
    """Yields the changes of the function so far, except in the scheduler, its optimizer's settings, and tensors."""
    for place, owner, value, _ in watch.changes(watch.look()):
        inner = value.values() if isinstance(value, dict) else (value,)
        if id(owner) not in copies and not all(isinstance(x, Tensor) for x in inner):
            yield owner, place
