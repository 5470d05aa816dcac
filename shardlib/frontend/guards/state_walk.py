"""Holds the state that a call reaches: the tensors beside its arguments, each once, with their places, and facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardlib.core.errors import ShardingError
from shardlib.core.strided_only import refuse_unstrided
from shardlib.frontend.guards.mutable_places import Changing, Place
from shardlib.frontend.guards.place_names import name_of

_NOTHING_CHANGES = Changing()

T = TypeVar("T")


class _Own(Generic[T]):
    """An attribute that each object makes for itself, when it is first asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value: T = self.make()
        instance.__dict__[self.name] = value
        return value


NEAR, DEPTH = 12, 64  # objects within objects: so deep one looks into all of them, and so deep
FEW = 200  # into some


class ReachedState:
    """The tensors of one call beside its arguments, each once, with their places.

    `kept` are the objects that the key knows by identity: as long as they live, nothing else has their ids. `grads` are
    the tensors whose `.grad` a trace can see, with what it is. `code` are the functions and classes that were found.
    """

    is_read = False  # whether what the function closes over is in it
    unread = False  # whether something is there that is deeper, or longer, than one looks
    arrays = False  # whether numpy's are among the arguments
    exact = False  # whether some code wants numbers that are nothing else,
    rates = False  # and may ask for them among the settings of an optimizer
    seeds = False  # whether some code names a method by which generators are seeded
    logs: frozenset[str] = frozenset()  # names of what code only appends to,
    read_names: frozenset[str] = frozenset({"*"})  # and of what it reads otherwise
    notes = False  # whether all places are kept
    cut: Mapping[int, torch.Tensor] = {}  # while it is traced: what stands for a result of ops outside, by id
    roots: Sequence[str] = ()  # what the leaves of the arguments are called
    _at: tuple[Any, ...] = ()
    _far = 0  # how many were looked into behind `NEAR` others

    # A small call needs none of these.
    places = _Own[list[tuple[Any, ...]]](list)  # the name of each tensor, in parts
    numbers = _Own[dict[Place, tuple[Any, tuple[Any, ...]]]](dict)  # that the function changes: value and name
    keys = _Own[list[torch.Tensor]](list)  # of dicts: what an optimizer keeps of parameters
    kept = _Own[list[Any]](list)
    grads = _Own[list[tuple[torch.Tensor, torch.Tensor | None]]](list)
    type_spaces = _Own[dict[int, dict[str, Any]]](dict)  # globals of code that may ask for `type(x)`
    generators = _Own[list[torch.Generator]](list)
    _number = _Own[dict[int, int]](dict)
    _visited = _Own[dict[int, int]](dict)

    def __init__(self, own: Any = None, changing: Changing | None = None) -> None:
        self.own = own  # the object whose method runs: it has a cache of its own, which must not keep it
        self.changing = changing or _NOTHING_CHANGES
        self.quick = not self.changing.anything
        self.tensors: list[torch.Tensor] = []
        self.code: dict[int, Any] = {}

    def is_far(self, depth: int) -> bool:
        """Returns whether the walk skips objects at this depth; it counts the object as read otherwise."""
        self._far += depth >= NEAR
        return depth >= DEPTH or self._far > FEW

    @property
    def names(self) -> list[str]:
        """Names each tensor: `net.head.weight`, `self.scales[0]`, `net.head.weight.grad`."""
        return list(map(self.name, self.places))

    @property
    def leaf_names(self) -> list[str]:
        """Names each of `leaves`."""
        return [*self.names, *(self.name(at) for _, at in self.numbers.values())]

    @property
    def leaves(self) -> list[Any]:
        """Lists the inputs beside the arguments: tensors, then numbers."""
        return [*self.tensors, *(x for x, _ in self.numbers.values())]

    def name(self, place: tuple[Any, ...]) -> str:
        """Returns the name of a place."""
        return name_of(place, self.roots, self.places)

    def runs(self, code: Any) -> None:
        """A function or a class that the call may run."""
        self.code.setdefault(id(code), code)

    def _identity(self, x: Any, facts: list[Any]) -> None:
        if x is self.own:
            facts.append("self")
            return
        facts.append(id(x))
        self.kept.append(x)

    def _again(self, x: Any, facts: list[Any]) -> bool:
        """Returns whether the walk has been in `x`, which then counts by its number."""
        number = self._visited.get(id(x))
        if number is not None:
            facts.append(number)
            return True
        self._visited[id(x)] = len(self._visited)
        return False


def plain_form(x: torch.Tensor) -> tuple[Any, ...]:
    """Returns the facts about a plain tensor that a program is for. Raises `ShardingError` if it has no shape yet."""
    if nn.parameter.is_lazy(x):
        raise ShardingError(
            f"a jitted function is called with parameters that have no shape yet ({type(x).__name__})",
            rule="a program is for the shapes of its inputs",
            remedy="call the module once without jit, on the first batch: then its parameters have shapes",
        )
    try:
        strides = x.stride() if x.layout is torch.strided else x.layout
    except RuntimeError:  # a nested one has none
        refuse_unstrided("a jitted function", [("an argument, or what the function closes over,", x)])
        raise
    return type(x), x.shape, strides, x.dtype, x.device
