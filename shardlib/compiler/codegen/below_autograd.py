"""Runs programs below autograd and autocast: both have acted already, while the function was traced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch

from shardlib.core.torch_internals.torch_private import any_autocast, below_autograd, exclude_keys

T = TypeVar("T")
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_AUTOCAST = tuple(name for name in dir(torch.DispatchKey) if name.startswith("Autocast"))
_BOTH = reduce(or_, (torch.DispatchKeySet(getattr(torch.DispatchKey, name)) for name in (*_AUTOGRAD, *_AUTOCAST)))


def run_below(function: Callable[..., T], *args: Any) -> T:
    """Calls a program, whose ops run as written."""
    if any_autocast():
        with exclude_keys(_BOTH):
            return function(*args)
    try:  # without autocast a cheaper guard suffices, and an idle one can be reused
        guard = _idle.pop()
    except IndexError:
        guard = below_autograd()
    with guard:
        out = function(*args)
    _idle.append(guard)
    return out


_idle: list[AbstractContextManager[None]] = []  # guards that are not entered
