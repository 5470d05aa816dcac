"""One op in another form: as it returns what it would write, and as it is called on the pieces of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shardlib.core.aten.op_traits import has
from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_private import OpOverload, schema_of

aten = torch.ops.aten

Called = tuple[Any, list[Any], dict[str, Any]]  # an op and its arguments


@cache
def functional_form(target: OpOverload) -> OpOverload | None:
    """The op that returns what `target` writes: `add_.Tensor` and `add.out` -> `add.Tensor`; None if torch has none."""
    if target in _FUNCTIONAL:
        return _FUNCTIONAL[target]
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None

    def signature(op: OpOverload) -> list[Any]:
        return [a for a in schema_of(op).arguments if not (a.kwarg_only and a.alias_info is not None)]

    wanted = [(a.name, str(a.type)) for a in signature(target)]
    longer = None
    for overload in packet.overloads():
        op: OpOverload = getattr(packet, overload)
        theirs = signature(op)
        if op is target or written_arguments(op) or [(a.name, str(a.type)) for a in theirs[: len(wanted)]] != wanted:
            continue
        if len(theirs) == len(wanted):
            return op
        if all(a.kwarg_only and a.has_default_value() for a in theirs[len(wanted) :]):
            longer = op  # a factory: dtype and device are those of `out`
    return longer


# Functional forms with names of their own; results: the op's own, then the new value of every written argument.
_FUNCTIONAL: dict[OpOverload, OpOverload] = {
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.out: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
    aten.normal_.default: aten.normal_functional.default,
    aten._index_put_impl_.default: aten._unsafe_index_put.default,
}

# One value everywhere: `zero_` is `zeros_like`, where torch's own functional form is an op of its own, `zero`.
FILLS = {aten.zero_.default: aten.zeros_like.default, aten.fill_.Scalar: aten.full_like.default}
# Writes of what comes in other shapes and dtypes, or is drawn: only a program makes it fit.
_FITTED = {aten.copy_.default, aten.fill_.Tensor, aten.bernoulli_.float}


def value_written(target: OpOverload) -> OpOverload | None:
    """The op whose one result is the new value of the first argument; None where `target` writes more, or otherwise.

    Example:
        >>> value_written(aten.add_.Tensor), value_written(aten.zero_.default), value_written(aten.copy_.default)
        (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.zeros_like', overload='default')>, None)
    """
    if written_arguments(target) != (str(schema_of(target).arguments[0].name),) or target in _FITTED:
        return None
    return FILLS.get(target) or functional_form(target)


# A conjugate that is only marked as one would be lost: the marks of pieces, whose bytes travel, are not the tensor's.
# Strides are those of the whole, which say nothing about pieces.
_ON_PIECES = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten.new_empty_strided.default: aten.new_empty.default,
}


def on_pieces(target: Any, args: list[Any], kwargs: dict[str, Any], shape: Callable[[], Sequence[int]]) -> Called:
    """A call without strides and marks; `shape` says that of its first result."""
    if has(target, "reshapes"):
        return aten.reshape.default, [args[0], list(shape())], {}
    if target is aten.new_empty_strided.default:
        args = args[:2]
    return _ON_PIECES.get(target, target), args, kwargs
