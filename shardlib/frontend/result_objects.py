"""Objects that a traced function makes and returns: each call of the program makes one of its own, with its results.

A cache of keys and values, say, is no pytree. It is taken apart by `pickle`, which asks of every object inside whether
it stands for something else: a tensor is a result of the program, and an object that was there before the call (or a
generator) is itself.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import pytree
from shardlib.frontend.guards.number_inputs import is_given


@dataclass(frozen=True, eq=False)
class Frame:
    """An object without its tensors: bytes, in which objects that were there before are `known` by position."""

    text: bytes
    known: tuple[Any, ...]


class Carried:
    """A pytree node that stands for an object: its children are tensors; put together, it is the object again."""

    def __init__(self, tensors: list[Tensor], frame: Frame) -> None:
        self.tensors, self.frame = tensors, frame

    @staticmethod
    def of(x: Any, known: Mapping[int, Any]) -> Carried | None:
        """None for what pickle cannot take apart: objects of local classes, generators, the numbers of a trace."""
        out = io.BytesIO()
        taken = _Apart(out, known)
        try:
            taken.dump(x)
        except _FAULTS:
            return None
        tensors, known_ones = ([x for _, x in found.values()] for found in (taken.tensors, taken.before))
        return Carried(tensors, Frame(out.getvalue(), tuple(known_ones)))


# What pickle raises of what it does not take (local classes, locks, generators: the first three), and what classes do
# whose `__reduce__` or `__getstate__` refuses.
_FAULTS = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError)


class _Apart(pickle.Pickler):
    def __init__(self, out: io.BytesIO, known: Mapping[int, Any]) -> None:
        super().__init__(out)
        self.known = known
        self.tensors: dict[int, tuple[int, Tensor]] = {}
        self.before: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, x: Any) -> tuple[str, int] | None:
        if is_given(x):
            raise pickle.PicklingError("a number of the trace")
        if isinstance(x, Tensor):
            return "tensor", _number(self.tensors, x)
        # None and classes are owners of nothing; a generator's state is its own, and no pickle's.
        was_there = self.known.get(id(x)) is x and not isinstance(x, type | None)
        if was_there or isinstance(x, torch.Generator):
            return "known", _number(self.before, x)
        return None


def _number(found: dict[int, tuple[int, Any]], x: Any) -> int:
    """The place of an object among those that were found."""
    return found.setdefault(id(x), (len(found), x))[0]


class _Together(pickle.Unpickler):
    def __init__(self, frame: Frame, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(frame.text))
        self.held = {"tensor": tensors, "known": frame.known}

    def persistent_load(self, key: tuple[str, int]) -> Any:
        kind, at = key
        return self.held[kind][at]


def together(tensors: list[Any], frame: Frame) -> Any:
    """The object, of these tensors; of anything else in their places only what stands for it."""
    if all(isinstance(x, Tensor) for x in tensors):
        return _Together(frame, tensors).load()
    return Carried(tensors, frame)


pytree.register_pytree_node(
    Carried,
    lambda x: (x.tensors, x.frame),
    lambda tensors, frame: together(list(tensors), frame),
    flatten_with_keys_fn=lambda x: ([(pytree.SequenceKey(i), y) for i, y in enumerate(x.tensors)], x.frame),
)
