"""Infers the results of a call: their number, shapes, dtypes and strides.

Running the op on meta tensors gives them, but often costs more than the rest of a first call. So outcomes are cached
for similar calls: the same op on operands of the same dtypes and ranks. Sizes may differ, but the same sizes must be
equal to each other and to integer arguments. Then dtypes, ranks and memory order of results are the same, and shapes
follow from the rule. A meta call infers a shape only if a rule reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from shardlib.eager.arg_slots import iterate_numbers
from shardlib.rules.rule import Meta
from shardlib.tensor.eager_cache import OPS_KEYED_BY_NUMBER_TYPE, append_to_key
from shardlib.tensor.tensor_meta import Form, contiguous_strides

MetaCall = Callable[[], Any]  # runs the op on meta tensors


@dataclass(frozen=True)
class Outcome:
    """The results of one call; None stands for a result that is no tensor."""

    metas: tuple[Meta | None, ...]
    kind: type | None  # None for one tensor, else tuple or list
    memory: tuple[tuple[tuple[int, ...], int], ...] | None  # strides and offsets; None: contiguous

    @staticmethod
    def from_results(results: Any) -> Outcome:
        results, kind = (results, type(results)) if isinstance(results, list | tuple) else ([results], None)
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
    def is_contiguous(self) -> bool:
        return self.memory is None or all(
            m is None or (offset == 0 and strides == contiguous_strides(m.shape))
            for m, (strides, offset) in zip(self.metas, self.memory, strict=True)
        )


class _LazyMeta(Meta):
    """A result with known dtype and rank, whose shape is inferred when a rule reads it."""

    def __init__(self, dtype: torch.dtype, dims: int, infer_shape: Callable[[], tuple[int, ...]]) -> None:
        self.__dict__.update(dtype=dtype, dims=dims, infer_shape=infer_shape)

    @property
    def rank(self) -> int:
        return int(self.__dict__["dims"])

    @property
    def is_shape_known(self) -> bool:
        return "shape" in self.__dict__

    def __getattr__(self, name: str) -> Any:  # of unset attributes only
        if name != "shape":
            raise AttributeError(name)
        shape = self.__dict__["shape"] = self.__dict__["infer_shape"]()
        return shape


_outcomes: dict[Any, tuple[type | None, tuple[tuple[torch.dtype, int] | None, ...]]] = {}
_MOST_OUTCOMES = 1 << 14


def similarity_key(op: Any, args: Any, kwargs: dict[str, Any], forms: Sequence[Form]) -> Any:
    """Returns a key that calls share whose results differ in sizes alone; None for a call that other sizes may change.

    Operands must be contiguous without sizes 0 and 1, so that strides tell the order in memory. All integer arguments
    must be sizes of operands, so that a call of the same key is valid, too.
    """
    order: dict[Any, int] = {}
    key: list[Any] = [id(op), torch.get_default_dtype()]
    for form in forms:
        if form.offset or form.strides != contiguous_strides(form.shape) or not all(n > 1 for n in form.shape):
            return None
        key += (form.dtype, form.device, len(form.shape), *[order.setdefault(n, len(order)) for n in form.shape])
    for n in iterate_numbers((args, kwargs)):
        if type(n) is int:
            if n not in order:
                return None  # the call may be invalid for some sizes
            key.append(order[n])
    append_to_key(key, args, id(op) in OPS_KEYED_BY_NUMBER_TYPE)
    if kwargs:
        key.append(tuple(kwargs))
        append_to_key(key, kwargs.values(), id(op) in OPS_KEYED_BY_NUMBER_TYPE)
    return tuple(key)


def remember_outcome(key: Any, outcome: Outcome) -> None:
    if key is not None and outcome.is_contiguous:
        if len(_outcomes) >= _MOST_OUTCOMES:
            _outcomes.clear()
        _outcomes[key] = outcome.kind, tuple(None if m is None else (m.dtype, m.rank) for m in outcome.metas)


def recall_outcome(key: Any, run_meta: MetaCall) -> Outcome | None:
    """Returns the outcome of a call, derived from a similar one; `run_meta` infers shapes, and must hold no data."""
    cached = _outcomes.get(key) if key is not None else None
    if cached is None:
        return None
    kind, results = cached
    infer = cache(lambda: Outcome.from_results(run_meta()).metas)

    def infer_shape(i: int) -> tuple[int, ...]:
        meta = infer()[i]
        assert meta is not None, "similar calls have tensors in the same places"
        return meta.shape

    metas = tuple(None if x is None else _LazyMeta(*x, partial(infer_shape, i)) for i, x in enumerate(results))
    return Outcome(metas, kind, None)
