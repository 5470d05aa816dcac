"""Finds the variables that code may read besides its arguments.

These are closure variables, globals, and names in the user's modules; and again those of every function and class among
their values. Code is a function or a class, whose methods and attributes count. Each code is analyzed once. Later calls
only compare whether each place still holds the same function.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.plain_types import has_own_type
from shardlib.core.source_lines import is_internal
from shardlib.frontend.guards.bytecode import ATTRIBUTE, ITEM, READS, instructions, words
from shardlib.frontend.guards.children import cell_content, instance_dict
from shardlib.frontend.guards.value_kinds import is_user_code

Getter = Callable[[], Any]


class Variable(NamedTuple):
    """A variable that some code reads: its name, a getter of its value, its container, and its key there."""

    name: str
    get: Getter
    container: Any
    key: Any


class CodeReads:
    """The variables that some code reads, and the functions that it calls by name.

    `exact`: some code asks for `type(x)`. Only a real number answers that right, so numbers are constants.
    `rates`: such code also handles optimizers, so learning rates are constants, too.
    `seeds`: some code names a method that seeds generators. `reads`: names of values that the code reads, `*` where it
    may read any; `logs`: names of lists that it only appends to.
    A `CodeReads` compares by identity: it represents its functions in the key of a call.
    """

    def __init__(self, code: Sequence[Any], before: CodeReads | None = None) -> None:
        self.definitions, self.before = tuple(code), before
        self.exact = self.rates = self.seeds = False
        self.type_spaces: dict[int, dict[str, Any]] = {}  # globals of code that may ask for `type(x)`, by id
        self.variables: list[Variable] = []
        self._seen: set[Any] = set() if before is None else set(before._seen)
        self.readers: dict[str, types.CodeType] = {}  # one code per variable
        self._appended: set[str] = set() if before is None else set(before._appended)
        self._read: set[str] = set() if before is None else set(before._read)
        self._places: list[tuple[str, Getter, Any]] = []
        self._functions: list[tuple[types.FunctionType, Any, Any, Any]] = []  # each with its code and its defaults
        self._todo = list(code)
        while self._todo:
            self._analyze(self._todo.pop(0))
        self._values = [(get, x) for _, get, x in self._places]
        self.reads = frozenset(self._read)
        self.logs = frozenset() if "*" in self.reads else frozenset(self._appended - self.reads)

    def is_current(self) -> bool:
        """Returns whether every place still holds the same function with the same code and defaults."""
        for fn, code, defaults, named in self._functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ is not named:
                return False
        for get, x in self._values:  # noqa: SIM110  runs in every call
            if get() is not x:
                return False
        return True

    def replaced(self, old: CodeReads) -> list[str]:
        """Returns the names of the functions that differ from those in `old`."""
        before, now = dict(old._named()), dict(self._named())
        return [name.partition(" ")[0] for name, x in now.items() if before.get(name, x) is not x]

    def _named(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, x) for name, _, x in self._places)
        for fn, *parts in self._functions:
            yield from ((f"{fn.__qualname__} {i}", part) for i, part in enumerate(parts))

    def line(self, name: str, attribute: str) -> tuple[types.CodeType, int] | None:
        """Returns the code and the line that read a variable, or this attribute of the variable."""
        return None if name not in self.readers else _load(self.readers[name], name, attribute)

    def _is_new(self, *key: Any) -> bool:
        """Returns whether a key comes for the first time, and notes it."""
        count = len(self._seen)
        self._seen.add(key)
        return len(self._seen) > count

    def _analyze(self, code: Any) -> None:
        if not self._is_new(id(code)):
            return
        if isinstance(code, types.FunctionType):
            self._add_function(code)
            return
        if is_user_code(type(code)):
            self._todo.append(type(code))  # a metaclass has methods that its classes lack
        for kind in code.__mro__:
            if is_user_code(kind):
                self._add_class(kind)
            elif isinstance(forward := kind.__dict__.get("forward"), types.FunctionType):
                self.exact |= "type" in _globals(forward) and not is_internal(forward.__code__.co_filename)
                self._add_type_space(forward)

    def _add_class(self, kind: type) -> None:
        if not self._is_new("class", id(kind)):
            return
        inside = vars(kind)
        name = kind.__qualname__
        self._add_place(f"{name} bases", lambda: kind.__mro__, kind.__mro__)
        for get in (lambda: min(len(inside), 255), lambda: next(reversed(inside), None)):  # a new attribute comes last
            self._add_place(f"{name} attributes", get, get())
        get = functools.partial(inside.get, "__module__")  # so that a class without attributes has a place
        self._add_variable(f"{name}.__module__", get, kind, "__module__")
        for key, x in list(inside.items()):
            functions = [*_wrapped_functions(x)]
            self._todo += functions
            get = functools.partial(inside.get, key)
            if functions:
                self._add_place(f"{name}.{key}", get, x)
            if not (key.startswith("__") and key.endswith("__")) and not _is_descriptor(x):
                self._add_variable(f"{name}.{key}", get, kind, key)

    def _add_function(self, fn: types.FunctionType) -> None:
        name, code = fn.__qualname__, fn.__code__
        self._functions.append((fn, code, fn.__defaults__, fn.__kwdefaults__))
        parameters, defaults = code.co_varnames[: code.co_argcount], fn.__defaults__ or ()
        for i, x in enumerate(defaults):
            at = i + len(parameters) - len(defaults)
            self._add_variable(f"default.{parameters[at] if at >= 0 else i}", _constant(x), fn, i)
        for key in (named := fn.__kwdefaults__ or {}):
            self._add_variable(f"default.{key}", functools.partial(named.get, key), named, (str, key))
        if is_user_code(fn):
            inside = fn.__dict__
            self._add_place(f"{name} attributes", inside.__len__, len(inside))
            self._add_variable(f"{name}.__dict__", _constant(inside), fn, "__dict__")
        elif (inner := fn.__dict__.get("__wrapped__")) is not None:
            self._add_variable("__wrapped__", _constant(inner), fn, "__wrapped__")
        for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            get = functools.partial(cell_content, cell)
            self.readers.setdefault(variable, code)
            self._add_variable(variable, get, cell, 0)
            self._add_module_names(variable, get(), code)
        if "type" in (names := _globals(fn)) or not is_user_code(fn):
            self._add_type_space(fn)
        if is_user_code(fn):
            self.seeds |= not _SEEDING.isdisjoint(_attributes(code))
            appended, read = _uses(code)
            self._appended |= appended
            self._read |= read
            if "type" in names and fn.__name__ not in _OBJECT_METHODS:
                self.exact = True
                self.rates |= "param_groups" in _attributes(code) or "lr" in code.co_consts
            for variable in (*names, *(x for x in words(code) if x in fn.__globals__)):
                self._add_global(variable, fn.__globals__, code)
            for module in (*_instruction_names(code, "IMPORT_NAME"), *_modules_in_texts(code)):
                self._add_module_names(module, sys.modules.get(module), code)

    def _add_type_space(self, fn: types.FunctionType) -> None:
        space = fn.__globals__
        if not is_internal(fn.__code__.co_filename) and not has_own_type(space):
            self.type_spaces[id(space)] = space

    def _add_global(self, name: str, space: dict[str, Any], code: types.CodeType) -> None:
        get = functools.partial(_own_type, space) if name == "type" else functools.partial(space.get, name)
        if (name not in space or get() is None) and hasattr(builtins, name):
            if self._is_new(id(space), name):
                self._add_place(name, get, None)
            return
        self.readers.setdefault(name, code)
        self._add_variable(name, get, space, (str, name))
        self._add_module_names(name, get(), code)

    def _add_module_names(self, name: str, space: Any, code: types.CodeType) -> None:
        """Adds the names of one of the user's modules or classes that code may read; all, if a module is a value."""
        if isinstance(space, types.ModuleType | type) and is_user_code(space) and self._is_new(id(space), id(code)):
            if isinstance(space, types.ModuleType) and not _values(code).isdisjoint((name, name.rpartition(".")[2])):
                self.variables.append(Variable(name, _constant(space), space, "__dict__"))
            for inner in (*_attributes(code), "__getattr__"):
                if inner in vars(space):
                    get = functools.partial(vars(space).get, inner)
                    self._add_variable(f"{name}.{inner}", get, space, inner)
                    self._add_module_names(f"{name}.{inner}", get(), code)

    def _add_variable(self, name: str, get: Getter, container: Any, key: Any) -> None:
        if not self._is_new(id(container), key):
            return
        now = get()
        if isinstance(now, types.FunctionType | types.ModuleType | type):
            self._add_place(name, get, now)
            if isinstance(now, types.FunctionType) or (isinstance(now, type) and is_user_code(now)):
                self._todo.append(now)
        else:
            self.variables.append(Variable(name, get, container, key))

    def _add_place(self, name: str, get: Getter, now: Any) -> None:
        self._places.append((name, get, now))


class CodeReadsCache:
    """Caches the `CodeReads` of each set of functions and classes."""

    def __init__(self) -> None:
        self._by_code: BoundedCache[Any, tuple[CodeReads, ...]] = BoundedCache(64)

    def get(self, code: Iterable[Any], before: CodeReads | None) -> CodeReads:
        """Returns the `CodeReads` of `code`, without the variables that `before` has."""
        code = tuple(code)
        key = (before, *map(id, code))  # the cached reads keep these objects alive, so the ids stay theirs
        cached = self._by_code.get(key, ())
        for reads in cached:
            if reads.is_current():
                return reads
        reads = CodeReads(code, before)
        self._by_code[key] = (reads, *cached[:7])
        return reads


def _wrapped_functions(x: Any) -> Iterator[types.FunctionType]:
    """Yields the functions in an attribute of a class: itself, or those that a descriptor wraps."""
    parts = [getattr(x, name, None) for name in _WRAPPED] if _is_descriptor(x) else []
    inner = (x, instance_dict(x).get("__wrapped__"), *parts)
    yield from (fn for fn in inner if isinstance(fn, types.FunctionType))


def _is_descriptor(x: Any) -> bool:
    """Returns whether a value in a class computes an attribute instead of being one."""
    if isinstance(x, functools._lru_cache_wrapper) or is_user_code(type(x)):  # a user's descriptor has state
        return False
    return inspect.isroutine(x) or isinstance(x, _DESCRIPTORS) or inspect.isdatadescriptor(x)


_WRAPPED = ("__func__", "__wrapped__", "func", "fget", "fset")
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
_SEEDING = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})
_OBJECT_METHODS = frozenset({"__repr__", "__str__", "__eq__", "__hash__", "__reduce__", "__reduce_ex__", "__format__"})


def _own_type(space: dict[str, Any]) -> Any:
    """Returns the global variable `type`, if it is the user's."""
    return space["type"] if has_own_type(space) else None


def _globals(fn: types.FunctionType) -> tuple[str, ...]:
    return _instruction_names(fn.__code__, "LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")


@functools.lru_cache(1 << 12)
def _attributes(code: types.CodeType) -> tuple[str, ...]:
    names = _instruction_names(code, ATTRIBUTE, "IMPORT_FROM", "IMPORT_NAME", "STORE_ATTR")
    return tuple(dict.fromkeys(part for name in names for part in name.split(".")))


@functools.lru_cache(1 << 12)
def _values(code: types.CodeType) -> frozenset[str]:
    """Returns the names that code uses as whole values: `m` in `getattr(m, k)`, `m.__dict__` and `vars(m)`."""
    steps = [*itertools.pairwise(instructions(code))]
    names = {
        str(x.arg)
        for x, then in steps
        if x.does.startswith(READS) and (then.does != ATTRIBUTE or then.arg == "__dict__")
    }
    names |= {x.arg for x, then in steps if x.does == "IMPORT_NAME" and then.arg in names}
    inside = (_values(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
    return frozenset(names).union(_modules_in_texts(code), *inside)


@functools.lru_cache(1 << 12)
def _uses(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of variables and attributes that code appends to, and of those that it reads.

    It appends to `log` in `self.log.append(x)` and in `self.log[k].append(x)`. A string constant counts as read, since
    it may be a name for `getattr`. Code that reads whole objects reads everything, `*`.
    """
    steps = instructions(code)
    appended: set[str] = set()
    read: set[str] = set()
    for i, step in enumerate(steps):
        if step.does.startswith("LOAD") and step.does not in _NO_READS and isinstance(step.arg, str):
            then = i + 1
            if [x.does for x in steps[i + 2 : i + 3]] == [ITEM] and steps[then].does.startswith("LOAD"):
                then += 2  # skips the index
            appends = any(x.does == ATTRIBUTE and x.arg in _APPENDING for x in steps[then : then + 1])
            (appended if appends else read).add(step.arg)
    texts = [y for x in code.co_consts for y in (x if isinstance(x, tuple) else (x,)) if isinstance(y, str)]
    read |= {part for text in texts for part in text.split(".")}
    if not _READS_ALL.isdisjoint(code.co_names):
        read.add("*")
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        a, r = _uses(inner)
        appended, read = appended | a, read | r
    return frozenset(appended), frozenset(read)


_READS_ALL = frozenset({"vars", "__dict__", "getattr", "__getattribute__", "attrgetter", "repr", "locals", "globals"})
_NO_READS = ("LOAD_CONST", "LOAD_CLOSURE")
_APPENDING = ("append", "extend", "insert")


def _modules_in_texts(code: types.CodeType) -> Iterator[str]:
    """Yields the modules that code names in a text: `import_module("settings")`, `sys.modules["settings"]`."""
    if not _IMPORTERS.isdisjoint(code.co_names):
        yield from (x for x in code.co_consts if isinstance(x, str) and x in sys.modules)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _modules_in_texts(inner)


_IMPORTERS = frozenset({"modules", "import_module", "__import__"})


@functools.lru_cache(1 << 12)
def _instruction_names(code: types.CodeType, *kinds: str) -> tuple[str, ...]:
    """Returns the names in instructions of these kinds, also in functions defined inside the code."""
    names = [step.arg for step in instructions(code) if step.does in kinds]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _instruction_names(inner, *kinds)
    return tuple(dict.fromkeys(names))


def _load(code: types.CodeType, name: str, attribute: str) -> tuple[types.CodeType, int] | None:
    """Returns the code and line, in `code` or inside it, that load `name.attribute`, or else `name`."""
    first, loaded = None, False
    for does, arg, line in instructions(code):
        if loaded and arg == attribute:
            return code, line
        loaded = does.startswith("LOAD") and arg == name
        if loaded and first is None and does != "LOAD_CLOSURE":
            first = code, line
    inner = (_load(x, name, attribute) for x in code.co_consts if isinstance(x, types.CodeType))
    return first or next(filter(None, inner), None)


def _constant(x: Any) -> Getter:
    return lambda: x
