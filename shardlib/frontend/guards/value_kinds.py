"""What kind of thing an object is to a call's key: a plain value, a container, who it is, or what is in it."""

from __future__ import annotations

import array
import functools
import hashlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from shardlib.frontend.guards.users_code import is_executed, is_users

Held = tuple[str, Any]


def held(x: Any) -> Held:
    """What a reader is told of something that is held; and, where it counts by who it is, who."""
    kind = type(x)
    if kind in PLAIN or of_numpy(x) == "generic":
        return repr(x), None
    if isinstance(x, torch.Tensor):
        return "a tensor", None
    if isinstance(x, CONTAINERS):
        return f"a {kind.__name__} of {len(x)}", None
    if isinstance(x, OPAQUE):
        return getattr(x, "__qualname__", getattr(x, "__name__", kind.__name__)), id(x)
    if of_numpy(x):
        return f"a {kind.__name__}", digest(x)
    return f"a {kind.__name__}", id(x)


def is_its_own(x: Any) -> bool:
    """Whether `x` is equal to nothing else, or may change: it may be another one, inside, next time."""
    hashes: Any = type(x).__hash__
    return hashes is None or hashes is object.__hash__


def is_closed(x: Any) -> bool:
    """Whether `x` is of a type that is not written in Python, may change, and shows nothing of it: a queue, a hash, a
    generator of numpy's."""
    kind: Any = type(x)
    shows = kind.__dictoffset__ or any("__slots__" in vars(k) for k in kind.__mro__)
    known = kind.__module__.partition(".")[0] in ("torch", "builtins", "_thread") or kind is array.array
    return not (shows or known or callable(x)) and not of_numpy(x) and is_its_own(x)


def is_object(x: Any) -> bool:
    """Whether `x` is a user's object, or an optimizer: its attributes count."""
    kind = type(x)
    named = kind.__module__
    library = named.partition(".")[0] in _LIBRARIES and not named.startswith(_OPEN)
    return not library or isinstance(x, _TRAINING) or is_executed(kind)


@functools.lru_cache(1 << 12)
def may_read(kind: Any, name: Any) -> bool:
    """Whether code of a library may read this attribute of an object: any of its own objects, and of one of the
    user's, what it names in a class that the user's is made of."""
    if kind in (types.FunctionType, types.CellType, types.ModuleType) or issubclass(kind, type):
        return False
    bases = [base for base in kind.__mro__ if not is_users(base) and base.__module__ not in sys.builtin_module_names]
    codes = (getattr(fn, "__code__", None) for base in bases for fn in vars(base).values())
    return kind in bases or any(name in code.co_names for code in codes if code is not None)


def of_numpy(x: Any) -> str:
    """Which class of numpy's an object is of: an array's, a number's, or none."""
    kind: Any = type(x)
    return _numpys(kind)


@functools.lru_cache(1 << 12)
def _numpys(kind: Any) -> str:
    inside = (k.__name__ for k in kind.__mro__ if k.__module__ == "numpy")
    return next((name for name in inside if name in ("ndarray", "generic")), "")


def digest(x: Any) -> bytes:
    """What is in an array, or, of objects, who."""
    return hashlib.blake2b(x.tobytes(), digest_size=16).digest()


PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
QUICK = PLAIN - {complex, range}  # equal ones are one, but for 0.0 and -0.0
CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
DICTS = frozenset({dict, OrderedDict})
BUILTIN = frozenset({*CONTAINERS, OrderedDict, defaultdict, Counter, torch.Size})
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.grad_scaler.GradScaler)
OPAQUE: tuple[Any, ...] = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.Generator,
)
# Torch's objects that stand for what somebody gave them.
_OPEN = ("torch.distributions.", "torch.utils.data.")
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "shardlib", "functools", "threading", "logging"})


def is_of_parameters(x: Any) -> bool:
    """Whether a container has parameters, or what an optimizer keeps of them: there may be many."""
    first = next(iter(x.items() if isinstance(x, dict) else ((y,) for y in x)), ())
    return any(isinstance(y, torch.Tensor) and y.requires_grad and y.is_leaf for y in first)
