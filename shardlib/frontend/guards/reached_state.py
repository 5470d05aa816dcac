"""Holds the state that a call reaches besides its arguments: each tensor once, its place, and facts for the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardlib.core.cached import lazy_property
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.strided_only import refuse_unstrided
from shardlib.frontend.guards.code_refs import CodeReads
from shardlib.frontend.guards.mutable_places import MutablePlaces, Place
from shardlib.frontend.guards.place_names import format_place

_NOTHING_CHANGES = MutablePlaces()

NEAR, DEPTH = 12, 64  # levels that the walk visits completely; levels that it visits at all
FEW = 200  # objects that it visits between these levels


class ReachedState:
    """The tensors of one call besides its arguments, each once, with their places.

    `kept` are the objects that the key knows by identity: while they live, no other object gets their ids. `grads` are
    the tensors whose `.grad` a trace can see, each with its `.grad`. `definitions` are the reached functions and
    classes.
    """

    is_read = False  # True once the closure is read, too.
    unread = False  # True if an object is deeper, or a container longer, than the walk reads.
    arrays = False  # True if numpy arrays are among the arguments.
    exact = False  # True if some code needs real numbers, not traced ones,
    rates = False  # and if such code may read the settings of an optimizer.
    seeds = False  # True if some code names a method that seeds generators.
    logs: frozenset[str] = frozenset()  # names of lists that code only appends to,
    read_names: frozenset[str] = frozenset({"*"})  # and of values that it reads.
    notes = False  # True if the walk records all places.
    cut: Mapping[int, torch.Tensor] = {}  # results of ops outside, by the ids of their leaves in a trace
    roots: Sequence[str] = ()  # names of the leaves of the arguments
    _path: tuple[Any, ...] = ()
    _deep_objects = 0  # objects visited beyond `NEAR` levels

    # Most small calls need none of these. `places` are the names of the tensors, in parts. `numbers` are those that the
    # function changes, with their names. `keys` are tensors that are keys of dicts, as in an optimizer's state.
    # `type_spaces` are the globals of code that may ask for `type(x)`.
    places = lazy_property[list[tuple[Any, ...]]](lambda self: [])
    numbers = lazy_property[dict[Place, tuple[Any, tuple[Any, ...]]]](lambda self: {})
    keys = lazy_property[list[torch.Tensor]](lambda self: [])
    kept = lazy_property[list[Any]](lambda self: [])
    grads = lazy_property[list[tuple[torch.Tensor, torch.Tensor | None]]](lambda self: [])
    type_spaces = lazy_property[dict[int, dict[str, Any]]](lambda self: {})
    generators = lazy_property[list[torch.Generator]](lambda self: [])
    _tensor_numbers = lazy_property[dict[int, int]](lambda self: {})
    _visited = lazy_property[dict[int, int]](lambda self: {})

    def __init__(self, own: Any = None, changing: MutablePlaces | None = None) -> None:
        self.own = own  # the object whose method runs; its own cache of programs must not keep it alive
        self.changing = changing or _NOTHING_CHANGES
        self.quick = not self.changing.anything
        self.tensors: list[torch.Tensor] = []
        self.definitions: dict[int, Any] = {}

    def is_far(self, depth: int) -> bool:
        """Returns whether the walk skips an object at this depth; otherwise counts the object."""
        self._deep_objects += depth >= NEAR
        return depth >= DEPTH or self._deep_objects > FEW

    @property
    def names(self) -> list[str]:
        """The name of each tensor: `net.head.weight`, `self.scales[0]`, `net.head.weight.grad`."""
        return list(map(self.name, self.places))

    @property
    def leaf_names(self) -> list[str]:
        """The name of each of `leaves`."""
        return [*self.names, *(self.name(at) for _, at in self.numbers.values())]

    @property
    def leaves(self) -> list[Any]:
        """The inputs besides the arguments: tensors, then numbers."""
        return [*self.tensors, *(x for x, _ in self.numbers.values())]

    def name(self, place: tuple[Any, ...]) -> str:
        """Returns the name of a place."""
        return format_place(place, self.roots, self.places)

    def add_code(self, definition: Any) -> None:
        """Adds a function or a class that the call may run."""
        self.definitions.setdefault(id(definition), definition)

    def add_reads(self, reads: CodeReads) -> None:
        """Adds what the walk and the trace need to know of the code that the call may run."""
        self.exact |= reads.exact
        self.rates |= reads.rates
        self.seeds |= reads.seeds
        self.type_spaces.update(reads.type_spaces)
        self.logs, self.read_names = reads.logs, reads.reads

    def _add_identity(self, x: Any, facts: list[Any]) -> None:
        """Adds the id of `x` as a fact, and keeps `x` alive."""
        if x is self.own:
            facts.append("self")
            return
        facts.append(id(x))
        self.kept.append(x)

    def _was_visited(self, x: Any, facts: list[Any]) -> bool:
        """Returns whether the walk has visited `x` before, which then counts by its number; otherwise numbers it."""
        number = self._visited.get(id(x))
        if number is not None:
            facts.append(number)
            return True
        self._visited[id(x)] = len(self._visited)
        return False


def plain_form(x: torch.Tensor) -> tuple[Any, ...]:
    """Returns the facts about a plain tensor for the key. Raises `ShardingError` if it has no shape yet."""
    if nn.parameter.is_lazy(x):
        raise ShardingError(
            f"a jitted function is called with parameters that have no shape yet ({type(x).__name__})",
            rule="a program is for the shapes of its inputs",
            remedy="call the module once without jit, on the first batch: then its parameters have shapes",
        )
    try:
        strides = x.stride() if x.layout is torch.strided else x.layout
    except RuntimeError:  # a nested tensor has none
        refuse_unstrided("a jitted function", [("an argument, or what the function closes over,", x)])
        raise
    return type(x), x.shape, strides, x.dtype, x.device
