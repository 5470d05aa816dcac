"""What a function closes over: variables of the functions around it, globals that it names, the object that it is a
method of, and the same of every function of the user's that is found there.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from shardlib.calls.state import State
from shardlib.tracing.lines import is_internal

_SKIPPED = (types.ModuleType, type, types.BuiltinFunctionType)


class Closure:
    """Where the values are that a function closes over; `read` takes them as they are now.

    `exact`: some function asks for `type(x)`, which nothing but a number itself answers right: numbers are constants.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.exact = False
        self.variables: list[tuple[str, Callable[[], Any]]] = []
        self._seen: set[int] = set()
        self._function(fn)

    def read(self, state: State, known: list[Any]) -> None:
        """Add tensors to `state`, facts to `known`."""
        for name, value in self.variables:
            state.named(name, value(), known)

    def _function(self, fn: Any) -> None:
        if id(fn) in self._seen:
            return
        self._seen.add(id(fn))
        if isinstance(fn, functools.partial):
            for i, x in enumerate((*fn.args, *fn.keywords.values())):
                self._found(f"partial[{i}]", _constant(x))
            self._function(fn.func)
        elif isinstance(fn, types.MethodType):
            self._found("self", functools.partial(getattr, fn, "__self__"))
            self._function(fn.__func__)
        elif isinstance(fn, types.FunctionType):
            self.exact |= "type" in _names(fn.__code__) and not is_internal(fn.__code__.co_filename)
            for name, value, constant in _variables(fn):
                self._found(name, value, constant=constant)
            if (inner := getattr(fn, "__wrapped__", None)) is not None:
                self._function(inner)
        elif isinstance(fn, nn.Module):
            self._found("self", _constant(fn))
            self.exact |= any("type" in _names(code) for code in _codes(fn))
        elif not isinstance(fn, _SKIPPED):
            self._found("self", _constant(fn))
            for kind in type(fn).__mro__:
                if isinstance(call := kind.__dict__.get("__call__"), types.FunctionType):
                    self._function(call)

    def _found(self, name: str, value: Callable[[], Any], *, constant: bool = False) -> None:
        now = value()
        if isinstance(now, types.FunctionType | functools.partial | types.MethodType):
            self._function(now)
        elif (inner := getattr(now, "__wrapped__", None)) is not None and not isinstance(now, nn.Module):
            self._function(inner)  # a jitted function, say, which becomes part of this one
        if not isinstance(now, _SKIPPED) and not (constant and isinstance(now, types.FunctionType)):
            self.variables.append((name, value))


def _constant(x: Any) -> Callable[[], Any]:
    return lambda: x


def _variables(fn: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Name, value, and whether it is a function that nobody is expected to replace."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield name, functools.partial(_of_cell, cell), False
    for i, x in enumerate(fn.__defaults__ or ()):
        yield f"default[{i}]", _constant(x), False
    if not is_internal(fn.__code__.co_filename):
        names = dict.fromkeys(_names(fn.__code__))
        for name in names:
            found = fn.__globals__.get(name)
            if isinstance(found, types.ModuleType | type):
                yield from _of_namespace(name, found, names)
            elif name in fn.__globals__:
                yield name, functools.partial(fn.__globals__.get, name), True


def _of_namespace(name: str, space: Any, names: Iterable[str]) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """What code may read of one of the user's modules or classes, by its names."""
    file = getattr(sys.modules.get(getattr(space, "__module__", "") or ""), "__file__", None)
    file = getattr(space, "__file__", None) if isinstance(space, types.ModuleType) else file
    if file is None or is_internal(file) or "site-packages" in file:
        return
    for inner in names:
        if inner in vars(space) and not isinstance(vars(space)[inner], _SKIPPED):
            yield f"{name}.{inner}", functools.partial(getattr, space, inner), True


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code looks up outside its own variables, in functions defined inside it, too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _codes(module: nn.Module) -> Iterator[types.CodeType]:
    for kind in {type(m) for m in module.modules()}:
        code = getattr(kind.forward, "__code__", None)
        if code is not None and not is_internal(code.co_filename):
            yield code


def _of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
