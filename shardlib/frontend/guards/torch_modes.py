"""Reads torch's modes and switches around a call for its key, and suspends them during the trace.

Function modes act during the trace, above shardlib's own, and not when the program runs. Torch's dispatch modes
(counters, profilers), and those with `only_observes`, see the ops that run, and nothing of the trace. Other dispatch
modes are refused: they may expect the ops of one device, and a program runs ops on shards. Saved-tensor hooks act on
the tensors that a call saves.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardlib.core.context import rule_registrations
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import (
    MODULE_HOOKS,
    any_autocast,
    count_function_modes,
    dispatch_modes,
    function_modes,
    pop_function_mode,
    pop_saved_hooks,
    push_function_mode,
    push_saved_hooks,
    saved_hooks,
    without_modes,
)
from shardlib.frontend.guards.children import instance_dict
from shardlib.frontend.guards.state_walk import StateWalk

_DEVICES = ("cpu", "cuda")
_environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # os.environ takes longer than the rest
_NO_AUTOCAST = (None,) * len(_DEVICES)
_gradients, _inference, _default_dtype = torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype
_autocast_cache = torch.is_autocast_cache_enabled
_deterministic, _precision = torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision


def ambient(state: StateWalk) -> tuple[Any, ...]:
    """Returns the modes of this thread and the switches of this process, as part of a key.

    Gradient and inference mode; autocast of each kind of device, its dtype and its cache; default dtype and device;
    deterministic algorithms and the precision of matrix products; `SHARDLIB_OPS`; users' rules; function modes.
    """
    return (
        _gradients(),
        _inference(),
        _default_dtype(),
        *(_autocast() if any_autocast() else _NO_AUTOCAST),
        _autocast_cache(),
        _deterministic(),
        _precision(),
        _environment.get(b"SHARDLIB_OPS"),
        rule_registrations.value,
        _function_mode_facts(state) if count_function_modes() or any(MODULE_HOOKS) else (),
    )


def _autocast() -> list[torch.dtype | None]:
    return [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES]


def autocast_dtypes(modes: tuple[Any, ...]) -> tuple[tuple[str, torch.dtype], ...]:
    """Returns the devices with autocast, each with its dtype, from the result of `ambient`."""
    dtypes = zip(_DEVICES, modes[_AUTOCAST : _AUTOCAST + len(_DEVICES)], strict=True)
    return tuple((device, dtype) for device, dtype in dtypes if dtype is not None)


def _function_mode_facts(state: StateWalk) -> tuple[Any, ...]:
    """Returns the facts about function modes around a call and about global module hooks."""
    facts: list[Any] = []
    if count_function_modes():
        for mode in (mode for mode in function_modes() if not is_trace_mode(mode)):
            facts += (type(mode), instance_dict(mode).get("device"))
            state.visit_mode(mode, facts, -len(facts))
    if any(MODULE_HOOKS):
        for hook in (hook for hooks in MODULE_HOOKS for hook in hooks.values() if not _is_torch(hook)):
            state.visit_hook(hook, facts)
    return tuple(facts)


def refuse_dispatch_modes(name: str) -> None:
    """Raises `ShardingError` for dispatch modes that are not torch's own and do not set `only_observes`."""
    modes = dispatch_modes()
    wrong = [m for m in modes if not _is_torch(m) and not getattr(m, "only_observes", False)]
    if wrong:
        raise ShardingError(
            f"{name} is called under a dispatch mode of your own",
            [f"{type(m).__module__}.{type(m).__qualname__}" for m in wrong],
            rule="a jitted function runs as another program, of ops on shards: a mode that changes ops would change "
            "those instead",
            remedy="enter the mode inside the function (it acts while the function is traced); a mode that changes "
            "nothing sets only_observes = True in its class, and sees the ops that run, on shards",
        )


def _is_torch(x: Any) -> bool:
    """Returns whether a mode or a hook is torch's own, which only counts or shows ops."""
    owner = x if isinstance(x, types.FunctionType | types.MethodType) else type(x)
    return owner.__module__.partition(".")[0] in ("torch", "shardlib")


def is_trace_mode(mode: TorchFunctionMode) -> bool:
    """Returns whether every trace runs under this mode."""
    return type(mode).__module__.startswith(("shardlib.", "torch.fx."))


@contextmanager
def suspend_modes() -> Iterator[AbstractContextManager[Any]]:
    """Suspends the caller's modes and hooks; yields a context in which the function modes act, above all others."""
    functions: list[TorchFunctionMode] = [pop_function_mode() for _ in range(count_function_modes())][::-1]
    hooks: list[Any] = []
    while (pair := saved_hooks(True)) is not None:
        hooks.append(pair)
        pop_saved_hooks()
    try:
        # The anomaly switch belongs to the process: turning it off needlessly could undo another thread's change.
        quiet = torch.autograd.set_detect_anomaly(mode=False) if torch.is_anomaly_enabled() else nullcontext()
        with without_modes(), quiet:
            yield _pushed(functions)
    finally:
        for pair in reversed(hooks):
            push_saved_hooks(*pair)
        for mode in functions:
            push_function_mode(mode)


@contextmanager
def _pushed(modes: list[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            push_function_mode(mode)
            stack.callback(pop_function_mode)
        yield


AMBIENT_NAMES = (
    "gradient mode",
    "inference mode",
    "the default dtype",
    *(f"autocast on {d}" for d in _DEVICES),
    "autocast's cache",
    "deterministic algorithms",
    "float32 precision",
    "SHARDLIB_OPS",
    "the rules of custom ops",
    "function modes",
)
_AUTOCAST = AMBIENT_NAMES.index(f"autocast on {_DEVICES[0]}")
