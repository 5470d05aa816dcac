"""Eager ops that write: each computes a new value and gives it to all tensors that share the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardlib.core.aten.functional_forms import functional_form, single_result_form
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import is_non_overlapping, written_arguments
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree, schema_of
from shardlib.distributed.provenance import result_origin
from shardlib.eager.arg_slots import (
    Slot,
    fill_slots,
    iterate_numbers,
    list_tensors,
    replace_devices,
    special_numbers_key,
    thaw_args,
)
from shardlib.eager.compile_op import CompiledOp, Operand, compile_op
from shardlib.eager.prepare import (
    COMPILE_LOCK,
    PreparedCall,
    get_local_shards,
    replicate_plain,
    run_replicated,
    wrap_results,
)
from shardlib.rules.out_variants import refuse_cast
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor import view_aliases
from shardlib.tensor.eager_cache import OPS_KEYED_BY_NUMBER_TYPE, Runner, build_key
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.host_offload import restore_to_device
from shardlib.tensor.local_shards import split_into_owned_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import Memory, ViewPath

_programs: BoundedCache[Any, CompiledOp] = BoundedCache(1 << 12)


def make_writer(op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> Runner:
    """Returns a runner of this call of an op that writes, and of all calls with its key."""

    def write_program(args: Any, kwargs: Any) -> Any:
        return _write(op, args, kwargs or {}, mesh)

    for x in list_written(op, args, kwargs):
        _refuse_overlap(op, x, x)
    functional = single_result_form(op)
    if functional is None or not isinstance(args[0], ShardedTensor):
        return write_program
    if id(op) in OPS_KEYED_BY_NUMBER_TYPE:
        OPS_KEYED_BY_NUMBER_TYPE.add(id(functional))
    call = PreparedCall(functional, args, kwargs, mesh)
    meta = call.meta()
    if isinstance(meta, torch.Tensor):
        refuse_cast(meta, args[0])
    fits = isinstance(meta, torch.Tensor) and meta.shape == args[0].shape
    write_locally = call.run_locally(meta, write=True) if fits else None
    if write_locally is None:
        return write_program

    def write(args: Any, kwargs: Any) -> Any:
        return write_program(args, kwargs) if args[0].__dict__.get("_path") else write_locally(args, kwargs)

    return write


def _write(op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> Any:
    """Runs a program from the value of the memory's owner, along the views, to the owner's new value."""
    written = list_written(op, args, kwargs)
    if not all(isinstance(x, ShardedTensor) for x in written):
        return _write_plain(op, args, kwargs, written)
    _refuse_shared(op, written)
    for x in written:
        if "_memory" in x.__dict__:
            _refuse_overlap(op, x, x.__dict__["_memory"].form)
    call = PreparedCall(op, args, kwargs, mesh)
    operands, inputs = [], []
    slots = {x.index for x in pytree.tree_leaves(_written_arguments(op, call.args, call.kwargs)) if isinstance(x, Slot)}
    for i, (x, form) in enumerate(zip(call.tensors, call.forms, strict=True)):
        memory: Memory | None = x.__dict__.get("_memory")
        is_written = i in slots  # another operand may be the same tensor: `x.mul_(x)`
        if is_written and memory is not None:
            operands.append(Operand(memory.form, x.__dict__["_path"], form, True))
            inputs.append(memory.locals)
        else:
            operands.append(Operand(form, written=is_written, plain=not isinstance(x, ShardedTensor)))
            inputs.append(get_local_shards(x, mesh))
    owners = tuple((x.form, x.path) for x in operands if x.written)
    numbers = list(iterate_numbers((args, kwargs)))
    key = (build_key(op, args, kwargs), special_numbers_key(numbers), owners)
    compiled = _programs.get(key)
    if compiled is None:
        _check_out_shapes(op, call)
        compiled = _programs[key] = call.compiled(operands)
    origin = result_origin(call.number, call.tensors, numbers) if mesh.kind == "distributed" else 0
    results = compiled(inputs, numbers, origin)
    rest = iter(results[compiled.own :])
    for x, operand in zip(call.tensors, operands, strict=True):
        if operand.written:
            assert isinstance(x, ShardedTensor)
            value = next(rest)
            view_aliases.assign_shards(x, value, next(rest) if operand.path else value, origin)
    own = list(pytree.tree_unflatten(wrap_results(compiled, results), compiled.tree))
    return _returned(op, own, written)


def _check_out_shapes(op: Any, call: PreparedCall) -> None:
    """Refuses a result of another shape, which would resize the written tensor."""
    names = written_arguments(op)
    values = [form.abstract() for form in call.forms]
    args, kwargs = fill_slots(replace_devices((call.args, call.kwargs), torch.device("meta")), values)
    functional = functional_form(op)
    if functional is None or not all(name in call.kwargs for name in names):
        return
    results = functional(*args, **{k: x for k, x in kwargs.items() if k not in names})
    for name, new in zip(names, results if isinstance(results, tuple) else (results,), strict=False):
        slot = call.kwargs[name]
        if isinstance(slot, Slot) and new.shape != call.tensors[slot.index].shape:
            refuse_out_mismatch(op, new, call.tensors[slot.index])


def _write_plain(op: Any, args: Any, kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> Any:
    """Writes sharded values to plain tensors, which every process has whole."""
    if any(isinstance(x, ShardedTensor) for x in written):
        raise ShardingError(
            f"{op} writes to sharded and to plain tensors at once",
            [typeof(x) for x in written],
            rule="what one op writes to is sharded, or is not",
            remedy="place all of them: shard(x, spec)",
        )
    out = run_replicated(op, args, kwargs)
    results = out if isinstance(out, tuple) else (out,)
    own = [x for x, r in zip(results, schema_of(op).returns, strict=False) if r.alias_info is None]
    return _returned(op, own, written)


def restore_shards(x: ShardedTensor) -> tuple[torch.Tensor, ...]:
    """Returns and sets the shards of a tensor that was offloaded, or whose memory another tensor wrote to."""
    if (shards := restore_to_device(x)) is None:
        shards = x.__dict__["_locals"] = _compute_view(x)
    return shards


def _compute_view(x: ShardedTensor) -> tuple[torch.Tensor, ...]:
    memory: Memory = x.__dict__["_memory"]
    path: ViewPath = x.__dict__["_path"]
    if not path:
        return memory.locals
    if any(has_trait(step[0], "takes_strides") for step in path):
        return split_into_owned_shards(
            apply_view_path(memory.form, memory.locals, path), x.sharding, x.mesh, donated=True
        )
    key = (memory.form, path, x._form)
    compiled = _programs.get(key)
    if compiled is None:
        with COMPILE_LOCK:
            operand = Operand(memory.form, path, x._form)
            compiled = _programs[key] = compile_op(None, (), {}, [operand], x._form.mesh)
    (out,) = compiled([memory.locals], lineage=x._origin)
    return tuple(out)


def apply_view_path(form: Form, locals_: tuple[torch.Tensor, ...], path: ViewPath) -> torch.Tensor:
    """Applies views to the gathered owner, in memory as on one device; for paths with `as_strided`."""
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
        out = op(shown, *map(thaw_args, args), **dict(kwargs))
        shown = out if item is None else out[item]
    return shown.clone()


def list_written(op: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that `op` writes to, in the order of its schema."""
    return list_tensors(_written_arguments(op, args, kwargs))


def _written_arguments(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that `op` writes to: tensors, lists of them, or slots."""
    names = written_arguments(op)
    arguments = enumerate(schema_of(op).arguments)
    return [args[i] if i < len(args) else kwargs.get(a.name) for i, a in arguments if a.name in names]


def _returned(op: Any, own: list[Any], written: Sequence[torch.Tensor]) -> Any:
    """Returns the results of an in-place op: written tensors and its own results, in the order of its schema."""
    written_ones, own_ones = iter(written), iter(own)
    returns = schema_of(op).returns
    out = tuple(
        next(written_ones) if r.alias_info is not None and r.alias_info.is_write else next(own_ones) for r in returns
    )
    return out if len(out) > 1 else out[0] if out else None


def list_out_arguments(op: Any) -> list[Any]:
    """Returns the arguments of an op's schema that it writes to."""
    return [a for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write]


def make_out_runner(op: Any) -> Runner:
    """Returns a runner of an `out=` form: the functional op, then writes of its results."""
    functional, names = functional_form(op), [a.name for a in list_out_arguments(op)]
    assert functional is not None, f"{op} is the out= form of an op"

    def run(args: Any, kwargs: Any) -> Any:
        outs = [kwargs[name] for name in names]
        results = functional(*args, **{k: x for k, x in kwargs.items() if k not in names})
        results = results if isinstance(results, tuple | list) else (results,)
        for out, new in zip(list_tensors(tuple(outs)), results, strict=True):
            write_out(op, new, out)
        if not schema_of(op).returns:
            return None
        return tuple(outs) if len(outs) > 1 else outs[0]

    return run


def write_out(op: Any, new: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a result to an `out=` tensor; as in torch, an empty tensor takes the result's shape."""
    if not torch.can_cast(new.dtype, out.dtype) or (out.shape != new.shape and out.numel()):
        refuse_out_mismatch(op, new, out)
    if not isinstance(out, ShardedTensor):  # torch's own scratch memory, say
        out.resize_(new.shape).copy_(new.full_tensor() if isinstance(new, ShardedTensor) else new)
    elif out.shape == new.shape:
        out.copy_(new)
    else:
        out.data = (new if isinstance(new, ShardedTensor) else replicate_plain(new, out._form)).to(out.dtype)


def refuse_out_mismatch(op: Any, new: torch.Tensor, out: torch.Tensor) -> NoReturn:
    """Raises the error for a result whose shape or dtype does not fit the written tensor."""
    raise ShardingError(
        f"{op} writes its result to a tensor that it does not fit",
        [f"the result has shape {list(new.shape)} and {new.dtype}, the tensor is {typeof(out)}"],
        rule="a ShardedTensor keeps its size and dtype",
        remedy="take the result without out=, or make the tensor like it",
    )


def _refuse_overlap(op: Any, x: torch.Tensor, owner: Any) -> None:
    """Refuses to write to memory whose elements overlap."""
    strides = owner.strides if isinstance(owner, Form) else owner.stride()
    if owner.shape.numel() and not is_non_overlapping(owner.shape, strides):
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


tensor_hooks.restore_shards = restore_shards
