"""State: what a call brings along that is no argument itself. Modules, objects and closures hold tensors and facts.

Every tensor that is found becomes an input of the program, read anew in each call: a parameter that was replaced or
filled since is seen. Everything else that is found (flags such as `training`, numbers, hooks, objects by identity) is
part of the key. What an object holds is looked at a few levels deep; what is deeper, or made by properties, is not.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardlib.tensors.tensor import ShardedTensor
from shardlib.tracing.numbers import is_given

Place = tuple[int, Any]  # id of an object (0: the closure), and a name in it

DEPTH = 4  # objects within objects
LONG = 1000  # items of a container; a longer one counts by identity and length


class State:
    """The tensors of one call beside its arguments, each once, with their places; facts go into the call's key.

    `kept` are the objects that the key knows by identity: as long as they live, nothing else has their ids. `grads` are
    the tensors whose `.grad` a trace can see, with what it is.
    """

    __slots__ = (
        *("_at", "_number", "_visited", "arrays", "changing", "found", "leaked"),
        *("grads", "kept", "own", "places", "tensors"),
    )

    def __init__(self, own: Any = None, changing: Collection[Place] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.places: list[tuple[Any, ...]] = []  # the name of each tensor, in parts
        self.kept: list[Any] = []
        self.grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.own = own  # the object whose method runs: it has a cache of its own, which must not keep it
        self.arrays = False  # whether numpy's are among the arguments
        self.leaked = False  # whether a number of a trace was found
        self.changing = changing  # what the function itself changes is not looked at
        self.found: dict[Place, tuple[Any, ...]] | None = None  # if a dict, what is known of each place
        self._number: dict[int, int] = {}
        self._visited: dict[int, int] = {}
        self._at: tuple[Any, ...] = ()

    @property
    def names(self) -> list[str]:
        """What each tensor is called: `net.head.weight`, `self.scales[0]`, `net.head.weight.grad`."""
        return ["".join(map(_part, place)).lstrip(".") for place in self.places]

    # Tensors --------------------------------------------------------------------------------------------------------

    def tensor(self, x: torch.Tensor, known: list[Any]) -> None:
        """A plain tensor among the arguments."""
        strides = x.stride() if x.layout is torch.strided else x.layout
        known.append((type(x), x.shape, strides, x.dtype, x.device, x.requires_grad))
        if x.requires_grad:
            self.gradient(x, known)

    def gradient(self, x: torch.Tensor, known: list[Any]) -> None:
        """The `.grad` of a tensor that requires one; results of other ops have none."""
        leaf = x.is_leaf
        known.append(leaf)
        for hooks in (x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None)):
            if hooks:
                for hook in hooks.values():
                    self._identity(hook, known)
        if leaf and torch.is_grad_enabled():
            self.grads.append((x, x.grad))
            if x.grad is None:
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
        if type(x) is ShardedTensor:
            known.append((x._form, x.requires_grad))
            if x.requires_grad:
                self.gradient(x, known)
        else:
            self.tensor(x, known)

    # Everything else ------------------------------------------------------------------------------------------------

    def fact(self, x: Any, known: list[Any]) -> None:
        """Something that counts by value where it can, by identity where not, and is never looked into."""
        known.append(type(x))
        if type(x) is float:
            known.append(x.hex())
            return
        if isinstance(x, tuple | list):  # (1,) and (True,) are equal
            known.append(len(x))
            for y in x:
                self.fact(y, known)
            return
        try:
            hash(x)
        except TypeError:
            self._identity(x, known)
        else:
            known.append(x)

    def object(self, x: Any, known: list[Any]) -> None:
        """An argument that is no tensor, number or container."""
        self.arrays |= type(x).__module__ == "numpy"
        self._value(x, known, 0)

    def named(self, name: str, x: Any, known: list[Any]) -> None:
        """Something that a function closes over."""
        self._at = (name,)
        self._attribute(0, name, x, known, -1)

    def _attribute(self, owner: int, name: Any, x: Any, known: list[Any], depth: int) -> None:
        """What an object, or a closure, holds under a name."""
        if self.changing and (owner, name) in self.changing:
            return
        start = len(known)
        known.append(name)
        self._value(x, known, depth + 1)
        if self.found is not None:
            deep = isinstance(x, (nn.Module, *_CONTAINERS)) or _is_object(x)
            self.found[owner, name] = (type(x), id(x)) if deep else tuple(known[start:])

    def _identity(self, x: Any, known: list[Any]) -> None:
        if x is self.own:
            known.append("self")
            return
        known.append(id(x))
        self.kept.append(x)

    def _value(self, x: Any, known: list[Any], depth: int) -> None:
        kind = type(x)
        if kind in _PLAIN:
            known.append(kind)
            known.append(x if kind is not float else x.hex())
        elif isinstance(x, torch.Tensor):
            self.lift(x, known)
        elif is_given(x):
            known.append(kind)
            self.leaked = True
        elif isinstance(x, _CONTAINERS):
            self._container(x, known, depth)
        elif isinstance(x, nn.Module):
            self._module(x, known, depth)
        elif isinstance(x, _OPAQUE):
            self._identity(x, known)
        else:
            self._object(x, known, depth)

    def _container(self, x: Any, known: list[Any], depth: int) -> None:
        known.append(type(x))
        owner = id(x)
        self._attribute(owner, _LENGTH, len(x), known, depth)
        if not x or self._again(x, known):
            return
        if len(x) > LONG or depth >= DEPTH:
            self._identity(x, known)
            return
        at = self._at
        if isinstance(x, dict):
            for k, y in list(x.items()):
                key = id(k) if isinstance(k, torch.Tensor) else k  # the optimizer's, say
                self._at = (*at, (key,))
                self._attribute(owner, (type(k), key), y, known, depth)
        elif isinstance(x, set | frozenset):
            for y in x:
                self.fact(y, known)
        else:
            for i, y in enumerate(x):
                self._at = (*at, (i,))
                self._attribute(owner, i, y, known, depth)
        self._at = at

    def _module(self, x: nn.Module, known: list[Any], depth: int) -> None:
        if self._again(x, known):
            return
        self._identity(x, known)
        at, owner = self._at, id(x)
        for k, y in _attributes(x):
            if k in ("_parameters", "_buffers", "_modules"):
                for name, z in y.items():
                    self._at = (*at, ".", name)
                    self._attribute(owner, name, z, known, depth - 1)  # however deep: it is all one module
            else:
                self._at = (*at, ".", k)
                self._attribute(owner, k, y, known, depth)
        self._at = at

    def _object(self, x: Any, known: list[Any], depth: int) -> None:
        """A user's object: itself, and the attributes that it has by now."""
        if self._again(x, known):
            return
        self._identity(x, known)
        if type(x).__module__ == "numpy" and hasattr(x, "tobytes"):
            known.append((x.dtype, x.shape, x.tobytes() if x.size <= LONG else None))
            return
        if depth >= DEPTH or not _is_object(x):
            return
        at, owner = self._at, id(x)
        for k, y in _attributes(x):
            self._at = (*at, ".", k)
            self._attribute(owner, k, y, known, depth)
        self._at = at

    def _again(self, x: Any, known: list[Any]) -> bool:
        """Whether `x` was looked into before: then it counts by its number."""
        number = self._visited.get(id(x))
        if number is not None:
            known.append(number)
            return True
        self._visited[id(x)] = len(self._visited)
        return False


def changed(before: Mapping[Place, Any], after: Mapping[Place, Any]) -> set[Place]:
    """The places that hold something else now, or are new."""
    return {place for place, now in after.items() if before.get(place, _ABSENT) != now}


_ABSENT = object()


def _is_object(x: Any) -> bool:
    """Whether `x` is a user's object, or an optimizer: its attributes count."""
    kind = type(x)
    return isinstance(x, _TRAINING) or kind.__module__.partition(".")[0] not in _LIBRARIES


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, in its dict and its slots, and what its class says beside."""
    own = getattr(x, "__dict__", {})
    yield from list(own.items())
    for kind in type(x).__mro__:
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        slots = kind.__dict__.get("__slots__", ())
        for k in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, k):
                yield k, getattr(x, k)
        for k, y in list(kind.__dict__.items()):
            if k not in own and not k.startswith("__") and (type(y) in _PLAIN or isinstance(y, torch.Tensor)):
                yield k, y


def _part(x: Any) -> str:
    return f"[{x[0]!r}]" if isinstance(x, tuple) else str(x)


_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size}
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_LENGTH = "len()"
_OPAQUE: tuple[Any, ...] = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.Generator,
)
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "shardlib", "functools", "threading", "logging"})
