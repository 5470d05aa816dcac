"""State: what a call brings along that is no argument itself. Modules, objects and closures hold tensors and facts.

Every tensor that is found becomes an input of the program, read anew in each call: a parameter that was replaced or
filled since is seen. Everything else that is found (flags such as `training`, numbers, hooks, objects by identity) is
part of the key. What an object holds is looked at many levels deep; what is deeper, or made by properties, is not.

It is one walk, and so one class: hooks and attributes of tensors hold values, and values hold tensors.
Of what the function itself changes there (`Changing`), numbers are inputs, too, and containers count by identity.
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

from shardlib.core.torch_private import MODULE_DICTS, TENSOR_HOOKS
from shardlib.frontend.guards.attributes import Bound, attributes, content, own
from shardlib.frontend.guards.mutable_places import NUMBERS, Item, Place
from shardlib.frontend.guards.number_inputs import is_given
from shardlib.frontend.guards.place_names import key_name
from shardlib.frontend.guards.state_walk import ReachedState, plain_form
from shardlib.frontend.guards.users_code import is_users
from shardlib.frontend.guards.value_kinds import (
    BUILTIN,
    CONTAINERS,
    DICTS,
    OPAQUE,
    PLAIN,
    QUICK,
    digest,
    emptied,
    is_cache,
    is_its_own,
    is_object,
    is_of_parameters,
    of_numpy,
)
from shardlib.tensor.sharded_tensor import ShardedTensor, user_attributes

LONG = 1000  # items of a container; a longer one counts by its numbers and texts,
LONGEST = 20_000  # and beyond these, or with other things in it, by identity and length


class State(ReachedState):
    """The state of one call; facts go into the call's key. An object that is `unread` counts by identity."""

    # Tensors --------------------------------------------------------------------------------------------------------

    def argument(self, x: torch.Tensor, facts: list[Any], leaf: int) -> None:
        """A plain tensor among the arguments, the leaf of this number; of a ShardedTensor, what hangs on it."""
        self._at = (leaf,)
        if type(x) is not ShardedTensor:
            facts.append(plain_form(x))
        self._hanging(x, facts)
        self._at = ()

    def _hanging(self, x: torch.Tensor, facts: list[Any]) -> None:
        """Attributes that somebody gave a tensor, and its `.grad`."""
        if len(x.__dict__) > (OWN if type(x) is ShardedTensor else 0):
            self._marks(x, facts)
        if x.requires_grad or (x.grad is not None and self.changing.grads):
            facts.append(x.requires_grad)
            self._gradient(x, facts)
        elif x.grad is not None:
            self.grads.append((x, x.grad))

    def _marks(self, x: torch.Tensor, facts: list[Any]) -> None:
        """Attributes that somebody gave a tensor."""
        if id(x) in self.changing.holders:
            self._identity(x, facts)
        self._each(id(x), user_attributes(x).items(), facts, 0)

    def _gradient(self, x: torch.Tensor, facts: list[Any]) -> None:
        """The `.grad` of a tensor that requires one, or has one; results of ops have one where they retain it."""
        leaf = x.is_leaf
        facts.append(leaf)
        for hooks in (getattr(x, kind, None) for kind in TENSOR_HOOKS):
            for hook in hooks.values() if hooks else ():
                self.hook(hook, facts)
        if leaf or x.retains_grad:
            self.grads.append((x, x.grad))
            if x.grad is None or not self.changing.grads:
                facts.append(None)
            else:
                at, self._at = self._at, (*self._at, ".grad")
                self.lift(x.grad, facts)
                self._at = at

    def lift(self, x: torch.Tensor, facts: list[Any]) -> None:
        """A tensor that becomes an input, once, wherever it is found."""
        number = self._number.get(id(x))
        if number is not None:
            facts.append(number)
            return
        self._number[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.places.append(self._at)
        facts.append(x._form if type(x) is ShardedTensor else plain_form(x))
        self._hanging(x, facts)

    # Everything else ------------------------------------------------------------------------------------------------

    def fact(self, x: Any, facts: list[Any]) -> None:
        """Something that is no input: it counts by value, by what it holds, or by identity."""
        facts.append(type(x))
        if type(x) is float:
            facts.append(x.hex())
            return
        if isinstance(x, tuple | list | dict):  # (1,) and (True,) are equal
            facts.append(len(x))
            for y in x.items() if isinstance(x, dict) else x:
                self.fact(y, facts)
            if type(x) not in BUILTIN:
                self._own_part(x, facts, 0)
            return
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            for k, y in attributes(x):
                facts.append(k)
                self.fact(y, facts)
            return
        if isinstance(x, range | complex):
            facts.append(repr(x))
            return
        if isinstance(x, set | frozenset):
            facts.append(frozenset((type(y), y) for y in x))
            return
        if is_its_own(x):
            self._value(x, facts, 0)
        else:
            facts.append(x)

    def object(self, x: Any, facts: list[Any], leaf: int) -> None:
        """An argument that is no tensor, number or container: the leaf of this number."""
        self.arrays |= of_numpy(x) == "ndarray"
        self._at = (leaf,)
        self._value(x, facts, 0)
        self._at = ()

    def named(self, name: str, x: Any, facts: list[Any], holder: Any = None, key: Any = None) -> None:
        """Something that a function closes over, which `holder` has under `key`."""
        if self.quick and type(x) in QUICK:  # as _attribute does it
            facts += (key, type(x), x if type(x) is not float else x.hex())
            return
        self._at = (name,)
        self._attribute(id(holder), name if holder is None else key, x, facts, -1)

    def hook(self, x: Any, facts: list[Any]) -> None:
        """A hook that somebody registered: its code, and what that reads."""
        self._value(x, facts, 0)

    def mode(self, x: Any, facts: list[Any], place: int) -> None:
        """A mode around the call: each `with` may make another one, so it counts by what it holds."""
        if is_object(x):
            self.runs(type(x))
            for k, y in attributes(x):
                if k not in ("inner", "old_dispatch_mode_flags"):
                    self._at = (type(x).__name__, ".", k)
                    self._attribute(place, k, y, facts, 0)

    def _attribute(self, owner: int, name: Any, x: Any, facts: list[Any], depth: int) -> None:
        """Reads the value of an object, or a closure, under a name."""
        facts.append(name)
        if not self.quick and type(x) in NUMBERS and (owner, name) in self.changing.numbers:
            facts.append(type(x))
            self.numbers[owner, name] = x, self._at
        elif not self.quick and (type(x) is tuple or type(x) is list) and (owner, name) in self.changing.inside:
            self._container(x, facts, depth + 1, (owner, name))
        else:
            self._value(x, facts, depth + 1)

    def _value(self, x: Any, facts: list[Any], depth: int) -> None:
        kind = type(x)
        if kind in QUICK:
            facts.append(kind)
            facts.append(x if kind is not float else x.hex())
        elif kind in PLAIN:
            facts += (kind, repr(x))
        elif isinstance(x, torch.Tensor):
            self.lift(x, facts)
        elif is_given(x):
            facts.append(kind)
        elif isinstance(x, CONTAINERS):
            self._container(x, facts, depth)
        elif isinstance(x, nn.Module):
            self._module(x, facts, depth)
        elif kind is types.FunctionType:
            self._identity(x, facts)
            self.runs(x)
        elif kind is types.MethodType or isinstance(x, Bound):
            facts.append(kind)
            self._value(x.__func__, facts, depth)
            self._attribute(id(x.__func__), "__self__", x.__self__, facts, depth)
        elif isinstance(x, functools.partial):
            facts.append(kind)
            for k in ("func", "args", "keywords"):
                self._attribute(id(x), k, getattr(x, k), facts, depth)
            self._own_part(x, facts, depth)
        elif kind in _BOUND and not isinstance(x.__self__, types.ModuleType | type | None):
            facts.append(x.__name__)
            self._attribute(id(x.__self__), "__self__", x.__self__, facts, depth)
        elif kind is types.CellType:
            facts.append(kind)
            self._attribute(id(x), 0, content(x), facts, depth)
        elif kind is types.ModuleType and is_users(x):
            self._space(x, facts, depth)
        elif isinstance(x, OPAQUE):
            self._identity(x, facts)
            if kind is torch.Generator:
                self.generators.append(x)
            if isinstance(x, type) and is_users(x):
                self.runs(x)
        else:
            self._object(x, facts, depth)

    def _container(self, x: Any, facts: list[Any], depth: int, place: Place | None = None) -> None:
        """Items of a tuple at a `place` are places of its holder's, and so are numbers of a list that is replaced."""
        facts.append(type(x))
        owner = id(x)
        if owner in self.changing.holders:
            self._identity(x, facts)
        if owner in self.changing.logs:
            self._identity(x, facts)
            if not self.notes:
                return
            facts = []
        self._attribute(owner, LENGTH, len(x), facts, depth)
        if (not x and type(x) in BUILTIN) or ((place is None or type(x) is list) and self._again(x, facts)):
            return
        if type(x) not in BUILTIN:
            self._own_part(x, facts, depth)
        if (len(x) > LONG and not is_of_parameters(x)) or self.is_far(depth):
            items = [*x.keys(), *x.values()] if isinstance(x, dict) else x
            if len(x) <= LONGEST and PLAIN.issuperset(map(type, items)):
                facts += (tuple(map(type, items)), tuple(y.hex() if type(y) is float else y for y in items))
            else:
                self.unread = True
                self._identity(x, facts)
            return
        at = self._at
        if isinstance(x, dict | types.MappingProxyType):
            for i, (k, y) in enumerate(list(x.items())):
                key = k
                if isinstance(k, torch.Tensor):  # the optimizer's, say
                    key = id(k)
                    self.keys.append(k)
                self._at = (*at, (key_name(k, i, self._number),))
                if type(k) not in PLAIN and is_its_own(k):
                    self._value(k, facts, depth + 1)
                self._attribute(owner, (type(k), key), y, facts, depth)
        elif isinstance(x, set | frozenset):
            for i, y in enumerate(x):
                if isinstance(y, torch.Tensor):
                    self._at = (*at, (i,))
                    self._attribute(owner, i, y, facts, depth)
                else:
                    self.fact(y, facts)
        else:
            for i, y in enumerate(x):
                self._at = (*at, (i,))
                at_place: Place = owner, i
                by_place = type(x) is tuple or (type(y) in NUMBERS and at_place not in self.changing.numbers)
                if place is not None and by_place:
                    at_place = place[0], Item(place[1], i)
                self._attribute(*at_place, y, facts, depth)
        self._at = at

    def _own_part(self, x: Any, facts: list[Any], depth: int) -> None:
        """Reads the attributes of an object of a user's class."""
        self.runs(type(x))
        self._each(id(x), attributes(x), facts, depth)

    def _each(self, owner: int, items: Iterable[tuple[str, Any]], facts: list[Any], depth: int) -> None:
        """Attributes of one object."""
        at = self._at
        for k, y in items:
            self._at = (*at, ".", k)
            self._attribute(owner, k, y, facts, depth)
        self._at = at

    def _space(self, x: types.ModuleType, facts: list[Any], depth: int) -> None:
        """Reads one of the user's modules, used as a value: any of its names may be read."""
        if self._again(x, facts):
            return
        self._identity(x, facts)
        items = [(k, y) for k, y in vars(x).items() if not k.startswith("__")]
        self._each(id(x), [(k, y) for k, y in items if depth < 1 or not isinstance(y, types.ModuleType)], facts, depth)

    def _module(self, x: nn.Module, facts: list[Any], depth: int) -> None:
        if self._again(x, facts):
            return
        self._identity(x, facts)
        self.runs(type(x))
        at, owner = self._at, id(x)
        quick = self.quick
        for k, y in attributes(x):
            kind = type(y)
            if quick and kind in QUICK:  # as _attribute does it
                facts += (k, kind, y if kind is not float else y.hex())
            elif quick and kind in DICTS and not y:
                facts += (k, kind, LENGTH, int, 0)
            elif k in MODULE_DICTS:
                for name, z in y.items():
                    self._at = (*at, ".", name)
                    self._attribute(owner, name, z, facts, depth - 1)  # however deep: it is all one module
            else:
                self._at = (*at, ".", k)
                self._attribute(owner, k, y, facts, depth)
        self._at = at

    def _object(self, x: Any, facts: list[Any], depth: int) -> None:
        """A user's object: itself, and the attributes that it has by now. A number of numpy's: its value."""
        if (numpy := of_numpy(x)) == "generic":
            facts.append((x.dtype, x.tobytes()))
            return
        if self._again(x, facts):
            return
        self._identity(x, facts)
        if numpy:
            facts.append((x.dtype, x.shape, digest(x)))
            if x.dtype.hasobject and x.dtype.names is None and x.size <= LONG:
                for i, y in enumerate(x.flat):
                    self._attribute(id(x), i, y, facts, depth)
            return
        if isinstance(x, bytearray | memoryview | array.array):
            facts.append(digest(memoryview(x)))
            return
        facts += [emptied(x)] if is_cache(x) else []
        if (inner := own(x).get("__wrapped__")) is not None:  # a jitted function, say
            self._attribute(id(x), "__wrapped__", inner, facts, depth)
            built_in = own(x).get("made_with", ())  # what else a jitted function has, somebody gave it
            for k in [k for k in own(x) if built_in and k not in built_in]:
                self._attribute(id(x), k, own(x)[k], facts, depth)
        if is_object(x):
            if self.is_far(depth):
                self.unread = True
            else:
                self._own_part(x, facts, depth)


_BOUND = frozenset({types.BuiltinMethodType, types.MethodWrapperType})
OWN = 2  # attributes that a ShardedTensor has at least: its form and its pieces
LENGTH = "len()"
