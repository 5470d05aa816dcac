"""Classifies objects for the key of a call: plain values, containers, objects that count by identity or content."""

from __future__ import annotations

import array
import functools
import hashlib
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from shardlib.frontend.guards.users_code import is_executed, is_users

Held = tuple[str, Any]


def held(x: Any) -> Held:
    """Describes a value to a reader; with its identity or digest, if it counts by that."""
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
    """Returns whether `x` is equal to no other object, or may change."""
    hashes: Any = type(x).__hash__
    return hashes is None or hashes is object.__hash__


def is_closed(x: Any) -> bool:
    """Returns whether `x` may change without showing it: a queue, a hash, a generator of numpy's."""
    kind: Any = type(x)
    shows = kind.__dictoffset__ or any("__slots__" in vars(k) for k in kind.__mro__)
    is_known = kind.__module__.partition(".")[0] in ("torch", "builtins", "_thread") or kind is array.array
    return not (shows or is_known or callable(x)) and not of_numpy(x) and is_its_own(x)


def is_object(x: Any) -> bool:
    """Returns whether the attributes of `x` count: it is a user's object, or an optimizer."""
    kind = type(x)
    named = kind.__module__
    library = named.partition(".")[0] in _LIBRARIES and not named.startswith(_OPEN)
    return not library or isinstance(x, _TRAINING) or is_executed(kind)


@functools.lru_cache(1 << 12)
def may_read(kind: Any, name: Any) -> bool:
    """Returns whether code of a library may read this attribute of an object.

    It may read all of its own objects; of a user's object, the names in the base classes that it defines.
    """
    if kind in (types.FunctionType, types.CellType, types.ModuleType) or issubclass(kind, type):
        return False
    bases = [base for base in kind.__mro__ if not is_users(base) and base.__module__ not in sys.builtin_module_names]
    codes = (getattr(fn, "__code__", None) for base in bases for fn in vars(base).values())
    return kind in bases or any(name in code.co_names for code in codes if code is not None)


def of_numpy(x: Any) -> str:
    """Returns 'ndarray' for an array of numpy's, 'generic' for a number of numpy's, else an empty string."""
    kind: Any = type(x)
    return _numpys(kind)


@functools.lru_cache(1 << 12)
def _numpys(kind: Any) -> str:
    inside = (k.__name__ for k in kind.__mro__ if k.__module__ == "numpy")
    return next((name for name in inside if name in ("ndarray", "generic")), "")


def digest(x: Any) -> bytes:
    """Hashes the elements of an array; those that are objects, by identity."""
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
    """Returns whether a container, which may be long, holds parameters, or an optimizer's state of them."""
    first = next(iter(x.items() if isinstance(x, dict) else ((y,) for y in x)), ())
    return any(isinstance(y, torch.Tensor) and y.requires_grad and y.is_leaf for y in first)


_call_counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()  # calls; times emptied


def emptied(cache: Any) -> int:
    """The number of times, as far as anybody has looked: then it counts from 0 again."""
    info = cache.cache_info()
    calls, (before, times) = info.hits + info.misses, _call_counts.get(cache, (0, 0))
    if calls != before:
        times += calls < before
        _call_counts[cache] = calls, times
    return times


def is_cache(x: Any) -> bool:
    """Returns whether `x` is what `functools.cache` makes of a function."""
    return isinstance(x, functools._lru_cache_wrapper)
