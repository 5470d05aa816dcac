"""Which functions, classes and modules are the user's own, and which belong to a library."""

from __future__ import annotations

import builtins
import functools
import sys
import types
from typing import Any

from shardlib.core.source_lines import is_internal


def is_users(x: Any) -> bool:
    """Whether a function, a class or a module is the user's own: libraries do not change what they do in between."""
    if isinstance(x, types.FunctionType):
        return _is_own(x.__code__.co_filename)
    module = x if isinstance(x, types.ModuleType) else sys.modules.get(getattr(x, "__module__", None) or "")
    if module is not None and module.__name__ in sys.builtin_module_names:
        return isinstance(x, type) and is_executed(x)
    file = None if module is None else vars(module).get("__file__")  # a notebook has none
    return file is None or _is_own(file)


def is_executed(kind: type) -> bool:
    """Whether `exec` made a class, in a dict that says no module: then it says that it is of Python's own."""
    is_made = kind.__flags__ & 1 << 9  # by a class statement
    return kind.__module__ == "builtins" and bool(is_made) and kind is not vars(builtins).get(kind.__name__)


@functools.cache
def _is_own(file: str) -> bool:
    return not is_internal(file) and "site-packages" not in file and "dist-packages" not in file
