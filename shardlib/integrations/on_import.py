"""Patches of modules, applied now or right after a program imports them, and of functions in them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shardlib.core.torch_internals.private_names import Slot

Patch = Callable[[Any], None]  # takes the module

_waiting: dict[str, list[Patch]] = {}


def replaces(slot: Slot | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the replacement of a function, which gets the original function and then the call's arguments."""
    slot = Slot(slot) if isinstance(slot, str) else slot
    original = slot.value

    def install(replacement: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        slot.value = call
        return call

    return install


def when_imported(name: str) -> Callable[[Patch], Patch]:
    """Decorates a patch of a module, called once: now if the module is imported, else right after its import."""

    def register(patch: Patch) -> Patch:
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            _waiting.setdefault(name, []).append(patch)
        return patch

    return register


class _Finder(MetaPathFinder):
    """Finds the modules that have waiting patches as Python does, and has their loaders apply the patches."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for patch in _waiting.pop(name, ()):
                patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # only this module has this loader
        return spec


sys.meta_path.insert(0, _Finder())
