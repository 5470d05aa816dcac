"""Describes the results of a traced function: strides, repeated tensors, and objects that hold tensors.

An object that is no pytree, such as a cache of keys and values, is taken apart by `pickle`, which asks of every object
inside whether another one stands for it. A tensor is a result of the program. An object that was there before the call,
or a generator, is itself. Each call of the program puts the object together again, with its own results.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import FakeTensor, pytree
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.tensor.sharded_tensor import user_attributes

if TYPE_CHECKING:
    from shardlib.frontend.traced_graph import ExtraOutputs


def output_strides(
    returned: Sequence[Any], after: ExtraOutputs, leaves: Sequence[Any]
) -> tuple[tuple[int, ...] | None, ...]:
    """Returns the strides of all outputs; a gradient has those of its tensor, as autograd would keep it."""
    own = [x.stride() if isinstance(x, torch.Tensor) else None for x in returned]
    at = len(own) - len(after.gradients)
    tensors = [leaves[leaf] for leaf, _ in after.gradients]
    kept = [torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride() for x in tensors]
    return (*own[:at], *(None for _ in (*after.written, *after.data)), *kept)


def refuse_attributes(named: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuses new attributes on stand-ins: they are lost when the trace is over.

    Each item is a name, the caller's tensor (None for a result), and its stand-in.
    """
    wrong = []
    for name, own, x in named:
        if type(x).__module__.partition(".")[0] == "torch" and (own is None or isinstance(own, torch.Tensor)):
            had, has = {} if own is None else user_attributes(own), user_attributes(x)
            changed = [k for k, y in had.items() if has.get(k, _GONE) is not y]
            changed += [k for k in has if k not in had and not k.startswith("_")]
            wrong += [f"{name}.{k}" for k in changed if k not in _FAKES]
    if wrong:
        raise ShardingError(
            "the traced function changes attributes of tensors",
            wrong,
            rule="only the values of arguments and results come back: a program runs without their attributes",
            remedy="return what the attribute says beside the tensor, and set it outside",
        )


_GONE = object()
_FAKES = frozenset(FakeTensor.__annotations__)  # attributes of fake tensors


def find_repeats(results: Sequence[Any]) -> dict[int, int]:
    """Maps the places of tensors that occur earlier to the earlier place."""
    first: dict[int, int] = {}
    places = {i: first.setdefault(id(x), i) for i, x in enumerate(results) if isinstance(x, torch.Tensor)}
    return {i: at for i, at in places.items() if i != at}


@dataclass(frozen=True, eq=False)
class Frame:
    """An object without its tensors: bytes, which refer to the `existing` objects by position."""

    text: bytes
    existing: tuple[Any, ...]


class ObjectResult:
    """A pytree node that stands for an object: its children are tensors; put together, it is the object again."""

    def __init__(self, tensors: list[Tensor], frame: Frame) -> None:
        self.tensors, self.frame = tensors, frame

    @staticmethod
    def take_apart(x: Any, existing: Mapping[int, Any]) -> ObjectResult | None:
        """Takes an object apart; None if pickle cannot: local classes, generators, numbers of a trace."""
        out = io.BytesIO()
        taken = _Apart(out, existing)
        try:
            taken.dump(x)
        except _FAULTS:
            return None
        tensors, objects = ([x for _, x in numbered.values()] for numbered in (taken.tensors, taken.before))
        return ObjectResult(tensors, Frame(out.getvalue(), tuple(objects)))


# Errors of pickle for objects that it does not support (local classes, locks, generators: the first three), and errors
# of classes whose `__reduce__` or `__getstate__` refuses.
_FAULTS = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError)


class _Apart(pickle.Pickler):
    def __init__(self, out: io.BytesIO, existing: Mapping[int, Any]) -> None:
        super().__init__(out)
        self.existing = existing
        self.tensors: dict[int, tuple[int, Tensor]] = {}
        self.before: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, x: Any) -> tuple[str, int] | None:
        if is_traced_number(x):
            raise pickle.PicklingError("a number of the trace")
        if isinstance(x, Tensor):
            return "tensor", _number(self.tensors, x)
        # None and classes are owners of nothing; a generator's state is its own, and no pickle's.
        was_there = self.existing.get(id(x)) is x and not isinstance(x, type | None)
        if was_there or isinstance(x, torch.Generator):
            return "known", _number(self.before, x)
        return None


def _number(met: dict[int, tuple[int, Any]], x: Any) -> int:
    """Returns the number of an object among those that were met, from 0."""
    return met.setdefault(id(x), (len(met), x))[0]


class _Together(pickle.Unpickler):
    def __init__(self, frame: Frame, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(frame.text))
        self.held = {"tensor": tensors, "known": frame.existing}

    def persistent_load(self, key: tuple[str, int]) -> Any:
        kind, at = key
        return self.held[kind][at]


def rebuild_object(tensors: list[Any], frame: Frame) -> Any:
    """Puts an object together from its tensors; with anything else in their places, returns its stand-in."""
    if all(isinstance(x, Tensor) for x in tensors):
        return _Together(frame, tensors).load()
    return ObjectResult(tensors, frame)


pytree.register_pytree_node(
    ObjectResult,
    lambda x: (x.tensors, x.frame),
    lambda tensors, frame: rebuild_object(list(tensors), frame),
    flatten_with_keys_fn=lambda x: ([(pytree.SequenceKey(i), y) for i, y in enumerate(x.tensors)], x.frame),
)
