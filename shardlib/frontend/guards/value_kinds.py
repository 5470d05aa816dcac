"""Classifies objects for the key of a call: plain values, containers, the user's objects, code of libraries."""

from __future__ import annotations

import array
import builtins
import functools
import hashlib
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from shardlib.core.source_lines import is_internal

Description = tuple[str, Any]


def describe_value(x: Any) -> Description:
    """Describes a value to a reader, with its identity or digest if it counts by that."""
    kind = type(x)
    if kind in PLAIN or numpy_kind(x) == "generic":
        return repr(x), None
    if isinstance(x, torch.Tensor):
        return "a tensor", None
    if isinstance(x, CONTAINERS):
        return f"a {kind.__name__} of {len(x)}", None
    if isinstance(x, OPAQUE):
        return getattr(x, "__qualname__", getattr(x, "__name__", kind.__name__)), id(x)
    if numpy_kind(x):
        return f"a {kind.__name__}", hash_buffer(x)
    return f"a {kind.__name__}", id(x)


def has_value_hash(x: Any) -> bool:
    """Returns whether `x` is hashed by value, so that it can be in a key itself: it is immutable."""
    hashes: Any = type(x).__hash__
    return hashes is not None and hashes is not object.__hash__


def can_change_unseen(x: Any) -> bool:
    """Returns whether `x` has hidden state: a queue, a hash, a generator of numpy's."""
    kind: Any = type(x)
    shows = kind.__dictoffset__ or any("__slots__" in vars(k) for k in kind.__mro__)
    is_known = kind.__module__.partition(".")[0] in ("torch", "builtins", "_thread") or kind is array.array
    return not (shows or is_known or callable(x)) and not numpy_kind(x) and not has_value_hash(x)


def is_user_object(x: Any) -> bool:
    """Returns whether the attributes of `x` count: it is a user's object, an optimizer, a schedule or a scaler."""
    kind = type(x)
    module = kind.__module__
    is_library = module.partition(".")[0] in _LIBRARIES and not module.startswith(_WITH_USER_STATE)
    return not is_library or isinstance(x, _TRAINING) or is_made_by_exec(kind)


@functools.lru_cache(1 << 12)
def can_library_read(kind: Any, name: Any) -> bool:
    """Returns whether code of a library may read this attribute of an object of class `kind`.

    A library may read every attribute of its own objects. Of a user's object, it may read the names in base classes
    that it defines.
    """
    plain = types.FunctionType, types.CellType, types.ModuleType, types.SimpleNamespace
    if kind in plain or issubclass(kind, type):
        return False
    bases = [
        base for base in kind.__mro__ if not is_user_code(base) and base.__module__ not in sys.builtin_module_names
    ]
    codes = (getattr(fn, "__code__", None) for base in bases for fn in vars(base).values())
    return kind in bases or any(name in code.co_names for code in codes if code is not None)


def numpy_kind(x: Any) -> str:
    """Returns 'ndarray' for an array of numpy's, 'generic' for a number of numpy's, else an empty string."""
    kind: Any = type(x)
    return _numpy_kind(kind)


@functools.lru_cache(1 << 12)
def _numpy_kind(kind: Any) -> str:
    inside = (k.__name__ for k in kind.__mro__ if k.__module__ == "numpy")
    return next((name for name in inside if name in ("ndarray", "generic")), "")


def hash_buffer(x: Any) -> bytes:
    """Hashes the bytes of an array or a buffer; elements that are objects count by identity."""
    return hashlib.blake2b(x.tobytes(), digest_size=16).digest()


PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
QUICK = PLAIN - {complex, range}  # types of values that a key compares by `==`; floats by their hex text
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
# Modules of torch whose objects hold the user's values.
_WITH_USER_STATE = ("torch.distributions.", "torch.utils.data.")
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "shardlib", "functools", "threading", "logging"})


def holds_parameters(x: Any) -> bool:
    """Returns whether a container holds parameters, or an optimizer's state of them, judged by its first item."""
    first = next(iter(x.items() if isinstance(x, dict) else ((y,) for y in x)), ())
    return any(isinstance(y, torch.Tensor) and y.requires_grad and y.is_leaf for y in first)


_call_counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()  # calls, clears


def count_clears(cache: Any) -> int:
    """Counts how often a `functools.cache` was cleared, as far as the calls seen show: its counters restart at 0."""
    info = cache.cache_info()
    calls, (before, times) = info.hits + info.misses, _call_counts.get(cache, (0, 0))
    if calls != before:
        times += calls < before
        _call_counts[cache] = calls, times
    return times


def is_cache(x: Any) -> bool:
    """Returns whether `x` is a function wrapped by `functools.cache`."""
    return isinstance(x, functools._lru_cache_wrapper)


def is_user_code(x: Any) -> bool:
    """Returns whether a function, class or module is the user's own; code of libraries never changes between calls."""
    if isinstance(x, types.FunctionType):
        return _is_own(x.__code__.co_filename)
    module = x if isinstance(x, types.ModuleType) else sys.modules.get(getattr(x, "__module__", None) or "")
    if module is not None and module.__name__ in sys.builtin_module_names:
        return isinstance(x, type) and is_made_by_exec(x)
    file = None if module is None else vars(module).get("__file__")  # a notebook has none
    return file is None or _is_own(file)


def is_made_by_exec(kind: type) -> bool:
    """Returns whether `exec` made a class in a dict without `__name__`, so that its module reads 'builtins'."""
    is_heap_type = kind.__flags__ & 1 << 9  # set by a class statement
    return kind.__module__ == "builtins" and bool(is_heap_type) and kind is not vars(builtins).get(kind.__name__)


@functools.cache
def _is_own(file: str) -> bool:
    return not is_internal(file) and "site-packages" not in file and "dist-packages" not in file
