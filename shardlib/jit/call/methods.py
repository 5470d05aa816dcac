"""Jitted methods: the programs of each object's, which go with the object."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol

from shardlib.compiler.plan.plan import Plan
from shardlib.frontend.guards.bound_methods import Bound
from shardlib.jit.call.program_cache import Programs


class Function(Protocol):
    """A jitted function, as its methods use it: `own` is the object whose programs these are."""

    name: str
    fn: Any
    programs: Programs
    methods: Methods

    def plan_of(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan: ...

    def call(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Method(Bound):
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
        """Why it was compiled again, each time."""
        return self.programs.retraces

    def __repr__(self) -> str:
        return f"<jit of {self.__func__.name} of a {type(self.__self__).__name__}>"


class Methods:
    """Programs by object; an object is not kept."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], Programs]] = {}
        self._lock = threading.Lock()

    def programs_of(self, instance: Any) -> Programs | None:
        """The programs of one object's method; None where nobody can see it go."""
        known = self._of.get(id(instance))
        if known is None or known[0]() is not instance:
            try:
                gone = weakref.ref(instance, functools.partial(_drop, self._of, id(instance)))
            except TypeError:  # it has slots
                return None
            with self._lock:  # of threads that come first together, one makes them
                known = self._of.get(id(instance))
                if known is None or known[0]() is not instance:
                    known = self._of[id(instance)] = gone, Programs()
        return known[1]


def _drop(of: dict[int, Any], number: int, _: object) -> None:
    of.pop(number, None)
