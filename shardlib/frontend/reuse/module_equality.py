"""What two modules have to share to be one to a trace: all that jit's key knows of them, but who they are, and what
the code of the first never read.

A layer that knows its own number is like the next one as long as nobody asks it. `Alike` is the walk of `State` that
leaves out modules' identities and the attributes that were not read; what it lifts, in order, are the tensors of the
one in the places of the other's. `noted` is how reads are found.
"""

from __future__ import annotations

import contextvars
import random
import sys
import types
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardlib.core.torch_private import CALL_HOOKS, MODULE_ATTRIBUTE, MODULE_DICTS
from shardlib.frontend.guards.attributes import attributes
from shardlib.frontend.guards.closure import follow
from shardlib.frontend.guards.code_refs import Reached
from shardlib.frontend.guards.flatten_call import read
from shardlib.frontend.guards.number_inputs import is_given
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.value_kinds import is_closed

Read = tuple[Any, ...]  # the place of a module in the walk, and the name of an attribute
ALL = "__dict__"


class Alike(State):
    """`reads` are the attributes that count beside those that say how a module is built; None: all.

    `opaque`: something is there that calls do not repeat: hooks, iterators, generators of random numbers, attributes
    that are read by code of the class's own. `unread`: something is there that may change unseen. `modules` and `held`
    are the modules, each with its place.
    """

    def __init__(self, reads: Set[Read] | None) -> None:
        super().__init__()
        self.quick = False
        self.reads = reads
        self.modules: dict[int, tuple[Any, ...]] = {}  # by id, where each was found
        self.held: list[nn.Module] = []
        self.opaque = False

    def read(self, x: Any, given: Sequence[Any], reached: Reached) -> tuple[Any, ...]:
        """All facts about `x`, what it is `given`, and what the code of both closes over."""
        facts: list[Any] = []
        self._value(x, facts, 0)
        read(given, [], facts, self)
        follow(reached, None, self, facts)
        return tuple(facts)

    def _value(self, x: Any, facts: list[Any], depth: int) -> None:
        if is_given(x):
            facts.append(x.scalar)  # a number of the trace: which one
        elif isinstance(x, contextvars.ContextVar):
            facts.append("now")
            self._value(x.get(None), facts, depth + 1)
        elif isinstance(x, random.Random) or (hasattr(type(x), "__next__") and not isinstance(x, type)):
            self.opaque = True
        super()._value(x, facts, depth)

    def _object(self, x: Any, facts: list[Any], depth: int) -> None:
        self.unread |= is_closed(x)
        super()._object(x, facts, depth)

    def _module(self, x: nn.Module, facts: list[Any], depth: int) -> None:
        if self._again(x, facts):
            return
        facts.append(type(x))
        self.runs(type(x))
        self.opaque |= type(x).__getattribute__ is not object.__getattribute__
        at = self.modules[id(x)] = self._at
        self.held.append(x)
        reads = self.reads
        whole = reads is None or (at, ALL) in reads
        for k, y in attributes(x):
            if k in CALL_HOOKS:
                self.opaque |= bool(y)
            elif k in MODULE_DICTS:
                for name, z in y.items():
                    self._at = (*at, ".", name)
                    self._attribute(id(x), name, z, facts, depth - 1)
            elif whole or k == "training" or (reads is not None and (at, k) in reads):
                self._at = (*at, ".", k)
                self._attribute(id(x), k, y, facts, depth)
        self._at = at


@contextmanager
def noted(walk: Alike, reads: set[Read]) -> Iterator[None]:
    """Add to `reads` the attributes of the modules of `walk` that are read or set meanwhile."""
    ask = MODULE_ATTRIBUTE.value

    def asked(module: Any, name: str) -> Any:
        at = walk.modules.get(id(module))
        if at is not None and not (name == ALL and _is_torchs(sys._getframe(1).f_code)):
            reads.add((at, ALL if name in _WHOLE else name))
        return ask(module, name)

    with MODULE_ATTRIBUTE.holding(asked):
        yield


def _is_torchs(code: types.CodeType) -> bool:
    """Whether this is how torch looks an attribute up."""
    return code.co_filename == _MODULE and code.co_name in ("__getattr__", "__setattr__", "_call_impl")


_MODULE = nn.Module.__getattr__.__code__.co_filename
_WHOLE = frozenset({ALL, "__getstate__", "__reduce_ex__", "__reduce__", "__dir__"})  # who asks these, asks for all
