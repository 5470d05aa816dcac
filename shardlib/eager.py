"""Operations on ShardedTensors outside `jit`: each is a program of one op, compiled once per op, layouts and arguments.

Autograd sits above this: `.backward()` on a ShardedTensor dispatches its gradient's ops here one by one. A write in
place computes the new value and gives it to the tensor and to all its aliases; their pieces themselves are never
written to, since devices (and the plain tensor that was placed) may share them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardlib.errors import ShardingError
from shardlib.jit import Jitted, jit, relayout
from shardlib.spec import Resolved
from shardlib.state import is_tracing
from shardlib.tensor import ShardedTensor, typeof

aten = torch.ops.aten

_programs: dict[Any, Jitted] = {}
_ALIASES = (aten.detach.default, aten.alias.default)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one ATen op on sharded (and plain, taken as whole) tensors; tensor results are sharded.

    Raises `ShardingError` for tensors of several meshes, for a ShardedTensor that a traced function closes over, and
    for writes through views, or reads of views whose tensor was written to.
    """
    if func in _ALIASES:
        return _alias(args[0])
    leaves, tree = pytree.tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
    _refuse(func, sharded)
    if func is aten._local_scalar_dense.default:
        return sharded[0].full_tensor().item()
    written = _written(func, args, kwargs) if func._schema.is_mutable else []
    places = [i for i in where if any(leaves[i] is x for x in written)]
    static = tuple(None if i in where else _static(x) for i, x in enumerate(leaves))
    key = (func, tree, static, tuple(where), tuple(places))
    if (step := _programs.get(key)) is None:
        fixed = [None if i in where else x for i, x in enumerate(leaves)]
        step = _programs[key] = jit(_program(func, tree, fixed, where, places))
    with sharded[0].mesh:
        results, values = step(*(leaves[i] for i in where))
    for i, value in zip(places, values, strict=True):
        _write(leaves[i], value)
    if func._schema.is_mutable:
        return _returned(func, results, written)
    for out in pytree.tree_leaves(results):
        if isinstance(out, ShardedTensor):
            out._seen = _version(sharded[0])  # type: ignore[attr-defined]
    return results


def _program(
    func: Any, tree: pytree.TreeSpec, fixed: list[Any], where: list[int], places: list[int]
) -> Callable[..., Any]:
    """The op as a function of its tensors: (its results, the new values of what it writes to)."""

    def op(*tensors: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        leaves = list(fixed)
        for i, x in zip(where, tensors, strict=True):
            leaves[i] = x.clone() if i in places else x
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        out = func(*args, **kwargs)
        own = [o for o, r in zip(_tuple(out), func._schema.returns, strict=True) if not _is_write(r)] if places else out
        return own, [leaves[i] for i in places]

    op.__name__ = func._schema.name.removeprefix("aten::")
    return op


def _static(x: Any) -> Any:
    """A key for an argument that is no tensor: 1, 1.0 and True are different ones, and so are 0.0 and -0.0."""
    return (float, repr(x)) if isinstance(x, float) else (type(x), x)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `func` writes to, in the order of its schema."""
    out: list[Any] = []
    for i, a in enumerate(func._schema.arguments):
        if _is_write(a):
            out += pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(a.name))
    return [x for x in out if isinstance(x, torch.Tensor)]


def _returned(func: Any, own: list[Any], written: list[torch.Tensor]) -> Any:
    """What an op in place returns: tensors that it wrote to, and results of its own, in the order of its schema."""
    theirs, mine = iter(written), iter(own)
    out = tuple(next(theirs) if _is_write(r) else next(mine) for r in func._schema.returns)
    return out if len(out) > 1 else out[0] if out else None


def _is_write(x: Any) -> bool:
    return x.alias_info is not None and bool(x.alias_info.is_write)


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else () if x is None else (x,)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _alias(x: ShardedTensor) -> ShardedTensor:
    out = ShardedTensor(x._locals, x._layout, x._mesh, x._names)
    family = x.__dict__.setdefault("_family", [weakref.ref(x)])
    family.append(weakref.ref(out))
    out._family = family  # type: ignore[attr-defined]
    return out


def _write(x: torch.Tensor, value: ShardedTensor) -> None:
    if not isinstance(x, ShardedTensor):
        x.copy_(value.full_tensor())
        return
    moved = relayout(value, Resolved(x._layout, x._names, (False,) * x.dim(), x.spec))
    for ref in x.__dict__.get("_family", [weakref.ref(x)]):
        if (alias := ref()) is not None:
            alias._locals = moved._locals


def _refuse(func: Any, sharded: list[ShardedTensor]) -> None:
    if is_tracing():
        raise ShardingError(
            f"a traced function closes over {', '.join(map(typeof, sharded))}",
            [f"{func} reads it"],
            rule="tensors that live on a mesh enter a program as arguments",
            remedy="make it an argument of the function",
        )
    for x in sharded:
        if x._is_view() and (func._schema.is_mutable or _version(x) != x.__dict__.get("_seen", _version(x))):
            doing = "writes to" if func._schema.is_mutable else "reads, after its tensor was written to,"
            raise ShardingError(
                f"{func} {doing} a view, {typeof(x)}",
                rule="views of a ShardedTensor are values of their own: they share no memory with it",
                remedy="write to the tensor itself (x.copy_(torch.where(...))), or clone the view when it is made",
            )
