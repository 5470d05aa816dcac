"""Maps an op to its functional form, and to the form in which it runs on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

aten = torch.ops.aten

OpCall = tuple[Any, list[Any], dict[str, Any]]  # an op, its arguments and keyword arguments


@cache
def functional_form(target: OpOverload) -> OpOverload | None:
    """Returns the op that returns what `target` writes, `add.Tensor` for `add_.Tensor` and `add.out`, or None."""
    if target in _FUNCTIONAL:
        return _FUNCTIONAL[target]
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None

    def signature(op: OpOverload) -> list[Any]:
        return [a for a in schema_of(op).arguments if not (a.kwarg_only and a.alias_info is not None)]

    own = [(a.name, str(a.type)) for a in signature(target)]
    longer = None
    for overload in packet.overloads():
        op: OpOverload = getattr(packet, overload)
        theirs = signature(op)
        if op is target or written_arguments(op) or [(a.name, str(a.type)) for a in theirs[: len(own)]] != own:
            continue
        if len(theirs) == len(own):
            return op
        if all(a.kwarg_only and a.has_default_value() for a in theirs[len(own) :]):
            longer = op  # a factory: dtype and device are those of `out`
    return longer


# Functional forms under other names; they return the op's results, then the new value of every written argument.
_FUNCTIONAL: dict[OpOverload, OpOverload] = {
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.out: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
    aten.normal_.default: aten.normal_functional.default,
    aten._index_put_impl_.default: aten._unsafe_index_put.default,
}

# Fills, for which torch has separate functional ops such as `zero`.
FILLS = {aten.zero_.default: aten.zeros_like.default, aten.fill_.Scalar: aten.full_like.default}
# Writes that broadcast, cast or draw values: the value alone does not determine the result.
_CONVERTING = {aten.copy_.default, aten.fill_.Tensor, aten.bernoulli_.float}


def single_result_form(target: OpOverload) -> OpOverload | None:
    """Returns the op whose one result is the new value of the first argument; None if `target` writes more."""
    if written_arguments(target) != (str(schema_of(target).arguments[0].name),) or target in _CONVERTING:
        return None
    return FILLS.get(target) or functional_form(target)


# Collectives send the bytes of shards and lose a lazy conjugate or negative bit, so shards are conjugated at once.
# Strides in arguments are those of the whole tensor, not of shards.
_SHARD_FORMS = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    aten.new_empty_strided.default: aten.new_empty.default,
}


def to_shard_call(target: Any, args: list[Any], kwargs: dict[str, Any], shape: Callable[[], Sequence[int]]) -> OpCall:
    """Converts a call to one without strides and lazy bits; `shape` returns the shape of its first result."""
    if has_trait(target, "reshapes"):
        return aten.reshape.default, [args[0], list(shape())], {}
    if target is aten.new_empty_strided.default:
        args = args[:2]
    return _SHARD_FORMS.get(target, target), args, kwargs
