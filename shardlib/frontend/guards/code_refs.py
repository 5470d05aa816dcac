"""What code may read beside its arguments: the variables around it, the globals and the user's modules that it names,
and the same of every function and class that is found there.

Code is a function or a class: its methods, and what stands in it. It is gone through once; after that, a look at each
function's place tells whether another one stands there now.
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
from shardlib.frontend.guards.attributes import content, own
from shardlib.frontend.guards.bytecode import ATTRIBUTE, ITEM, READS, instructions, words
from shardlib.frontend.guards.users_code import is_users

Getter = Callable[[], Any]


class Variable(NamedTuple):
    """A variable that some code reads: what it is called, its value now, who holds it, and under which key."""

    name: str
    get: Getter
    holder: Any
    key: Any


class Reach:
    """The variables that some code reads, and the functions that it calls by name.

    `exact`: some of it asks for `type(x)`, which nothing but a number itself answers right: numbers are constants;
    `rates`: and it knows of optimizers, so that learning rates are, too.
    `seeds`: some of it names a method by which generators are seeded. `reads`: names of what it reads beside appending
    to it, `*` where that may be anything; `logs`: of what it only appends to.
    Two of these are equal only if they are one: it stands for its functions in the key of a call.
    """

    def __init__(self, code: Sequence[Any], before: Reach | None = None) -> None:
        self.code, self.before = tuple(code), before
        self.exact = self.rates = self.seeds = False
        self.type_spaces: dict[int, dict[str, Any]] = {}  # globals of code that may ask for `type(x)`, by their ids
        self.variables: list[Variable] = []
        self._seen: set[Any] = set() if before is None else set(before._seen)
        self.readers: dict[str, types.CodeType] = {}  # by variable
        self._appended: set[str] = set() if before is None else set(before._appended)
        self._read: set[str] = set() if before is None else set(before._read)
        self._places: list[tuple[str, Getter, Any]] = []
        self._functions: list[tuple[types.FunctionType, Any, Any, Any]] = []  # with their parts
        self._todo = list(code)
        while self._todo:
            self._go_through(self._todo.pop(0))
        self._found = [(get, x) for _, get, x in self._places]
        self.reads = frozenset(self._read)
        self.logs = frozenset() if "*" in self.reads else frozenset(self._appended - self.reads)

    def is_current(self) -> bool:
        """Whether all its functions are still those that were found."""
        for fn, code, defaults, named in self._functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ is not named:
                return False
        for get, x in self._found:  # noqa: SIM110  at every call
            if get() is not x:
                return False
        return True

    def replaced(self, old: Reach) -> list[str]:
        """The functions that are others than in `old`."""
        before, now = dict(old._named()), dict(self._named())
        return [name.partition(" ")[0] for name, x in now.items() if before.get(name, x) is not x]

    def _named(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, x) for name, _, x in self._places)
        for fn, *parts in self._functions:
            yield from ((f"{fn.__qualname__} {i}", part) for i, part in enumerate(parts))

    def line(self, name: str, attribute: str) -> tuple[types.CodeType, int] | None:
        """Where a variable is read, and this attribute of it, if it is there."""
        return None if name not in self.readers else _load(self.readers[name], name, attribute)

    def _is_new(self, *what: Any) -> bool:
        known = len(self._seen)
        self._seen.add(what)
        return len(self._seen) > known

    def _go_through(self, code: Any) -> None:
        if not self._is_new(id(code)):
            return
        if isinstance(code, types.FunctionType):
            self._function(code)
            return
        if is_users(type(code)):
            self._todo.append(type(code))  # a metaclass has what its classes have not
        for kind in code.__mro__:
            if is_users(kind):
                self._class(kind)
            elif isinstance(forward := kind.__dict__.get("forward"), types.FunctionType):
                self.exact |= "type" in _globals(forward) and not is_internal(forward.__code__.co_filename)
                self._asks_type(forward)

    def _class(self, kind: type) -> None:
        if not self._is_new("class", id(kind)):
            return
        inside = vars(kind)
        name = kind.__qualname__
        self._place(f"{name} bases", lambda: kind.__mro__, kind.__mro__)
        for get in (lambda: min(len(inside), 255), lambda: next(reversed(inside), None)):  # what is new comes last
            self._place(f"{name} attributes", get, get())
        get = functools.partial(inside.get, "__module__")  # whoever has no attribute yet may get one
        self._variable(f"{name}.__module__", get, kind, "__module__")
        for key, x in list(inside.items()):
            functions = [*_functions(x)]
            self._todo += functions
            get = functools.partial(inside.get, key)
            if functions:
                self._place(f"{name}.{key}", get, x)
            if not (key.startswith("__") and key.endswith("__")) and not _is_descriptor(x):
                self._variable(f"{name}.{key}", get, kind, key)

    def _function(self, fn: types.FunctionType) -> None:
        name, code = fn.__qualname__, fn.__code__
        self._functions.append((fn, code, fn.__defaults__, fn.__kwdefaults__))
        parameters, defaults = code.co_varnames[: code.co_argcount], fn.__defaults__ or ()
        for i, x in enumerate(defaults):
            at = i + len(parameters) - len(defaults)
            self._variable(f"default.{parameters[at] if at >= 0 else i}", _constant(x), fn, i)  # read by that name
        for key in (named := fn.__kwdefaults__ or {}):
            self._variable(f"default.{key}", functools.partial(named.get, key), named, (str, key))
        if is_users(fn):
            inside = fn.__dict__
            self._place(f"{name} attributes", inside.__len__, len(inside))
            self._variable(f"{name}.__dict__", _constant(inside), fn, "__dict__")
        elif (inner := fn.__dict__.get("__wrapped__")) is not None:
            self._variable("__wrapped__", _constant(inner), fn, "__wrapped__")
        for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            get = functools.partial(content, cell)
            self.readers.setdefault(variable, code)
            self._variable(variable, get, cell, 0)
            self._space(variable, get(), code)
        if "type" in (names := _globals(fn)) or not is_users(fn):
            self._asks_type(fn)
        if is_users(fn):
            self.seeds |= not _SEEDING.isdisjoint(_attributes(code))
            appended, read = _uses(code)
            self._appended |= appended
            self._read |= read
            if "type" in names and fn.__name__ not in _TEXTS:
                self.exact = True
                self.rates |= "param_groups" in _attributes(code) or "lr" in code.co_consts
            for variable in (*names, *(x for x in words(code) if x in fn.__globals__)):
                self._global(variable, fn.__globals__, code)
            for module in (*_named(code, "IMPORT_NAME"), *_spelt(code)):
                self._space(module, sys.modules.get(module), code)

    def _asks_type(self, fn: types.FunctionType) -> None:
        space = fn.__globals__
        if not is_internal(fn.__code__.co_filename) and not has_own_type(space):
            self.type_spaces[id(space)] = space

    def _global(self, name: str, space: dict[str, Any], code: types.CodeType) -> None:
        get = functools.partial(_own_type, space) if name == "type" else functools.partial(space.get, name)
        if (name not in space or get() is None) and hasattr(builtins, name):
            if self._is_new(id(space), name):
                self._place(name, get, None)
            return
        self.readers.setdefault(name, code)
        self._variable(name, get, space, (str, name))
        self._space(name, get(), code)

    def _space(self, name: str, space: Any, code: types.CodeType) -> None:
        """What code may read of one of the user's modules or classes, by its names; or all, of a module as a value."""
        if isinstance(space, types.ModuleType | type) and is_users(space) and self._is_new(id(space), id(code)):
            if isinstance(space, types.ModuleType) and not _values(code).isdisjoint((name, name.rpartition(".")[2])):
                self.variables.append(Variable(name, _constant(space), space, "__dict__"))
            for inner in (*_attributes(code), "__getattr__"):
                if inner in vars(space):
                    get = functools.partial(vars(space).get, inner)
                    self._variable(f"{name}.{inner}", get, space, inner)
                    self._space(f"{name}.{inner}", get(), code)

    def _variable(self, name: str, get: Getter, holder: Any, key: Any) -> None:
        if not self._is_new(id(holder), key):
            return
        now = get()
        if isinstance(now, types.FunctionType | types.ModuleType | type):
            self._place(name, get, now)
            if isinstance(now, types.FunctionType) or (isinstance(now, type) and is_users(now)):
                self._todo.append(now)
        else:
            self.variables.append(Variable(name, get, holder, key))

    def _place(self, name: str, get: Getter, now: Any) -> None:
        self._places.append((name, get, now))


class Reached:
    """The reaches of code, each made once for the same functions."""

    def __init__(self) -> None:
        self._known: BoundedCache[Any, tuple[Reach, ...]] = BoundedCache(64)

    def of(self, code: Iterable[Any], before: Reach | None) -> Reach:
        """What `code` reads beside what `before` does."""
        code = tuple(code)
        key = (before, *map(id, code))  # whose ids these are, the reach itself keeps alive
        known = self._known.get(key, ())
        for found in known:
            if found.is_current():
                return found
        made = Reach(code, before)
        self._known[key] = (made, *known[:7])
        return made


def _functions(x: Any) -> Iterator[types.FunctionType]:
    """The functions of what stands in a class."""
    inner = (x, own(x).get("__wrapped__"), *(getattr(x, name, None) for name in _PARTS if _is_descriptor(x)))
    yield from (fn for fn in inner if isinstance(fn, types.FunctionType))


def _is_descriptor(x: Any) -> bool:
    """Whether something in a class is a way to an attribute, and none itself."""
    if isinstance(x, functools._lru_cache_wrapper) or is_users(type(x)):  # a descriptor of the user's has a state
        return False
    return inspect.isroutine(x) or isinstance(x, _DESCRIPTORS) or inspect.isdatadescriptor(x)


_PARTS = ("__func__", "__wrapped__", "func", "fget", "fset")
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
_SEEDING = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})
_TEXTS = frozenset({"__repr__", "__str__", "__eq__", "__hash__", "__reduce__", "__reduce_ex__", "__format__"})


def _own_type(space: dict[str, Any]) -> Any:
    """Returns the global variable `type`, if it is the user's."""
    return space["type"] if has_own_type(space) else None


def _globals(fn: types.FunctionType) -> tuple[str, ...]:
    return _named(fn.__code__, "LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")


@functools.lru_cache(1 << 12)
def _attributes(code: types.CodeType) -> tuple[str, ...]:
    names = _named(code, ATTRIBUTE, "IMPORT_FROM", "IMPORT_NAME", "STORE_ATTR")
    return tuple(dict.fromkeys(part for name in names for part in name.split(".")))


@functools.lru_cache(1 << 12)
def _values(code: types.CodeType) -> frozenset[str]:
    """The names that code reads for more than one attribute: `m` in `getattr(m, k)`, `m.__dict__` and `vars(m)`."""
    steps = [*itertools.pairwise(instructions(code))]
    names = {
        str(x.arg)
        for x, then in steps
        if x.does.startswith(READS) and (then.does != ATTRIBUTE or then.arg == "__dict__")
    }
    names |= {x.arg for x, then in steps if x.does == "IMPORT_NAME" and then.arg in names}
    inside = (_values(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
    return frozenset(names).union(_spelt(code), *inside)


@functools.lru_cache(1 << 12)
def _uses(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of variables and attributes that code appends to, `log` in `self.log.append(x)`, or in `self.log[k]`, and
    that it reads.

    A text may be a name for `getattr`; code that looks at objects as a whole reads everything, `*`.
    """
    steps = instructions(code)
    appended: set[str] = set()
    read: set[str] = set()
    for i, step in enumerate(steps):
        if step.does.startswith("LOAD") and step.does not in _NO_READS and isinstance(step.arg, str):
            then = i + 1
            if [x.does for x in steps[i + 2 : i + 3]] == [ITEM] and steps[then].does.startswith("LOAD"):
                then += 2  # an item of it
            appends = any(x.does == ATTRIBUTE and x.arg in _APPENDING for x in steps[then : then + 1])
            (appended if appends else read).add(step.arg)
    texts = [y for x in code.co_consts for y in (x if isinstance(x, tuple) else (x,)) if isinstance(y, str)]
    read |= {part for text in texts for part in text.split(".")}
    if not _WHOLE.isdisjoint(code.co_names):
        read.add("*")
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        a, r = _uses(inner)
        appended, read = appended | a, read | r
    return frozenset(appended), frozenset(read)


_WHOLE = frozenset({"vars", "__dict__", "getattr", "__getattribute__", "attrgetter", "repr", "locals", "globals"})
_NO_READS = ("LOAD_CONST", "LOAD_CLOSURE")
_APPENDING = ("append", "extend", "insert")


def _spelt(code: types.CodeType) -> Iterator[str]:
    """Modules that code finds by their names in a text: `import_module("settings")`, `sys.modules["settings"]`."""
    if not _FINDERS.isdisjoint(code.co_names):
        yield from (x for x in code.co_consts if isinstance(x, str) and x in sys.modules)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _spelt(inner)


_FINDERS = frozenset({"modules", "import_module", "__import__"})


@functools.lru_cache(1 << 12)
def _named(code: types.CodeType, *kinds: str) -> tuple[str, ...]:
    """The names in instructions of these kinds, in functions defined inside it, too."""
    names = [step.arg for step in instructions(code) if step.does in kinds]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _named(inner, *kinds)
    return tuple(dict.fromkeys(names))


def _load(code: types.CodeType, name: str, attribute: str) -> tuple[types.CodeType, int] | None:
    """The line on which code, or code inside it, loads `name.attribute`, or else `name`."""
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
