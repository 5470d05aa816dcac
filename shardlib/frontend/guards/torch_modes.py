"""What a trace can see that no argument says: modes and switches of torch. All of it is part of a call's key.

Function modes act while a function is traced, above shardlib's own, and not when its program runs. Torch's dispatch
modes (counters, profilers), and those that say `only_observes`, see what runs, and nothing of the trace; others are
refused, since nobody knows whether they mean the ops of one device or of its pieces. Hooks on what autograd saves act
on what a call saves.
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
from shardlib.core.torch_private import (
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
from shardlib.frontend.guards.attributes import own
from shardlib.frontend.guards.object_state import State

_DEVICES = ("cpu", "cuda")
_environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # os.environ takes longer than the rest
_NO_AUTOCAST = (None,) * len(_DEVICES)
_gradients, _inference, _default_dtype = torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype
_autocast_cache = torch.is_autocast_cache_enabled
_deterministic, _precision = torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision


def ambient(state: State) -> tuple[Any, ...]:
    """The modes of this thread and the switches of this process, as part of a key.

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
        modes(state) if count_function_modes() or any(MODULE_HOOKS) else (),
    )


def _autocast() -> list[torch.dtype | None]:
    return [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES]


def autocast_of(modes: tuple[Any, ...]) -> tuple[tuple[str, torch.dtype], ...]:
    """The devices with autocast, each with its dtype, that `ambient` said."""
    said = zip(_DEVICES, modes[_AUTOCAST : _AUTOCAST + len(_DEVICES)], strict=True)
    return tuple((device, dtype) for device, dtype in said if dtype is not None)


def modes(state: State) -> tuple[Any, ...]:
    """What the function modes around a call, and the hooks of all modules, add to its key."""
    known: list[Any] = []
    if count_function_modes():
        for mode in (mode for mode in function_modes() if not is_of_traces(mode)):
            known += (type(mode), own(mode).get("device"))
            state.mode(mode, known, -len(known))
    if any(MODULE_HOOKS):
        for hook in (hook for hooks in MODULE_HOOKS for hook in hooks.values() if not _is_torch(hook)):
            state.hook(hook, known)
    return tuple(known)


def refuse_modes(name: str) -> None:
    """Refuse dispatch modes that are not torch's own, and do not say that they only look on."""
    modes = dispatch_modes()
    wrong = [m for m in modes if not _is_torch(m) and not getattr(m, "only_observes", False)]
    if wrong:
        raise ShardingError(
            f"{name} is called under a dispatch mode of your own",
            [f"{type(m).__module__}.{type(m).__qualname__}" for m in wrong],
            rule="a jitted function runs as another program, of ops on pieces: a mode that changes what ops do would "
            "change other ones",
            remedy="enter the mode inside the function (it acts while the function is traced); one that changes "
            "nothing says only_observes = True in its class, and sees the ops that run, on pieces",
        )


def _is_torch(x: Any) -> bool:
    """Whether a mode, or a hook, is torch's own: such ones count and show, and change nothing."""
    of = x if isinstance(x, types.FunctionType | types.MethodType) else type(x)
    return of.__module__.partition(".")[0] in ("torch", "shardlib")


def is_of_traces(mode: TorchFunctionMode) -> bool:
    """Whether a mode is one that every trace is under."""
    return type(mode).__module__.startswith(("shardlib.", "torch.fx."))


@contextmanager
def set_aside() -> Iterator[AbstractContextManager[Any]]:
    """Nothing of the caller's modes and hooks acts; inside what it gives, the function modes do, above all others."""
    functions: list[TorchFunctionMode] = [pop_function_mode() for _ in range(count_function_modes())][::-1]
    hooks: list[Any] = []
    while (pair := saved_hooks(True)) is not None:
        hooks.append(pair)
        pop_saved_hooks()
    try:
        # The anomaly switch is the process's: who turns it off for nothing could undo what another thread turns on.
        quiet = torch.autograd.set_detect_anomaly(mode=False) if torch.is_anomaly_enabled() else nullcontext()
        with without_modes(), quiet:
            yield _on_top(functions)
    finally:
        for pair in reversed(hooks):
            push_saved_hooks(*pair)
        for mode in functions:
            push_function_mode(mode)


@contextmanager
def _on_top(modes: list[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            push_function_mode(mode)
            stack.callback(pop_function_mode)
        yield


NAMES = (
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
_AUTOCAST = 3  # the first of them that is autocast's
