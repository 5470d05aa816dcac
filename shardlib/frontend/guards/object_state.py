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
from shardlib.frontend.guards.attributes import attributes, content, own
from shardlib.frontend.guards.bound_methods import Bound
from shardlib.frontend.guards.lru_caches import emptied, is_cache
from shardlib.frontend.guards.number_inputs import is_given
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
    is_its_own,
    is_object,
    is_of_parameters,
    of_numpy,
)
from shardlib.frontend.side_effects.mutable_places import NUMBERS, Item, Place
from shardlib.frontend.side_effects.place_names import key_name
from shardlib.tensor.sharded_tensor import ShardedTensor, user_attributes

LONG = 1000  # items of a container; a longer one counts by its numbers and texts,
LONGEST = 20_000  # and beyond these, or with other things in it, by identity and length


class State(ReachedState):
    """What one call brings along; facts go into the call's key. What is `unread` counts by who it is."""

    # Tensors --------------------------------------------------------------------------------------------------------

    def argument(self, x: torch.Tensor, known: list[Any], leaf: int) -> None:
        """A plain tensor among the arguments, the leaf of this number; of a ShardedTensor, what hangs on it."""
        self._at = (leaf,)
        if type(x) is not ShardedTensor:
            known.append(plain_form(x))
        self._hanging(x, known)
        self._at = ()

    def _hanging(self, x: torch.Tensor, known: list[Any]) -> None:
        """Attributes that somebody gave a tensor, and its `.grad`."""
        if len(x.__dict__) > (OWN if type(x) is ShardedTensor else 0):
            self._marks(x, known)
        if x.requires_grad or (x.grad is not None and self.changing.grads):
            known.append(x.requires_grad)
            self._gradient(x, known)
        elif x.grad is not None:
            self.grads.append((x, x.grad))

    def _marks(self, x: torch.Tensor, known: list[Any]) -> None:
        """Attributes that somebody gave a tensor."""
        if id(x) in self.changing.holders:
            self._identity(x, known)
        self._each(id(x), user_attributes(x).items(), known, 0)

    def _gradient(self, x: torch.Tensor, known: list[Any]) -> None:
        """The `.grad` of a tensor that requires one, or has one; results of ops have one where they retain it."""
        leaf = x.is_leaf
        known.append(leaf)
        for hooks in (getattr(x, kind, None) for kind in TENSOR_HOOKS):
            for hook in hooks.values() if hooks else ():
                self.hook(hook, known)
        if leaf or x.retains_grad:
            self.grads.append((x, x.grad))
            if x.grad is None or not self.changing.grads:
                known.append(None)
            else:
                at, self._at = self._at, (*self._at, ".grad")
                self.lift(x.grad, known)
                self._at = at

    def lift(self, x: torch.Tensor, known: list[Any]) -> None:
        """A tensor that becomes an input, once, wherever it is found."""
        number = self._number.get(id(x))
        if number is not None:
            known.append(number)
            return
        self._number[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.places.append(self._at)
        known.append(x._form if type(x) is ShardedTensor else plain_form(x))
        self._hanging(x, known)

    # Everything else ------------------------------------------------------------------------------------------------

    def fact(self, x: Any, known: list[Any]) -> None:
        """Something that is no input: it counts by value, by what it holds, or by identity."""
        known.append(type(x))
        if type(x) is float:
            known.append(x.hex())
            return
        if isinstance(x, tuple | list | dict):  # (1,) and (True,) are equal
            known.append(len(x))
            for y in x.items() if isinstance(x, dict) else x:
                self.fact(y, known)
            if type(x) not in BUILTIN:
                self._own_part(x, known, 0)
            return
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            for k, y in attributes(x):
                known.append(k)
                self.fact(y, known)
            return
        if isinstance(x, range | complex):
            known.append(repr(x))
            return
        if isinstance(x, set | frozenset):
            known.append(frozenset((type(y), y) for y in x))
            return
        if is_its_own(x):
            self._value(x, known, 0)
        else:
            known.append(x)

    def object(self, x: Any, known: list[Any], leaf: int) -> None:
        """An argument that is no tensor, number or container: the leaf of this number."""
        self.arrays |= of_numpy(x) == "ndarray"
        self._at = (leaf,)
        self._value(x, known, 0)
        self._at = ()

    def named(self, name: str, x: Any, known: list[Any], holder: Any = None, key: Any = None) -> None:
        """Something that a function closes over, which `holder` has under `key`."""
        if self.quick and type(x) in QUICK:  # as _attribute does it
            known += (key, type(x), x if type(x) is not float else x.hex())
            return
        self._at = (name,)
        self._attribute(id(holder), name if holder is None else key, x, known, -1)

    def hook(self, x: Any, known: list[Any]) -> None:
        """A hook that somebody registered: its code, and what that reads."""
        self._value(x, known, 0)

    def mode(self, x: Any, known: list[Any], place: int) -> None:
        """A mode around the call: each `with` may make another one, so it counts by what it holds."""
        if is_object(x):
            self.runs(type(x))
            for k, y in attributes(x):
                if k not in ("inner", "old_dispatch_mode_flags"):
                    self._at = (type(x).__name__, ".", k)
                    self._attribute(place, k, y, known, 0)

    def _attribute(self, owner: int, name: Any, x: Any, known: list[Any], depth: int) -> None:
        """What an object, or a closure, holds under a name."""
        known.append(name)
        if not self.quick and type(x) in NUMBERS and (owner, name) in self.changing.numbers:
            known.append(type(x))
            self.numbers[owner, name] = x, self._at
        elif not self.quick and (type(x) is tuple or type(x) is list) and (owner, name) in self.changing.inside:
            self._container(x, known, depth + 1, (owner, name))
        else:
            self._value(x, known, depth + 1)

    def _value(self, x: Any, known: list[Any], depth: int) -> None:
        kind = type(x)
        if kind in QUICK:
            known.append(kind)
            known.append(x if kind is not float else x.hex())
        elif kind in PLAIN:
            known += (kind, repr(x))
        elif isinstance(x, torch.Tensor):
            self.lift(x, known)
        elif is_given(x):
            known.append(kind)
        elif isinstance(x, CONTAINERS):
            self._container(x, known, depth)
        elif isinstance(x, nn.Module):
            self._module(x, known, depth)
        elif kind is types.FunctionType:
            self._identity(x, known)
            self.runs(x)
        elif kind is types.MethodType or isinstance(x, Bound):
            known.append(kind)
            self._value(x.__func__, known, depth)
            self._attribute(id(x.__func__), "__self__", x.__self__, known, depth)
        elif isinstance(x, functools.partial):
            known.append(kind)
            for k in ("func", "args", "keywords"):
                self._attribute(id(x), k, getattr(x, k), known, depth)
            self._own_part(x, known, depth)
        elif kind in _BOUND and not isinstance(x.__self__, types.ModuleType | type | None):
            known.append(x.__name__)
            self._attribute(id(x.__self__), "__self__", x.__self__, known, depth)
        elif kind is types.CellType:
            known.append(kind)
            self._attribute(id(x), 0, content(x), known, depth)
        elif kind is types.ModuleType and is_users(x):
            self._space(x, known, depth)
        elif isinstance(x, OPAQUE):
            self._identity(x, known)
            if kind is torch.Generator:
                self.generators.append(x)
            if isinstance(x, type) and is_users(x):
                self.runs(x)
        else:
            self._object(x, known, depth)

    def _container(self, x: Any, known: list[Any], depth: int, place: Place | None = None) -> None:
        """Items of a tuple at a `place` are places of its holder's, and so are numbers of a list that is replaced."""
        known.append(type(x))
        owner = id(x)
        if owner in self.changing.holders:
            self._identity(x, known)
        if owner in self.changing.logs:
            self._identity(x, known)
            if not self.notes:
                return
            known = []
        self._attribute(owner, LENGTH, len(x), known, depth)
        if (not x and type(x) in BUILTIN) or ((place is None or type(x) is list) and self._again(x, known)):
            return
        if type(x) not in BUILTIN:
            self._own_part(x, known, depth)
        if (len(x) > LONG and not is_of_parameters(x)) or self.is_far(depth):
            items = [*x.keys(), *x.values()] if isinstance(x, dict) else x
            if len(x) <= LONGEST and PLAIN.issuperset(map(type, items)):
                known += (tuple(map(type, items)), tuple(y.hex() if type(y) is float else y for y in items))
            else:
                self.unread = True
                self._identity(x, known)
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
                    self._value(k, known, depth + 1)
                self._attribute(owner, (type(k), key), y, known, depth)
        elif isinstance(x, set | frozenset):
            for i, y in enumerate(x):
                if isinstance(y, torch.Tensor):
                    self._at = (*at, (i,))
                    self._attribute(owner, i, y, known, depth)
                else:
                    self.fact(y, known)
        else:
            for i, y in enumerate(x):
                self._at = (*at, (i,))
                here: Place = owner, i
                by_place = type(x) is tuple or (type(y) in NUMBERS and here not in self.changing.numbers)
                if place is not None and by_place:
                    here = place[0], Item(place[1], i)
                self._attribute(*here, y, known, depth)
        self._at = at

    def _own_part(self, x: Any, known: list[Any], depth: int) -> None:
        """What an object of a class of the user's has by itself."""
        self.runs(type(x))
        self._each(id(x), attributes(x), known, depth)

    def _each(self, owner: int, items: Iterable[tuple[str, Any]], known: list[Any], depth: int) -> None:
        """Attributes of one object."""
        at = self._at
        for k, y in items:
            self._at = (*at, ".", k)
            self._attribute(owner, k, y, known, depth)
        self._at = at

    def _space(self, x: types.ModuleType, known: list[Any], depth: int) -> None:
        """One of the user's modules, as a value: nobody knows which of its names are read."""
        if self._again(x, known):
            return
        self._identity(x, known)
        items = [(k, y) for k, y in vars(x).items() if not k.startswith("__")]
        self._each(id(x), [of for of in items if depth < 1 or not isinstance(of[1], types.ModuleType)], known, depth)

    def _module(self, x: nn.Module, known: list[Any], depth: int) -> None:
        if self._again(x, known):
            return
        self._identity(x, known)
        self.runs(type(x))
        at, owner = self._at, id(x)
        quick = self.quick
        for k, y in attributes(x):
            kind = type(y)
            if quick and kind in QUICK:  # as _attribute does it
                known += (k, kind, y if kind is not float else y.hex())
            elif quick and kind in DICTS and not y:
                known += (k, kind, LENGTH, int, 0)
            elif k in MODULE_DICTS:
                for name, z in y.items():
                    self._at = (*at, ".", name)
                    self._attribute(owner, name, z, known, depth - 1)  # however deep: it is all one module
            else:
                self._at = (*at, ".", k)
                self._attribute(owner, k, y, known, depth)
        self._at = at

    def _object(self, x: Any, known: list[Any], depth: int) -> None:
        """A user's object: itself, and the attributes that it has by now. A number of numpy's: its value."""
        if (numpy := of_numpy(x)) == "generic":
            known.append((x.dtype, x.tobytes()))
            return
        if self._again(x, known):
            return
        self._identity(x, known)
        if numpy:
            known.append((x.dtype, x.shape, digest(x)))
            if x.dtype.hasobject and x.dtype.names is None and x.size <= LONG:
                for i, y in enumerate(x.flat):
                    self._attribute(id(x), i, y, known, depth)
            return
        if isinstance(x, bytearray | memoryview | array.array):
            known.append(digest(memoryview(x)))
            return
        known += [emptied(x)] if is_cache(x) else []
        if (inner := own(x).get("__wrapped__")) is not None:  # a jitted function, say
            self._attribute(id(x), "__wrapped__", inner, known, depth)
            made = own(x).get("made_with", ())  # what else a jitted function has, somebody gave it
            for k in [k for k in own(x) if made and k not in made]:
                self._attribute(id(x), k, own(x)[k], known, depth)
        if is_object(x):
            if self.is_far(depth):
                self.unread = True
            else:
                self._own_part(x, known, depth)


_BOUND = frozenset({types.BuiltinMethodType, types.MethodWrapperType})
OWN = 2  # attributes that a ShardedTensor has at least: its form and its pieces
LENGTH = "len()"
