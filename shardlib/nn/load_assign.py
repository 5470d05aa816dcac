"""`load_state_dict(assign=True)` of a module on a mesh: a parameter's new tensor lives where the one before it did.

Torch puts what it is given in the parameter's place, which may be a plain tensor, whole on every device, and has none
of what a strategy says of the parameter's gradient and moments. Names that are given one tensor, or one memory, have
one afterwards, too.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardlib.core.torch_private import LOAD_OWN, LOAD_WHOLE
from shardlib.jit.shard import shard, shard_known
from shardlib.nn.parameters import has_own_class
from shardlib.sharding.spec import Spec
from shardlib.tensor.rank_checks import same
from shardlib.tensor.sharded_tensor import HOMES, REGATHER, ShardedTensor, marks

_load, _load_whole = LOAD_OWN.value, LOAD_WHOLE.value
Placed = tuple[str, Any, Any]  # under which name; what was given, and what it became
_placed: ContextVar[dict[object, Placed]] = ContextVar("_placed")  # during one load, by the memory of what was given


@functools.wraps(_load_whole)
def _loading(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    token = _placed.set({})
    try:
        return _load_whole(self, *args, **kwargs)
    finally:
        _placed.reset(token)


@functools.wraps(_load)
def _placing(
    self: nn.Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, extra: Any, wrong: Any
) -> None:
    """Fill one module's own tensors; what cannot be placed is told with all else that is `wrong`."""
    before: dict[str, Any] = {name: p for name, p in self._parameters.items() if isinstance(p, ShardedTensor)}
    _load(self, state_dict, prefix, metadata, strict, missing, extra, wrong)
    given: dict[str, Any] = {name: self._parameters[name] for name, p in before.items()}
    given = {name: x for name, x in given.items() if x is not None and x is not before[name]}
    for name, x in list(given.items()):
        self._parameters[name] = before[name]  # until it is placed
        if has_own_class(x):
            wrong.append(
                f"{prefix}{name} lives on {before[name].mesh}, and what is assigned is a {type(x).__module__}."
                f"{type(x).__qualname__}, whose class a placed parameter has not: assign plain tensors"
            )
            del given[name]
        elif isinstance(x, ShardedTensor) and x.mesh != before[name].mesh:
            wrong.append(
                f"{prefix}{name} lives on {before[name].mesh}, and what is assigned on {x.mesh}: "
                "assign plain tensors, x.full_tensor()"
            )
            del given[name]
    plain = {name: x for name, x in given.items() if not isinstance(x, ShardedTensor)}
    digests: dict[str, int] = {}
    if plain:
        layouts = [before[name].sharding for name in plain]
        items = [(f"{prefix}{name}", x) for name, x in plain.items()]
        found = same(before[next(iter(plain))].mesh, "load_state_dict(assign=True)", items, layouts, _REMEDY)
        digests = dict(zip(plain, found, strict=False))
    seen = _placed.get({})
    for name, x in given.items():
        old, called = before[name], f"{prefix}{name}"
        first, source, there = seen.get(_memory(x), (called, x, None))
        if there is None:
            self._parameters[name] = _as(old, x, called, digests.get(name))
            seen[_memory(x)] = called, x, self._parameters[name]
        elif (there.mesh, there.sharding) != (old.mesh, old.sharding):
            wrong.append(
                f"{called} lives as {old.sharding} on {old.mesh}, {first} as {there.sharding} on {there.mesh}, "
                f"and both are assigned one tensor, of shape {list(x.shape)}: "
                "assign x.clone() to one of them"
            )
        else:
            self._parameters[name] = there if x is source else _like(old, there.detach(), x)


def _memory(x: Any) -> object:
    """What two tensors have in common that are one, or show the same of one memory."""
    parts = x._locals if isinstance(x, ShardedTensor) else (x,)
    at = tuple((p.data_ptr(), p.dtype, p.shape, p.stride()) for p in parts)
    return at if any(pointer for pointer, *_ in at) else id(x)


def _like(old: Any, value: Any, new: nn.Parameter) -> nn.Parameter:
    """A parameter of a value, with what a strategy says of the old one's gradient and moments."""
    placed = nn.Parameter(value, requires_grad=new.requires_grad)
    placed.__dict__.update(_said(old))
    return placed


def _said(x: Any) -> dict[str, Any]:
    return {k: v for k, v in marks(x).items() if k in (*HOMES, REGATHER)}


def _as(old: ShardedTensor, new: nn.Parameter, name: str, digest: int | None) -> nn.Parameter:
    """A parameter of the new one's values and dtype, where the old one lives; all ranks have it with that digest."""
    if isinstance(new, ShardedTensor) and new.sharding == old.sharding and _said(new) == _said(old):
        return new  # the parameter of another module, which the two share
    spec = Spec.exactly(old.sharding, old._form.names)
    with old.mesh:
        if digest is None:
            value = shard(new.detach(), spec)
        else:
            there = spec.resolve(new.shape, old.mesh, name=name)
            value = shard_known(name, new.detach(), there, old.mesh, digest)
    return _like(old, value, new)


_REMEDY = "load the same file on every rank"
LOAD_OWN.value = _placing
LOAD_WHOLE.value = _loading
