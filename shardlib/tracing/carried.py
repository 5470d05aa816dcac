"""Objects that a traced function makes and returns: each call of the program makes one of its own, with its results.

A cache of keys and values, say, is no pytree. It is taken apart by `pickle`, which asks of every object inside whether
it stands for something else: a tensor is a result of the program, and what was there before the call is itself.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardlib.calls.numbers import is_given
from shardlib.internals import pytree


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
        except (pickle.PicklingError, TypeError, AttributeError):
            return None
        return Carried(list(taken.tensors.values()), Frame(out.getvalue(), tuple(taken.before.values())))


class _Apart(pickle.Pickler):
    def __init__(self, out: io.BytesIO, known: Mapping[int, Any]) -> None:
        super().__init__(out)
        self.known = known
        self.tensors: dict[int, Tensor] = {}
        self.before: dict[int, Any] = {}

    def persistent_id(self, x: Any) -> tuple[str, int] | None:
        if is_given(x):
            raise pickle.PicklingError("a number of the trace")
        for kind, found, is_one in (
            ("tensor", self.tensors, isinstance(x, Tensor)),
            ("known", self.before, self.known.get(id(x)) is x and not isinstance(x, type | None)),
        ):
            if is_one:
                found.setdefault(id(x), x)
                return kind, list(found).index(id(x))
        return None


class _Together(pickle.Unpickler):
    def __init__(self, frame: Frame, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(frame.text))
        self.held = {"tensor": tensors, "known": frame.known}

    def persistent_load(self, key: tuple[str, int]) -> Any:
        kind, at = key
        return self.held[kind][at]


pytree.register_pytree_node(
    Carried,
    lambda x: (x.tensors, x.frame),
    lambda tensors, frame: _Together(frame, list(tensors)).load(),
    flatten_with_keys_fn=lambda x: ([(pytree.SequenceKey(i), y) for i, y in enumerate(x.tensors)], x.frame),
)
