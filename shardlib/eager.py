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
    for a read of what was written to through a view, or of a view of what was written to.
    """
    if func in _ALIASES:
        return _alias(args[0])
    leaves, tree = pytree.tree_flatten((args, kwargs))
    first: dict[int, int] = {}  # where a tensor stands first among the leaves
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    stands = [first.setdefault(id(leaves[i]), i) for i in where]
    sharded = [leaves[i] for i in where if isinstance(leaves[i], ShardedTensor)]
    _refuse(func, sharded)
    if func is aten._local_scalar_dense.default:
        return sharded[0].full_tensor().item()
    written = _written(func, args, kwargs) if func._schema.is_mutable else []
    places = list(dict.fromkeys(first[id(x)] for x in written))
    key = (func, tree, tuple(map(_static, leaves)), tuple(stands), tuple(places))
    if (step := _programs.get(key)) is None:
        fixed = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        step = _programs[key] = jit(_program(func, tree, fixed, where, stands, places))
    with sharded[0].mesh:
        results, values = step(*(leaves[i] for i in where))
    for i, value in zip(places, values, strict=True):
        _write(leaves[i], value)
    if func._schema.is_mutable:
        return _returned(func, results, written)
    if any(r.alias_info is not None for r in func._schema.returns):
        for out in pytree.tree_leaves(results):
            _view(sharded[0], out)
    return results


def _program(
    func: Any, tree: pytree.TreeSpec, fixed: list[Any], where: list[int], stands: list[int], places: list[int]
) -> Callable[..., Any]:
    """The op as a function of its tensors: (results of its own, the new values of what it writes to)."""

    def op(*tensors: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        leaves = list(fixed)
        for i, j, x in zip(where, stands, tensors, strict=True):
            leaves[i] = leaves[j] if j < i else x.clone() if i in places else x
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        out = func(*args, **kwargs)
        own = [o for o, r in zip(_tuple(out), func._schema.returns, strict=True) if not _is_write(r)] if places else out
        return own, [leaves[i] for i in places]

    op.__name__ = func._schema.name.removeprefix("aten::")
    return op


def _static(x: Any) -> Any:
    """A key for an argument that is no tensor: 1, 1.0 and True are different ones, and so are 0.0 and -0.0."""
    if isinstance(x, torch.Tensor):
        return torch.Tensor
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


class _Memory:
    """What a tensor, its aliases and its views would share, if they shared memory: how often it was written to."""

    def __init__(self) -> None:
        self.writes = 0


class _Kin:
    """Whom a tensor is related to: the memory, how many writes to it the tensor has seen, and its aliases."""

    def __init__(self, owner: ShardedTensor | None = None, memory: _Memory | None = None, seen: int = 0) -> None:
        self.owner = weakref.ref(owner) if owner is not None else None
        self.memory, self.seen = memory or _Memory(), seen
        self.aliases: list[_Kin] = [self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kin, ()  # a copy of the tensor is related to nobody

    @property
    def stale(self) -> bool:
        return self.seen != self.memory.writes


def _kin(x: ShardedTensor) -> _Kin:
    kin: _Kin | None = x.__dict__.get("_kin")
    if kin is None or kin.owner is None or kin.owner() is not x:  # new, or the attributes of another were copied
        kin = x.__dict__["_kin"] = _Kin(x)
    return kin


def _view(x: ShardedTensor, out: ShardedTensor) -> None:
    memory = _kin(x).memory
    out.__dict__["_kin"] = _Kin(out, memory, memory.writes)


def _alias(x: ShardedTensor) -> ShardedTensor:
    out, kin = ShardedTensor(x._locals, x._layout, x._mesh, x._names), _kin(x)
    out.__dict__["_kin"] = own = _Kin(out, kin.memory, kin.seen)
    kin.aliases[:] = [k for k in kin.aliases if k.owner is not None and k.owner() is not None]
    kin.aliases.append(own)
    own.aliases = kin.aliases
    return out


def _write(x: torch.Tensor, value: ShardedTensor) -> None:
    if not isinstance(x, ShardedTensor):
        x.copy_(value.full_tensor())
        return
    moved = relayout(value, Resolved(x._layout, x._names, (False,) * x.dim(), x.spec))
    kin = _kin(x)
    kin.memory.writes += 1
    for alias in kin.aliases:
        tensor = alias.owner() if alias.owner is not None else None
        if tensor is not None:
            tensor._locals, alias.seen = moved._locals, kin.memory.writes


def _refuse(func: Any, sharded: list[ShardedTensor]) -> None:
    if is_tracing():
        raise ShardingError(
            f"a traced function closes over {', '.join(map(typeof, sharded))}",
            [f"{func} reads it"],
            rule="tensors that live on a mesh enter a program as arguments",
            remedy="make it an argument of the function",
        )
    stale = [x for x in sharded if "_kin" in x.__dict__ and _kin(x).stale]
    if stale:
        raise ShardingError(
            f"{func} uses a ShardedTensor whose memory was written to through another view",
            [typeof(x) for x in stale],
            rule="a view of a ShardedTensor is a value of its own: writes to one do not reach the other",
            remedy="write to the tensor itself, x.copy_(torch.where(mask, new, x)), and take views afterwards",
        )
