"""What code may read beside its arguments: the variables around it, the globals and the user's modules that it names,
and the same of every function that is found there.

Code is a function or a class (all its methods). It is gone through once; after that, a look at each function's place
tells whether another one stands there now.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardlib.bounded import Bounded
from shardlib.tracing.lines import is_internal

Getter = Callable[[], Any]
CODE = (types.FunctionType, type)


class Reach:
    """The variables that some code reads, and the functions that it calls by name.

    `exact`: some of it asks for `type(x)`, which nothing but a number itself answers right: numbers are constants.
    Two of these are equal only if they are one: it stands for its functions in the key of a call.
    """

    def __init__(self, code: Sequence[Any], before: Reach | None = None) -> None:
        self.code, self.before = tuple(code), before
        self.exact = False
        self.variables: list[tuple[str, Getter]] = []
        self._seen: set[Any] = set() if before is None else set(before._seen)
        self._places: list[tuple[str, Getter, Any]] = []
        for x in code:
            self._go_through(x)
        self._found = [(get, x) for _, get, x in self._places]

    def is_current(self) -> bool:
        """Whether all its functions are still those that were found."""
        for get, x in self._found:  # noqa: SIM110  at every call
            if get() is not x:
                return False
        return True

    def replaced(self, old: Reach) -> list[str]:
        """The functions that are others than in `old`."""
        before = {name: x for name, _, x in old._places}
        return [name.partition(" ")[0] for name, _, x in self._places if before.get(name, x) is not x]

    def _go_through(self, code: Any) -> None:
        if code in self._seen:
            return
        self._seen.add(code)
        if isinstance(code, types.FunctionType):
            self._function(code)
        else:
            for kind in code.__mro__:
                if is_users(kind):
                    self._methods(kind)
                elif isinstance(forward := kind.__dict__.get("forward"), types.FunctionType):
                    self.exact |= "type" in _globals(forward) and not is_internal(forward.__code__.co_filename)

    def _methods(self, kind: type) -> None:
        for name, x in list(vars(kind).items()):
            functions = [*_functions(x)]
            if isinstance(x, functools._lru_cache_wrapper):
                self._variable(f"{kind.__qualname__}.{name}", functools.partial(vars(kind).get, name))
            if functions:
                self._place(f"{kind.__qualname__}.{name}", functools.partial(vars(kind).get, name), x)
            for fn in functions:
                self._go_through(fn)

    def _function(self, fn: types.FunctionType) -> None:
        name = fn.__qualname__
        for part in ("__code__", "__defaults__"):
            self._place(f"{name} {part}", functools.partial(getattr, fn, part), getattr(fn, part))
        for i, x in enumerate(fn.__defaults__ or ()):
            self._variable(f"default[{i}]", _constant(x))
        for key in (named := fn.__kwdefaults__ or {}):
            self._variable(f"default[{key!r}]", functools.partial(named.get, key))
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._variable(variable, get := functools.partial(_of_cell, cell))
            self._space(variable, get(), fn.__code__)
        if is_users(fn):
            names = _globals(fn)
            self.exact |= "type" in names
            for variable in names:
                if variable in fn.__globals__ or not hasattr(builtins, variable):
                    self._variable(variable, functools.partial(fn.__globals__.get, variable))
                self._space(variable, fn.__globals__.get(variable), fn.__code__)
        if (inner := fn.__dict__.get("__wrapped__")) is not None:
            self._variable("__wrapped__", _constant(inner))

    def _space(self, name: str, space: Any, code: types.CodeType) -> None:
        """What code may read of one of the user's modules or classes, by its names."""
        if isinstance(space, types.ModuleType | type) and is_users(space):
            for inner in _attributes(code):
                if inner in vars(space):
                    self._variable(f"{name}.{inner}", functools.partial(vars(space).get, inner))

    def _variable(self, name: str, get: Getter) -> None:
        now = get()
        if isinstance(now, types.ModuleType):
            return
        if isinstance(now, types.FunctionType):
            self._place(name, get, now)
            self._go_through(now)
        elif isinstance(now, type):
            self._place(name, get, now)
            if is_users(now):
                self._go_through(now)
        else:
            self.variables.append((name, get))

    def _place(self, name: str, get: Getter, now: Any) -> None:
        self._places.append((name, get, now))


class Reached:
    """The reaches of code, each made once for the same functions."""

    def __init__(self) -> None:
        self._known: Bounded[Any, Reach] = Bounded(64)

    def of(self, code: Iterable[Any], before: Reach | None) -> Reach:
        """What `code` reads beside what `before` does."""
        code = tuple(code)
        key = (before, *map(id, code))  # whose ids these are, the reach itself keeps alive
        found = self._known.get(key)
        if found is None or not found.is_current():
            found = self._known[key] = Reach(code, before)
        return found


def is_users(x: Any) -> bool:
    """Whether a function, a class or a module is the user's own: libraries do not change what they do in between."""
    if isinstance(x, types.FunctionType):
        return _is_own(x.__code__.co_filename)
    module = x if isinstance(x, types.ModuleType) else sys.modules.get(getattr(x, "__module__", None) or "")
    if module is not None and module.__name__ in sys.builtin_module_names:
        return False
    file = getattr(module, "__file__", None)  # a notebook has none
    return file is None or _is_own(file)


@functools.cache
def _is_own(file: str) -> bool:
    return not is_internal(file) and "site-packages" not in file and "dist-packages" not in file


def _functions(x: Any) -> Iterator[types.FunctionType]:
    """The functions of what stands in a class."""
    inner = (x, *(getattr(x, name, None) for name in ("__func__", "__wrapped__", "func", "fget", "fset")))
    yield from (fn for fn in inner if isinstance(fn, types.FunctionType))


def _globals(fn: types.FunctionType) -> list[str]:
    return list(dict.fromkeys(_named(fn.__code__, "LOAD_GLOBAL", "LOAD_NAME")))


@functools.lru_cache(1 << 12)
def _attributes(code: types.CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_named(code, "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")))


def _named(code: types.CodeType, *instructions: str) -> Iterator[str]:
    """The names in these instructions, in functions defined inside it, too."""
    for step in dis.get_instructions(code):
        if step.opname in instructions:
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _named(inner, *instructions)


def _constant(x: Any) -> Getter:
    return lambda: x


def _of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
