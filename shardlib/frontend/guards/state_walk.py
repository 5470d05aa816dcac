"""Walks the objects that a call reaches: modules, objects and closures that hold tensors and facts.

Every tensor becomes an input of the program. Each call reads it anew, so a parameter that was replaced or filled since
has its new value. Everything else (flags such as `training`, numbers, hooks, objects by identity) is part of the key.
The walk goes many levels deep. It skips deeper values, and values that properties compute.
Numbers that the function changes (`MutablePlaces`) are inputs, too. Containers that it changes count by identity.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.torch_internals.torch_private import MODULE_DICTS, TENSOR_HOOKS
from shardlib.frontend.guards.children import (
    BoundMethod,
    Child,
    attribute_items,
    attributes,
    cell_content,
    instance_dict,
    items,
    name_attributes,
)
from shardlib.frontend.guards.mutable_places import NUMBERS, Item, Place
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.frontend.guards.reached_state import ReachedState, plain_form
from shardlib.frontend.guards.value_kinds import (
    BUILTIN,
    CONTAINERS,
    DICTS,
    OPAQUE,
    PLAIN,
    QUICK,
    count_clears,
    has_value_hash,
    hash_buffer,
    holds_parameters,
    is_cache,
    is_user_code,
    is_user_object,
    numpy_kind,
)
from shardlib.tensor.sharded_tensor import ShardedTensor, user_attributes

LONG = 1000  # items of a container; a longer one counts by its plain values
LONGEST = 20_000  # with more items, or other than plain values, it counts by identity and length


class StateWalk(ReachedState):
    """The state of one call, whose facts go into the call's key; an object that the walk skips counts by identity."""

    # Tensors --------------------------------------------------------------------------------------------------------

    def visit_argument_tensor(self, x: torch.Tensor, facts: list[Any], leaf: int) -> None:
        """Visits a tensor among the arguments, by its leaf number; a ShardedTensor's own form is already a fact."""
        self._path = (leaf,)
        if type(x) is not ShardedTensor:
            facts.append(plain_form(x))
        self._visit_tensor_extras(x, facts)
        self._path = ()

    def _visit_tensor_extras(self, x: torch.Tensor, facts: list[Any]) -> None:
        """Visits the attributes that user code set on a tensor, and its `.grad`."""
        if len(x.__dict__) > (OWN_ATTRIBUTES if type(x) is ShardedTensor else 0):
            self._visit_user_attributes(x, facts)
        if x.requires_grad or (x.grad is not None and self.changing.grads):
            facts.append(x.requires_grad)
            self._visit_gradient(x, facts)
        elif x.grad is not None:
            self.grads.append((x, x.grad))

    def _visit_user_attributes(self, x: torch.Tensor, facts: list[Any]) -> None:
        """Visits the attributes that user code set on a tensor."""
        if id(x) in self.changing.containers:
            self._add_identity(x, facts)
        self._visit_children(id(x), name_attributes(user_attributes(x).items()), facts, 0)

    def _visit_gradient(self, x: torch.Tensor, facts: list[Any]) -> None:
        """Visits the hooks and the `.grad` of a tensor; results of ops have a `.grad` if they retain it."""
        leaf = x.is_leaf
        facts.append(leaf)
        for hooks in (getattr(x, kind, None) for kind in TENSOR_HOOKS):
            for hook in hooks.values() if hooks else ():
                self.visit_hook(hook, facts)
        if leaf or x.retains_grad:
            self.grads.append((x, x.grad))
            if x.grad is None or not self.changing.grads:
                facts.append(None)
            else:
                at, self._path = self._path, (*self._path, ".grad")
                self.lift(x.grad, facts)
                self._path = at

    def lift(self, x: torch.Tensor, facts: list[Any]) -> None:
        """Makes a tensor an input; a tensor in several places is one input."""
        number = self._tensor_numbers.get(id(x))
        if number is not None:
            facts.append(number)
            return
        self._tensor_numbers[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.places.append(self._path)
        facts.append(x._form if type(x) is ShardedTensor else plain_form(x))
        self._visit_tensor_extras(x, facts)

    # Everything else ------------------------------------------------------------------------------------------------

    def add_fact(self, x: Any, facts: list[Any]) -> None:
        """Adds the facts of a value that is no input: it counts by value, by its contents, or by identity."""
        facts.append(type(x))
        if isinstance(x, tuple | list | dict):  # (1,) and (True,) are equal
            facts.append(len(x))
            for y in x.items() if isinstance(x, dict) else x:
                self.add_fact(y, facts)
            if type(x) not in BUILTIN:
                self._visit_attributes(x, facts, 0)
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            for k, y in attribute_items(x):
                facts.append(k)
                self.add_fact(y, facts)
        elif type(x) is float or isinstance(x, range | complex):
            facts.append(repr(x))
        elif isinstance(x, set | frozenset):
            facts.append(frozenset((type(y), y) for y in x))
        elif has_value_hash(x):
            facts.append(x)
        else:
            self._visit_value(x, facts, 0)

    def visit_argument_object(self, x: Any, facts: list[Any], leaf: int) -> None:
        """Visits an argument that is no tensor, number or container, by its leaf number."""
        self.arrays |= numpy_kind(x) == "ndarray"
        self._path = (leaf,)
        self._visit_value(x, facts, 0)
        self._path = ()

    def visit_variable(self, name: str, x: Any, facts: list[Any], container: Any = None, key: Any = None) -> None:
        """Visits a variable that a function reads, which `container` has under `key`."""
        if self.quick and type(x) in QUICK:  # a short cut of _visit_attribute
            facts += (key, type(x), x if type(x) is not float else x.hex())
            return
        self._path = (name,)
        self._visit_attribute(id(container), name if container is None else key, x, facts, -1)

    def visit_hook(self, x: Any, facts: list[Any]) -> None:
        self._visit_value(x, facts, 0)

    def visit_mode(self, x: Any, facts: list[Any], place: int) -> None:
        """Visits a mode around the call; each `with` may create a new one, so it counts by its attributes."""
        if is_user_object(x):
            self.add_code(type(x))
            self._path = (type(x).__name__,)
            own = (child for child in attributes(x) if child[0] not in ("inner", "old_dispatch_mode_flags"))
            self._visit_children(place, own, facts, 0)
            self._path = ()

    def _visit_attribute(self, owner: int, name: Any, x: Any, facts: list[Any], depth: int) -> None:
        """Visits the value under a name of an object or a closure."""
        facts.append(name)
        if not self.quick and type(x) in NUMBERS and (owner, name) in self.changing.numbers:
            facts.append(type(x))
            self.numbers[owner, name] = x, self._path
        elif not self.quick and (type(x) is tuple or type(x) is list) and (owner, name) in self.changing.inside:
            self._visit_container(x, facts, depth + 1, (owner, name))
        else:
            self._visit_value(x, facts, depth + 1)

    def _visit_value(self, x: Any, facts: list[Any], depth: int) -> None:
        kind = type(x)
        if kind in QUICK:
            facts.append(kind)
            facts.append(x if kind is not float else x.hex())
        elif kind in PLAIN:
            facts += (kind, repr(x))
        elif isinstance(x, torch.Tensor):
            self.lift(x, facts)
        elif is_traced_number(x) or kind is BoundedCache:
            facts.append(kind)
        elif isinstance(x, CONTAINERS):
            self._visit_container(x, facts, depth)
        elif isinstance(x, nn.Module):
            self._visit_module(x, facts, depth)
        elif kind is types.FunctionType:
            self._add_identity(x, facts)
            self.add_code(x)
        elif kind is types.MethodType or isinstance(x, BoundMethod):
            facts.append(kind)
            self._visit_value(x.__func__, facts, depth)
            self._visit_attribute(id(x.__func__), "__self__", x.__self__, facts, depth)
        elif isinstance(x, functools.partial):
            facts.append(kind)
            self._visit_attributes(x, facts, depth)
        elif kind in _BOUND and not isinstance(x.__self__, types.ModuleType | type | None):
            facts.append(x.__name__)
            self._visit_attribute(id(x.__self__), "__self__", x.__self__, facts, depth)
        elif kind is types.CellType:
            facts.append(kind)
            self._visit_attribute(id(x), 0, cell_content(x), facts, depth)
        elif kind is types.ModuleType and is_user_code(x):
            self._visit_user_module(x, facts, depth)
        elif isinstance(x, OPAQUE):
            self._add_identity(x, facts)
            if kind is torch.Generator:
                self.generators.append(x)
            if isinstance(x, type) and is_user_code(x):
                self.add_code(x)
        else:
            self._visit_object(x, facts, depth)

    def _visit_container(self, x: Any, facts: list[Any], depth: int, place: Place | None = None) -> None:
        """Visits a container; with a `place`, a tuple's items and a new list's numbers are places in its container."""
        facts.append(type(x))
        owner = id(x)
        if owner in self.changing.containers:
            self._add_identity(x, facts)
        if owner in self.changing.logs:
            self._add_identity(x, facts)
            if not self.notes:
                return
            facts = []
        self._visit_attribute(owner, LENGTH, len(x), facts, depth)
        if (not x and type(x) in BUILTIN) or ((place is None or type(x) is list) and self._was_visited(x, facts)):
            return
        if type(x) not in BUILTIN:
            self._visit_attributes(x, facts, depth)
        if (len(x) > LONG and not holds_parameters(x)) or self.is_far(depth):
            items = [*x.keys(), *x.values()] if isinstance(x, dict) else x
            if len(x) <= LONGEST and PLAIN.issuperset(map(type, items)):
                facts += (tuple(map(type, items)), tuple(y.hex() if type(y) is float else y for y in items))
            else:
                self.unread = True
                self._add_identity(x, facts)
            return
        self._visit_items(x, facts, depth, place)

    def _visit_items(self, x: Any, facts: list[Any], depth: int, place: Place | None) -> None:
        """Visits the items of a container, and those keys of a dict that do not compare by value."""
        at, owner = self._path, id(x)
        is_dict, is_set = isinstance(x, dict | types.MappingProxyType), isinstance(x, set | frozenset)
        if is_dict and (keys := [k for k in list(x) if isinstance(k, torch.Tensor)]):  # as in an optimizer's state
            self.keys += keys
        for key, name, y in items(x, self._tensor_numbers):
            self._path, container = at + name, owner
            if is_dict:
                if type(key[1]) not in PLAIN and not has_value_hash(key[1]):
                    self._visit_value(key[1], facts, depth + 1)
            elif is_set and not isinstance(y, torch.Tensor):
                self.add_fact(y, facts)
                continue
            elif place is not None and (
                type(x) is tuple or (type(y) in NUMBERS and (owner, key) not in self.changing.numbers)
            ):
                container, key = place[0], Item(place[1], key)
            self._visit_attribute(container, key, y, facts, depth)
        self._path = at

    def _visit_attributes(self, x: Any, facts: list[Any], depth: int) -> None:
        """Visits the attributes of an object of a user's class."""
        self.add_code(type(x))
        self._visit_children(id(x), attributes(x), facts, depth)

    def _visit_children(self, owner: int, children: Iterable[Child], facts: list[Any], depth: int) -> None:
        """Visits children of one object."""
        at = self._path
        for key, name, y in children:
            self._path = at + name
            self._visit_attribute(owner, key, y, facts, depth)
        self._path = at

    def _visit_user_module(self, x: types.ModuleType, facts: list[Any], depth: int) -> None:
        """Visits one of the user's Python modules that code uses as a value: it may read any name."""
        if self._was_visited(x, facts):
            return
        self._add_identity(x, facts)
        inner = [child for child in attributes(x) if not child[0].startswith("__")]
        if depth >= 1:
            inner = [child for child in inner if not isinstance(child[2], types.ModuleType)]
        self._visit_children(id(x), inner, facts, depth)

    def _visit_module(self, x: nn.Module, facts: list[Any], depth: int) -> None:
        if self._was_visited(x, facts):
            return
        self._add_identity(x, facts)
        self.add_code(type(x))
        at, owner = self._path, id(x)
        quick = self.quick
        for k, y in self._module_items(x):
            kind = type(y)
            if quick and kind in QUICK:  # a short cut of _visit_attribute
                facts += (k, kind, y if kind is not float else y.hex())
            elif quick and kind in DICTS and not y:
                facts += (k, kind, LENGTH, int, 0)
            elif k in MODULE_DICTS:
                for name, z in y.items():
                    self._path = (*at, ".", name)
                    self._visit_attribute(owner, name, z, facts, depth - 1)  # submodules do not count as levels
            else:
                self._path = (*at, ".", k)
                self._visit_attribute(owner, k, y, facts, depth)
        self._path = at

    def _module_items(self, x: nn.Module) -> Iterable[tuple[str, Any]]:
        """Returns the attributes of a module that count."""
        return attribute_items(x)

    def _visit_object(self, x: Any, facts: list[Any], depth: int) -> None:
        """Visits an object by identity and attributes, a numpy number by value, an array by its elements."""
        if (numpy := numpy_kind(x)) == "generic":
            facts.append((x.dtype, x.tobytes()))
            return
        if self._was_visited(x, facts):
            return
        self._add_identity(x, facts)
        if numpy:
            facts.append((x.dtype, x.shape, hash_buffer(x)))
            if x.dtype.hasobject and x.dtype.names is None and x.size <= LONG:
                for i, y in enumerate(x.flat):
                    self._visit_attribute(id(x), i, y, facts, depth)
            return
        if isinstance(x, bytearray | memoryview | array.array):
            facts.append(hash_buffer(memoryview(x)))
            return
        facts += [count_clears(x)] if is_cache(x) else []
        own = instance_dict(x)
        if own.get("__wrapped__") is not None:  # as in a jitted function
            built_in = own.get("made_with", own)  # user code set the other attributes
            for k in ("__wrapped__", *(k for k in own if k not in built_in)):
                self._visit_attribute(id(x), k, own[k], facts, depth)
        if is_user_object(x):
            if self.is_far(depth):
                self.unread = True
            else:
                self._visit_attributes(x, facts, depth)


_BOUND = frozenset({types.BuiltinMethodType, types.MethodWrapperType})
OWN_ATTRIBUTES = 2  # attributes of every ShardedTensor: its form and its shards
LENGTH = "len()"
