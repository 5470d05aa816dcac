"""Ops that can write their results over operands, and their in-place forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from shardlib.compiler.program.steps import Compute
from shardlib.core.aten.op_names import ADDED
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.ops.adam import ADAM, adam


def takes(step: Compute) -> tuple[tuple[int, ...], ...]:
    """Returns for each result the operands, by position, whose memory it may take, the best first."""
    return _takes(step.target, len(step.outs), bool(step.kwargs))


@cache
def _takes(target: Any, results: int, named: bool) -> tuple[tuple[int, ...], ...]:
    if target is ADAM:
        return (0,), (2,), (3,), (4,)
    if results != 1 or in_place_form(target) is None:
        return ()
    return ((0, 1) if has_trait(target, "commutes") and not named else (0,),)


def written(step: Compute, over: tuple[int | None, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """Returns the callable, and its arguments, that writes the results of a step over these operands."""
    args = list(step.args)
    if step.target is ADAM:
        return _adam(over), args
    (k,) = over
    assert k is not None, "a step that takes no operand's memory says nothing"
    args[0], args[k] = args[k], args[0]
    return in_place_form(step.target), args


@cache
def _adam(over: tuple[int | None, ...]) -> Callable[..., Any]:
    return partial(adam, over=over)


def in_place_form(target: Any) -> Any:
    """Returns the op that writes a result over the first operand, element by element, or None."""
    by_place = torch.Tag.pointwise in getattr(target, "tags", ()) or has_trait(target, "writes_by_index")
    if not by_place and target not in ADDED.values():
        return None
    packet = getattr(torch.ops.aten, schema_of(target).name.removeprefix("aten::") + "_", None)
    return getattr(packet, schema_of(target).overload_name or "default", None) if packet is not None else None
