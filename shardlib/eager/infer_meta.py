"""What a call gives: how many results, their shapes, dtypes and strides.

Torch says it on meta tensors, which for many ops is Python code and costs more than all the rest of a first call.
So what a call gave is kept for calls like it: the same op on operands of the same dtypes and ranks, whose sizes differ
but are equal to each other, and to integers among the arguments, in the same places. Then dtypes, ranks and the order
in memory are the same, and shapes follow from the rule; torch is asked for them only where a rule reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardlib.eager.arg_slots import numbers_of
from shardlib.rules.rule import Meta
from shardlib.tensor.eager_cache import LOOSE, read
from shardlib.tensor.tensor_meta import Form, contiguous

Ask = Callable[[], Any]  # torch's answer, as meta tensors


@dataclass(frozen=True)
class Outcome:
    """The results of one call; None stands for what is no tensor."""

    metas: tuple[Meta | None, ...]
    kind: type | None  # None for one tensor, else tuple or list
    memory: tuple[tuple[tuple[int, ...], int], ...] | None  # strides and offsets; None: dense, in the order of the dims

    @staticmethod
    def of(answer: Any) -> Outcome:
        """The outcome that torch tells."""
        results, kind = ([answer], None) if not isinstance(answer, list | tuple) else (answer, type(answer))
        tensors = [x if isinstance(x, torch.Tensor) else None for x in results]
        metas = tuple(None if x is None else Meta(tuple(x.shape), x.dtype) for x in tensors)
        memory = tuple(((), 0) if x is None else (x.stride(), int(x.storage_offset())) for x in tensors)
        return Outcome(metas, kind, memory)

    @property
    def first(self) -> Meta:
        (first, *_) = self.metas
        assert first is not None, "the first result is a tensor"
        return first

    @property
    def dense(self) -> bool:
        """Whether every result lies in memory in the order of its dims."""
        return self.memory is None or all(
            m is None or (offset == 0 and strides == contiguous(m.shape))
            for m, (strides, offset) in zip(self.metas, self.memory, strict=True)
        )


class _Later(Meta):
    """A result whose dtype and rank are known, and whose shape torch is asked for when a rule reads it."""

    def __init__(self, dtype: torch.dtype, dims: int, ask: Callable[[], tuple[int, ...]]) -> None:
        self.__dict__.update(dtype=dtype, dims=dims, ask=ask)

    @property
    def rank(self) -> int:
        return int(self.__dict__["dims"])

    @property
    def at_hand(self) -> bool:
        return "shape" in self.__dict__

    def __getattr__(self, name: str) -> Any:  # for what is not set yet
        if name != "shape":
            raise AttributeError(name)
        shape = self.__dict__["shape"] = self.__dict__["ask"]()
        return shape


_seen: dict[Any, tuple[type | None, tuple[tuple[torch.dtype, int] | None, ...]]] = {}
_SEEN_SIZE = 1 << 14


def likeness(op: Any, args: Any, kwargs: dict[str, Any], forms: Sequence[Form]) -> Any:
    """What calls have in common that give alike results; None where sizes may change more than sizes.

    Operands are dense and in the order of their dims, and no size is 0 or 1: then strides tell the order in memory. All
    integers are sizes of operands: then what is valid once is valid always.
    """
    order: dict[Any, int] = {}
    key: list[Any] = [id(op), torch.get_default_dtype()]
    for form in forms:
        if form.offset or form.strides != contiguous(form.shape) or not all(n > 1 for n in form.shape):
            return None
        key += (form.dtype, form.device, len(form.shape), *[order.setdefault(n, len(order)) for n in form.shape])
    for n in numbers_of((args, kwargs)):
        if type(n) is int:
            if n not in order:
                return None  # whether it is valid may depend on sizes: torch has to be asked
            key.append(order[n])
    read(key, args, id(op) in LOOSE)
    if kwargs:
        key.append(tuple(kwargs))
        read(key, kwargs.values(), id(op) in LOOSE)
    return tuple(key)


def remember(like: Any, outcome: Outcome) -> None:
    """Keep what a call gave, for those that are like it."""
    if like is not None and outcome.dense:
        if len(_seen) >= _SEEN_SIZE:
            _seen.clear()
        _seen[like] = outcome.kind, tuple(None if m is None else (m.dtype, m.rank) for m in outcome.metas)


def recall(like: Any, ask: Ask) -> Outcome | None:
    """What a call gives by what one like it gave; `ask` is for shapes, and must hold no tensor with data."""
    found = _seen.get(like) if like is not None else None
    if found is None:
        return None
    kind, known = found
    answer = cache(lambda: Outcome.of(ask()).metas)

    def shape(i: int) -> Callable[[], tuple[int, ...]]:
        def of() -> tuple[int, ...]:
            meta = answer()[i]
            assert meta is not None, "calls that are alike have tensors in the same places"
            return meta.shape

        return of

    metas = tuple(None if said is None else _Later(*said, shape(i)) for i, said in enumerate(known))
    return Outcome(metas, kind, None)
