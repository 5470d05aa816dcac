"""`load_state_dict(assign=True)` of a module on a mesh: places each new parameter like the old one.

Torch replaces the parameter by the assigned tensor, which may be plain and lacks the strategy's specs for gradient and
moments. Names that get the same tensor, or the same memory, still share it after placing.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardlib.core.torch_internals.torch_private import LOAD_OWN, LOAD_WHOLE
from shardlib.jit.shard import shard, shard_known
from shardlib.nn.parameters import has_own_class
from shardlib.sharding.spec import Spec
from shardlib.tensor.rank_checks import require_equal_values
from shardlib.tensor.sharded_tensor import PLACEMENT_ATTRIBUTES, REGATHER, ShardedTensor, user_attributes

_load, _load_whole = LOAD_OWN.value, LOAD_WHOLE.value
Placed = tuple[str, Any, Any]  # the first name, the assigned tensor and the placed one
_placed: ContextVar[dict[object, Placed]] = ContextVar("_placed")  # during one load, by memory of the assigned tensor


@functools.wraps(_load_whole)
def _load_and_share(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    token = _placed.set({})
    try:
        return _load_whole(self, *args, **kwargs)
    finally:
        _placed.reset(token)


@functools.wraps(_load)
def _load_and_place(
    self: nn.Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, extra: Any, wrong: Any
) -> None:
    """Loads one module's own tensors and places them; adds errors to `wrong`."""
    before: dict[str, Any] = {name: p for name, p in self._parameters.items() if isinstance(p, ShardedTensor)}
    _load(self, state_dict, prefix, metadata, strict, missing, extra, wrong)
    assigned: dict[str, Any] = {name: self._parameters[name] for name in before}
    assigned = {name: x for name, x in assigned.items() if x is not None and x is not before[name]}
    for name, x in list(assigned.items()):
        self._parameters[name] = before[name]  # until the new one is placed
        if has_own_class(x):
            wrong.append(
                f"{prefix}{name} lives on {before[name].mesh}, and what is assigned is a {type(x).__module__}."
                f"{type(x).__qualname__}, whose class a placed parameter has not: assign plain tensors"
            )
            del assigned[name]
        elif isinstance(x, ShardedTensor) and x.mesh != before[name].mesh:
            wrong.append(
                f"{prefix}{name} lives on {before[name].mesh}, and what is assigned on {x.mesh}: "
                "assign plain tensors, x.full_tensor()"
            )
            del assigned[name]
    plain = {name: x for name, x in assigned.items() if not isinstance(x, ShardedTensor)}
    digests: dict[str, int] = {}
    if plain:
        layouts = [before[name].sharding for name in plain]
        items = [(f"{prefix}{name}", x) for name, x in plain.items()]
        mesh = before[next(iter(plain))].mesh
        equal = require_equal_values(mesh, "load_state_dict(assign=True)", items, layouts, _REMEDY)
        digests = dict(zip(plain, equal, strict=False))
    seen = _placed.get({})
    for name, x in assigned.items():
        old, full_name = before[name], f"{prefix}{name}"
        first, source, placed = seen.get(_memory_key(x), (full_name, x, None))
        if placed is None:
            self._parameters[name] = _place_like(old, x, full_name, digests.get(name))
            seen[_memory_key(x)] = full_name, x, self._parameters[name]
        elif (placed.mesh, placed.sharding) != (old.mesh, old.sharding):
            wrong.append(
                f"{full_name} lives as {old.sharding} on {old.mesh}, {first} as {placed.sharding} on {placed.mesh}, "
                f"and both are assigned one tensor, of shape {list(x.shape)}: "
                "assign x.clone() to one of them"
            )
        else:
            self._parameters[name] = placed if x is source else _make_parameter(old, placed.detach(), x)


def _memory_key(x: Any) -> object:
    """Returns a key that tensors share which show the same part of one memory."""
    parts = x._locals if isinstance(x, ShardedTensor) else (x,)
    at = tuple((p.data_ptr(), p.dtype, p.shape, p.stride()) for p in parts)
    return at if any(pointer for pointer, *_ in at) else id(x)


def _make_parameter(old: Any, value: Any, new: nn.Parameter) -> nn.Parameter:
    """Returns a parameter with the old one's specs for gradient and moments."""
    placed = nn.Parameter(value, requires_grad=new.requires_grad)
    placed.__dict__.update(_strategy_attributes(old))
    return placed


def _strategy_attributes(x: Any) -> dict[str, Any]:
    return {k: v for k, v in user_attributes(x).items() if k in (*PLACEMENT_ATTRIBUTES, REGATHER)}


def _place_like(old: ShardedTensor, new: nn.Parameter, name: str, digest: int | None) -> nn.Parameter:
    """Returns a parameter with the new values and dtype in the old layout; `digest` is the checksum on all ranks."""
    if (
        isinstance(new, ShardedTensor)
        and new.sharding == old.sharding
        and _strategy_attributes(new) == _strategy_attributes(old)
    ):
        return new  # a parameter that another module shares
    spec = Spec.from_layout(old.sharding, old._form.names)
    with old.mesh:
        if digest is None:
            value = shard(new.detach(), spec)
        else:
            placement = spec.resolve(new.shape, old.mesh, name=name)
            value = shard_known(name, new.detach(), placement, old.mesh, digest)
    return _make_parameter(old, value, new)


_REMEDY = "load the same file on every rank"
LOAD_OWN.value = _load_and_place
LOAD_WHOLE.value = _load_and_share
