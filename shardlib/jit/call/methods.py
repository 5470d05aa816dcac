"""Jitted methods: each object has programs of its own, which are freed with it."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol

from shardlib.compiler.plan.plan import Plan
from shardlib.frontend.guards.children import BoundMethod
from shardlib.jit.call.program_cache import Programs


class Function(Protocol):
    """The parts of a jitted function that its methods use; `own` is the object that owns the programs."""

    name: str
    fn: Any
    programs: Programs
    methods: Methods

    def plan_of(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan: ...

    def call(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Method(BoundMethod):
    """A jitted method of one object: call it, or ask for its `plan`."""

    def __init__(self, function: Function, instance: Any) -> None:
        super().__init__(function, instance)
        self.__name__, self.__doc__ = function.name, function.fn.__doc__
        own = function.methods.programs_of(instance)
        self.programs = own or function.programs
        self._own = None if own is None else instance

    @property
    def __wrapped__(self) -> Any:
        return functools.partial(self.__func__.fn, self.__self__)

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """As `Jitted.plan`."""
        plan: Plan = self.__func__.plan_of(self.programs, self._own, (self.__self__, *args), kwargs)
        return plan

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.call(self.programs, self._own, (self.__self__, *args), kwargs)

    @property
    def retraces(self) -> list[str]:
        """The reason of each compilation after the first."""
        return self.programs.retraces

    def __repr__(self) -> str:
        return f"<jit of {self.__func__.name} of a {type(self.__self__).__name__}>"


class Methods:
    """Programs by object, with weak references to the objects."""

    def __init__(self) -> None:
        self._programs: dict[int, tuple[weakref.ref[Any], Programs]] = {}
        self._lock = threading.Lock()

    def programs_of(self, instance: Any) -> Programs | None:
        """Returns the programs of one object's method; None if the object allows no weak references."""
        entry = self._programs.get(id(instance))
        if entry is None or entry[0]() is not instance:
            try:
                gone = weakref.ref(instance, functools.partial(_drop, self._programs, id(instance)))
            except TypeError:  # it has slots
                return None
            with self._lock:  # another thread may have been first
                entry = self._programs.get(id(instance))
                if entry is None or entry[0]() is not instance:
                    entry = self._programs[id(instance)] = gone, Programs()
        return entry[1]


def _drop(programs: dict[int, Any], number: int, _: object) -> None:
    programs.pop(number, None)
