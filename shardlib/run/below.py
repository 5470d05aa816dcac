"""Where programs run: below autograd and below autocast. Both have acted already, while the function was traced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import reduce
from operator import or_

import torch
from torch._C import DispatchKey, DispatchKeySet

_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_AUTOCAST = tuple(name for name in dir(DispatchKey) if name.startswith("Autocast"))
_BOTH = reduce(or_, (DispatchKeySet(getattr(DispatchKey, name)) for name in (*_AUTOGRAD, *_AUTOCAST)))


def below() -> AbstractContextManager[None]:
    """Ops run as they are written; mostly no autocast is on, and what excludes autograd alone is cheaper."""
    if torch._C._is_any_autocast_enabled():
        return torch._C._ExcludeDispatchKeyGuard(_BOTH)
    return torch._C._AutoDispatchBelowAutograd()
