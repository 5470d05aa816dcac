"""Jitted methods: each object has programs of its own, which are freed with it."""

from __future__ import annotations

import functools
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from shardlib.compiler.plan.plan import Plan
from shardlib.frontend.guards.children import BoundMethod
from shardlib.jit.call.program_cache import Programs

if TYPE_CHECKING:
    from shardlib.jit.jit import Jitted


class Method(BoundMethod):
    """A jitted method of one object: call it, or ask for its `plan`."""

    def __init__(self, function: Jitted, instance: Any) -> None:
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
        self._programs: MutableMapping[Any, Programs] = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def programs_of(self, instance: Any) -> Programs | None:
        """Returns the programs of one object's method; None if the object allows no weak references."""
        try:
            programs = self._programs.get(instance)
        except TypeError:  # it has slots
            return None
        if programs is None:
            with self._lock:  # another thread may have been first
                programs = self._programs.setdefault(instance, Programs())
        return programs
