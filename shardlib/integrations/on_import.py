"""Something to do to a module as soon as it is there: now, or right after somebody imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Teach = Callable[[Any], None]  # of the module

_waiting: dict[str, list[Teach]] = {}


def when_imported(name: str, teach: Teach) -> None:
    """Call `teach(module)` once: at once where the module is imported already, else when it is.

    Example:
        >>> when_imported("this", lambda module: print(module.d["N"]))
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()) as out:
        ...     import this
        >>> out.getvalue()[-2:]
        'A\\n'
    """
    if name in sys.modules:
        teach(sys.modules[name])
    else:
        _waiting.setdefault(name, []).append(teach)


class _Finder(MetaPathFinder):
    """Finds modules that somebody waits for as Python does, and has their loader call who waits."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for teach in _waiting.pop(name, ()):
                teach(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this one loader, of this one module
        return spec


sys.meta_path.insert(0, _Finder())
