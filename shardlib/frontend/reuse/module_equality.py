"""Compares two modules as a trace sees them, without their identities and the attributes that no code read.

A layer that stores its own index equals the next one if its code never reads the index. `EqualityWalk` is a
`StateWalk` without identities of modules and unread attributes. The tensors that it lifts from two equal modules
correspond in order. `record_reads` notes the attributes that code reads.
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

from shardlib.core.torch_internals.torch_private import CALL_HOOKS, MODULE_ATTRIBUTE, MODULE_DICTS
from shardlib.frontend.guards.closure import read_reached_code
from shardlib.frontend.guards.code_refs import CodeReadsCache
from shardlib.frontend.guards.flatten_call import read_arguments
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.value_kinds import can_change_unseen

AttributeRead = tuple[Any, ...]  # the path of a module in the walk, and the name of an attribute
ALL = "__dict__"


class EqualityWalk(StateWalk):
    """The walk that compares modules: `reads` are the attributes that count besides the structure; None for all.

    `opaque` is true if the walk meets something that calls do not repeat: hooks, iterators, random generators, classes
    with a `__getattribute__` of their own. `unread` is true if it meets hidden state. `modules` maps ids of modules to
    their paths, and `held` lists the modules.
    """

    def __init__(self, reads: Set[AttributeRead] | None) -> None:
        super().__init__()
        self.quick = False
        self.reads = reads
        self.modules: dict[int, tuple[Any, ...]] = {}  # paths by id
        self.held: list[nn.Module] = []
        self.opaque = False

    def read(self, x: Any, arguments: Sequence[Any], reached: CodeReadsCache) -> tuple[Any, ...]:
        """Returns all facts about `x`, its arguments, and the variables of the code of both."""
        facts: list[Any] = []
        self._visit_value(x, facts, 0)
        read_arguments(arguments, [], facts, self)
        read_reached_code(reached, None, self, facts)
        return tuple(facts)

    def _visit_value(self, x: Any, facts: list[Any], depth: int) -> None:
        if is_traced_number(x):
            facts.append(x.scalar)  # the expression of a traced number
        elif isinstance(x, contextvars.ContextVar):
            facts.append("now")
            self._visit_value(x.get(None), facts, depth + 1)
        elif isinstance(x, random.Random) or (hasattr(type(x), "__next__") and not isinstance(x, type)):
            self.opaque = True
        super()._visit_value(x, facts, depth)

    def _visit_object(self, x: Any, facts: list[Any], depth: int) -> None:
        self.unread |= can_change_unseen(x)
        super()._visit_object(x, facts, depth)

    def _add_identity(self, x: Any, facts: list[Any]) -> None:
        if not isinstance(x, nn.Module):
            super()._add_identity(x, facts)
            return
        facts.append(type(x))
        self.opaque |= type(x).__getattribute__ is not object.__getattribute__
        self.modules[id(x)] = self._path
        self.held.append(x)

    def _module_items(self, x: nn.Module) -> Iterator[tuple[str, Any]]:
        at, reads = self._path, self.reads
        whole = reads is None or (at, ALL) in reads
        for k, y in super()._module_items(x):
            if k in CALL_HOOKS:
                self.opaque |= bool(y)
            elif whole or k == "training" or k in MODULE_DICTS or (reads is not None and (at, k) in reads):
                yield k, y


@contextmanager
def record_reads(walk: EqualityWalk, reads: set[AttributeRead]) -> Iterator[None]:
    """While on, adds to `reads` the attributes of the walk's modules that code reads or sets."""
    get_attribute = MODULE_ATTRIBUTE.value

    def record(module: Any, name: str) -> Any:
        at = walk.modules.get(id(module))
        if at is not None and not (name == ALL and _is_torch_lookup(sys._getframe(1).f_code)):
            reads.add((at, ALL if name in _WHOLE else name))
        return get_attribute(module, name)

    with MODULE_ATTRIBUTE.holding(record):
        yield


def _is_torch_lookup(code: types.CodeType) -> bool:
    """Returns whether this is code of torch that looks an attribute up."""
    return code.co_filename == _MODULE and code.co_name in ("__getattr__", "__setattr__", "_call_impl")


_MODULE = nn.Module.__getattr__.__code__.co_filename
_WHOLE = frozenset({ALL, "__getstate__", "__reduce_ex__", "__reduce__", "__dir__"})  # they read all attributes
