"""Eager ops that write: each computes the new value, and gives it to all tensors that share the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardlib.core.aten.functional_forms import functional_form, value_written
from shardlib.core.aten.op_traits import has
from shardlib.core.aten.schemas import apart, written_arguments
from shardlib.core.bounded_cache import Bounded
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree, schema_of
from shardlib.distributed.provenance import made
from shardlib.eager.arg_slots import Slot, filled, listed, moved, numbers_of, specials_of, tensors_of
from shardlib.eager.compile_op import Operand, Single, single
from shardlib.eager.prepare import LOCK, Prepared, pieces, replicated, whole, wrapped
from shardlib.rules.out_variants import refuse_cast
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor import view_aliases
from shardlib.tensor.eager_cache import LOOSE, Run, key_of
from shardlib.tensor.hooks import above
from shardlib.tensor.host_offload import brought_back
from shardlib.tensor.local_shards import owned
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import Memory, Path

_programs: Bounded[Any, Single] = Bounded(1 << 12)


def writer(op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> Run:
    """What runs this call of an op that writes, and all calls like it."""

    def through(args: Any, kwargs: Any) -> Any:
        return _write(op, args, kwargs or {}, mesh)

    for x in written_by(op, args, kwargs):
        _refuse_overlap(op, x, x)
    functional = value_written(op)
    if functional is None or not isinstance(args[0], ShardedTensor):
        return through
    if id(op) in LOOSE:
        LOOSE.add(id(functional))
    call = Prepared(functional, args, kwargs, mesh)
    meta = call.meta()
    if isinstance(meta, torch.Tensor):
        refuse_cast(meta, args[0])
    fits = isinstance(meta, torch.Tensor) and meta.shape == args[0].shape
    direct = call.direct(meta, write=True) if fits else None
    if direct is None:
        return through

    def write(args: Any, kwargs: Any) -> Any:
        return through(args, kwargs) if args[0].__dict__.get("_path") else direct(args, kwargs)

    return write


def _write(op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> Any:
    """One program: from the value of who owns the memory, along the views, to the owner's new value."""
    written = written_by(op, args, kwargs)
    if not all(isinstance(x, ShardedTensor) for x in written):
        return _write_plain(op, args, kwargs, written)
    _refuse_shared(op, written)
    for x in written:
        if "_memory" in x.__dict__:
            _refuse_overlap(op, x, x.__dict__["_memory"].form)
    call = Prepared(op, args, kwargs, mesh)
    operands, inputs = [], []
    said = pytree.tree_leaves(_where_written(op, call.args, call.kwargs))
    places = {x.index for x in said if isinstance(x, Slot)}
    for i, (x, form) in enumerate(zip(call.tensors, call.forms, strict=True)):
        memory: Memory | None = x.__dict__.get("_memory")
        mine = i in places  # what it reads may be the same tensor: `x.mul_(x)`
        if mine and memory is not None:
            operands.append(Operand(memory.form, x.__dict__["_path"], form, True))
            inputs.append(memory.locals)
        else:
            operands.append(Operand(form, written=mine, plain=not isinstance(x, ShardedTensor)))
            inputs.append(pieces(x, mesh))
    described = tuple((x.form, x.path) for x in operands if x.written)
    numbers = list(numbers_of((args, kwargs)))
    key = (key_of(op, args, kwargs), specials_of(numbers), described)
    ready = _programs.get(key)
    if ready is None:
        _check_outs(op, call)
        ready = _programs[key] = call.compiled(operands)
    origin = made(call.number, call.tensors, numbers) if mesh.kind == "distributed" else 0
    results = ready(inputs, numbers, origin)
    rest = iter(results[ready.own :])
    for x, operand in zip(call.tensors, operands, strict=True):
        if operand.written:
            assert isinstance(x, ShardedTensor)
            value = next(rest)
            view_aliases.assign(x, value, next(rest) if operand.path else value, origin)
    return _returned(op, list(pytree.tree_unflatten(wrapped(ready, results), ready.tree)), written)


def _check_outs(op: Any, call: Prepared) -> None:
    """A write of another shape would resize what it writes to."""
    names = written_arguments(op)
    values = [form.abstract() for form in call.forms]
    args, kwargs = filled(moved((call.args, call.kwargs), torch.device("meta")), values)
    functional = functional_form(op)
    if functional is None or not all(name in call.kwargs for name in names):
        return
    made = functional(*args, **{k: x for k, x in kwargs.items() if k not in names})
    for name, new in zip(names, made if isinstance(made, tuple) else (made,), strict=False):
        slot = call.kwargs[name]
        if isinstance(slot, Slot) and new.shape != call.tensors[slot.index].shape:
            refuse_out(op, new, call.tensors[slot.index])


def _write_plain(op: Any, args: Any, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> Any:
    """A write of sharded values into plain tensors, which every process has whole."""
    if any(isinstance(x, ShardedTensor) for x in written):
        raise ShardingError(
            f"{op} writes to sharded and to plain tensors at once",
            [typeof(x) for x in written],
            rule="what one op writes to is sharded, or is not",
            remedy="place all of them: shard(x, spec)",
        )
    out = whole(op, args, kwargs)
    every = out if isinstance(out, tuple) else (out,)
    own = [x for x, r in zip(every, schema_of(op).returns, strict=False) if r.alias_info is None]
    return _returned(op, own, written)


def remake(x: ShardedTensor) -> tuple[torch.Tensor, ...]:
    """The pieces of a tensor that was away, or whose memory was written to through another one: it has them then."""
    if (made := brought_back(x)) is None:
        made = x.__dict__["_locals"] = _made_again(x)
    return made


def _made_again(x: ShardedTensor) -> tuple[torch.Tensor, ...]:
    memory: Memory = x.__dict__["_memory"]
    path: Path = x.__dict__["_path"]
    if not path:
        return memory.locals
    if any(has(step[0], "strides") for step in path):
        return owned(strided(memory.form, memory.locals, path), x.sharding, x.mesh, donated=True)
    key = (memory.form, path, x._form)
    ready = _programs.get(key)
    if ready is None:
        with LOCK:
            operand = Operand(memory.form, path, x._form)
            ready = _programs[key] = single(None, (), {}, [operand], x._form.mesh)
    (out,) = ready([memory.locals], lineage=x._origin)
    return tuple(out)


def strided(form: Form, locals_: tuple[torch.Tensor, ...], path: Path) -> torch.Tensor:
    """What views show of a whole owner, which lies in memory as on one device: for those that speak of strides."""
    if (count := form.shape.numel()) and count != 1 + sum(
        (n - 1) * s for n, s in zip(form.shape, form.strides, strict=True)
    ):
        raise ShardingError(
            f"strides are read of a result of shape {list(form.shape)} with strides {list(form.strides)}",
            rule="a result has memory of its own: what lies between its elements on one device is not there",
            remedy="take as_strided of x.contiguous(), or inside the jitted function",
        )
    shown = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device)
    shown.copy_(wrap(form, locals_).full_tensor())
    for op, args, kwargs, item in path:
        out = op(shown, *map(listed, args), **dict(kwargs))
        shown = out if item is None else out[item]
    return shown.clone()


def written_by(op: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `op` writes to, in the order of its schema."""
    return tensors_of(_where_written(op, args, kwargs))


def _where_written(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What stands where `op` writes: tensors and lists of them, or their slots."""
    names = written_arguments(op)
    arguments = enumerate(schema_of(op).arguments)
    return [args[i] if i < len(args) else kwargs.get(a.name) for i, a in arguments if a.name in names]


def _returned(op: Any, own: list[Any], written: Sequence[torch.Tensor]) -> Any:
    """What an op in place returns: tensors that it wrote to, and results of its own, in the order of its schema."""
    theirs, mine = iter(written), iter(own)
    returns = schema_of(op).returns
    out = tuple(next(theirs) if r.alias_info is not None and r.alias_info.is_write else next(mine) for r in returns)
    return out if len(out) > 1 else out[0] if out else None


def outs_of(op: Any) -> list[Any]:
    """The arguments of an op's schema that it writes to."""
    return [a for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write]


def through_copies(op: Any) -> Run:
    """The `out=` form of an op: the op, and its results written where they are wanted."""
    functional, names = functional_form(op), [a.name for a in outs_of(op)]
    assert functional is not None, f"{op} is the out= form of an op"

    def run(args: Any, kwargs: Any) -> Any:
        outs = [kwargs[name] for name in names]
        made = functional(*args, **{k: x for k, x in kwargs.items() if k not in names})
        made = made if isinstance(made, tuple | list) else (made,)
        for out, new in zip(tensors_of(tuple(outs)), made, strict=True):
            put(op, new, out)
        if not schema_of(op).returns:
            return None
        return tuple(outs) if len(outs) > 1 else outs[0]

    return run


def put(op: Any, new: torch.Tensor, out: torch.Tensor) -> None:
    """Write a result to what `out=` names; as in torch, what has no element yet takes the result's shape."""
    if not torch.can_cast(new.dtype, out.dtype) or (out.shape != new.shape and out.numel()):
        refuse_out(op, new, out)
    if not isinstance(out, ShardedTensor):  # torch's own scratch memory, say
        out.resize_(new.shape).copy_(new.full_tensor() if isinstance(new, ShardedTensor) else new)
    elif out.shape == new.shape:
        out.copy_(new)
    else:
        out.data = (new if isinstance(new, ShardedTensor) else replicated(new, out._form)).to(out.dtype)


def refuse_out(op: Any, new: torch.Tensor, out: torch.Tensor) -> NoReturn:
    """Raise the error for a result that does not fit what it is to be written to."""
    raise ShardingError(
        f"{op} writes its result to a tensor that it does not fit",
        [f"the result has shape {list(new.shape)} and {new.dtype}, the tensor is {typeof(out)}"],
        rule="a tensor in pieces keeps its size and dtype",
        remedy="take the result without out=, or make the tensor like it",
    )


def _refuse_overlap(op: Any, x: torch.Tensor, owner: Any) -> None:
    """Refuse to write to `x` where elements of whose memory it is share some."""
    strides = owner.strides if isinstance(owner, Form) else owner.stride()
    if owner.shape.numel() and not apart(owner.shape, strides):
        raise ShardingError(
            f"{op} writes to {typeof(x)}, whose memory has the strides {list(strides)}",
            rule="what is written to shows every element once, as in torch",
            remedy="x.clone() first",
        )


def _refuse_shared(op: Any, written: Sequence[torch.Tensor]) -> None:
    memories = [x.__dict__.get("_memory") or x for x in written]
    if len({id(m) for m in memories}) < len(memories):
        raise ShardingError(
            f"{op} writes twice to one memory",
            [typeof(x) for x in written],
            rule="what one op writes to does not overlap",
            remedy="write one after the other",
        )


above.remake = remake
