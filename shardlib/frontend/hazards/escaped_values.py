"""Finds stand-ins of numbers and tensors that outlive their trace, in places that no walk reaches.

Such a place is a key of a dict, an exception, an iterator or a context variable. Its next reader would take the
stand-in for a number or a tensor. So weak references watch each stand-in until it is gone.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import FakeTensor, parametrized
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.primitives.per_device import PerDevice
from shardlib.tensor.sharded_tensor import typeof

Refs = Sequence[weakref.ref[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class HeldByHistory:
    """A tensor that a node of autograd holds, with the number of writes to it until then."""

    tensor: torch.Tensor
    version: int


def collect_survivors(tracked: Mapping[Any, Any], inputs: Collection[int]) -> tuple[weakref.ref[Any], ...]:
    """Returns references to the computed values of a trace among the tensors that its tracer knows.

    `inputs` are the ids of stand-ins of inputs, which the graph keeps. The key of random draws is left out: autograd's
    history holds it, and no user code sees it.
    """
    values = ((x, slot.proxy.node) for x, slot in list(tracked.items()) if isinstance(x, FakeTensor))
    return tuple(
        weakref.ref(x) for x, node in values if id(x) not in inputs and not has_trait(node.target, "draws_key")
    )


def keeps_numbers(refs: Refs) -> bool:
    """Returns whether a number of the trace is still alive."""
    return bool(_alive(refs, numbers=True))


def refuse_kept(name: str, refs: Refs) -> None:
    """Refuses tensors of a trace that are still alive, unless autograd's history alone holds them."""
    kept = _alive(refs, numbers=False)
    caches = {id(x): at for at, x in parametrized().items()}
    if cached := [f"{at[1]} of a module, {typeof(x)}" for x in kept if (at := caches.get(id(x))) is not None]:
        raise ShardingError(
            f"{name} computes parametrized tensors inside torch.nn.utils.parametrize.cached(), which keeps them",
            cached,
            rule="a jitted function, as the forward of a parallelized module is, runs once, on shapes: what it "
            "computes has no values that somebody outside could read again",
            remedy="enter parametrize.cached() inside the jitted function, jit(step), or inside forward",
        )
    held = {f"{holders} holds a value of the trace, {typeof(x)}": None for x in kept if (holders := _holders(x, kept))}
    if held:
        raise ShardingError(
            f"{name} keeps tensors that it computes while it is traced",
            list(held),
            rule="a jitted function runs once, on shapes: its tensors have no values, and leave it only as results",
            remedy="return the tensor, and keep it outside; or keep it in an attribute, a list or a value of a dict",
        )


def _alive(refs: Refs, *, numbers: bool) -> list[Any]:
    def living() -> list[Any]:
        return [x for ref in refs if (x := ref()) is not None and is_traced_number(x) == numbers]

    if living():
        gc.collect()  # rarely: values of a trace are hardly ever in a cycle
    return living()


def _holders(x: Any, kept: list[Any]) -> str:
    """Returns the holders of a value in words; "" if only autograd's history holds it."""
    kinds: dict[str, None] = {}
    for y in gc.get_referrers(x):
        if y is kept or isinstance(y, types.FrameType | HeldByHistory):
            continue
        if (value := _value_of_body(y)) is not None:  # this is its stack, which a history may hold
            kinds |= dict.fromkeys(filter(None, [_holders(value, kept)]))
        else:
            kinds[f"a {type(y).__name__}"] = None
    return " or ".join(kinds)


def _value_of_body(holder: Any) -> PerDevice | None:
    """Returns the value of a shard_map body that a holder, or the object whose attributes it has, is."""
    if isinstance(holder, PerDevice):
        return holder
    if not isinstance(holder, dict) or "stack" not in holder:
        return None
    return next((x for x in gc.get_referrers(holder) if isinstance(x, PerDevice) and vars(x) is holder), None)
