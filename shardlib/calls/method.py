"""Jitted methods: the programs of each object's, which go with the object."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from shardlib.calls.programs import Programs
from shardlib.plans.plan import Plan

if TYPE_CHECKING:
    from shardlib.jit import Jitted


class Method:
    """A jitted method of one object: call it, or ask for its `plan`."""

    def __init__(self, jitted: Jitted, instance: Any) -> None:
        self.jitted, self.instance = jitted, instance
        own = jitted.methods.programs_of(instance)
        self.programs = own or jitted.programs
        self._own = None if own is None else instance
        self.__wrapped__ = functools.partial(jitted.fn, instance)

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """As `Jitted.plan`."""
        return self.jitted._plan(self.programs, self._own, (self.instance, *args), kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.jitted._call(self.programs, self._own, (self.instance, *args), kwargs)

    @property
    def retraces(self) -> list[str]:
        """Why it was compiled again, each time."""
        return self.programs.retraces

    def __repr__(self) -> str:
        return f"<jit of {self.jitted.name} of a {type(self.instance).__name__}>"


class Methods:
    """Programs by object; an object is not kept."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Any], Programs]] = {}

    def programs_of(self, instance: Any) -> Programs | None:
        """The programs of one object's method; None where nobody can see it go."""
        known = self._of.get(id(instance))
        if known is None or known[0]() is not instance:
            try:
                gone = weakref.ref(instance, functools.partial(_drop, self._of, id(instance)))
            except TypeError:  # it has slots
                return None
            known = self._of[id(instance)] = gone, Programs()
        return known[1]


def _drop(of: dict[int, Any], number: int, _: object) -> None:
    of.pop(number, None)
