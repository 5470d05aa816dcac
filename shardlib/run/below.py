"""Where programs run: below autograd and below autocast. Both have acted already, while the function was traced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet

T = TypeVar("T")
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_AUTOCAST = tuple(name for name in dir(DispatchKey) if name.startswith("Autocast"))
_BOTH = reduce(or_, (DispatchKeySet(getattr(DispatchKey, name)) for name in (*_AUTOGRAD, *_AUTOCAST)))


def run_below(function: Callable[..., T], *args: Any) -> T:
    """Call a program: its ops run as they are written."""
    if _is_autocast():
        with _exclude(_BOTH):
            return function(*args)
    try:  # mostly no autocast is on: then there is a guard that costs less, above all where it is made already
        guard = _idle.pop()
    except IndexError:
        guard = _below_autograd()
    with guard:
        out = function(*args)
    _idle.append(guard)
    return out


_idle: list[AbstractContextManager[None]] = []  # guards that nobody is in
_is_autocast = torch._C._is_any_autocast_enabled
_exclude, _below_autograd = torch._C._ExcludeDispatchKeyGuard, torch._C._AutoDispatchBelowAutograd
