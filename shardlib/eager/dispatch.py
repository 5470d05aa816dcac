"""Operations on ShardedTensors outside `jit`: each is a program of one op, made once per op, forms and arguments.

Autograd sits above this: `.backward()` on a ShardedTensor dispatches its gradient's ops here one by one. An op whose
operands fit as they are becomes a call on the pieces; any other becomes a program with communication (`prepare`). Ops
that are written as other ops come back here one by one. An op whose result's shape depends on values runs on every
device, with whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from shardlib.aten.traits import has, is_view
from shardlib.aten.views import functional_form
from shardlib.eager.prepare import LOCK, Prepared, pieces, whole
from shardlib.eager.slots import devices_of, tensors_of
from shardlib.eager.writes import FILLS, put, strided, writer
from shardlib.errors import ShardingError
from shardlib.graph import PER_RANK
from shardlib.meshes.mesh import Mesh
from shardlib.normalise import mask_filled
from shardlib.random.draw import in_call, one_call
from shardlib.rules.table import row
from shardlib.specs.layout import Layout
from shardlib.state import unseen
from shardlib.tensors import aliases
from shardlib.tensors.agreed import compare_operands
from shardlib.tensors.form import Form
from shardlib.tensors.tensor import ShardedTensor, above, typeof, wrap
from shardlib.tensors.warm import LOOSE, PROGRAMS, Run, key_of
from shardlib.tracing.decompositions import DECOMPOSITIONS

aten = torch.ops.aten

Handler = Callable[[Any, Any, dict[str, Any]], Any]

HANDLERS: dict[Any, Handler] = {}
_known: set[Any] = set()


def handles(*ops: Any) -> Callable[[Handler], Handler]:
    """Register what runs these ops on ShardedTensors; it may return NotImplemented, and is asked again each time."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register


@unseen
def dispatch(op: Any, args: Any, kwargs: dict[str, Any], key: Any) -> Any:
    """Run one ATen op on sharded (and plain, taken as whole) tensors that is not ready yet; tensor results are sharded.

    `key` is the call's, as `key_of` makes it.

    Raises `ShardingError` for tensors of several meshes, for a ShardedTensor that a traced function closes over, and
    for ops that make no sense for a tensor in pieces.
    """
    if not isinstance(op, OpOverload):
        raise ShardingError(
            f"{op} on ShardedTensors",
            [typeof(x) for x in tensors_of((args, kwargs))],
            rule="outside jit, ops of ATen and of torch.library run, not operators that take functions",
            remedy="jit the function that calls it",
        )
    if (handler := HANDLERS.get(op)) is not None:
        result = handler(op, args, kwargs)
        if result is not NotImplemented:
            return result
    with LOCK:
        if op not in _known:
            _learn(op)
            key = key_of(op, args, kwargs)
        if (known := PROGRAMS.get(key)) is None:
            tensors = tensors_of(args) + tensors_of(kwargs)
            sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
            if op.namespace in PER_RANK:
                refuse_collective(str(op), [typeof(x) for x in sharded])
            mesh = _mesh(op, sharded)
            run = _make(op, args, kwargs, tensors, mesh)
    if known is not None:
        return known(args, kwargs)
    if mesh.kind == "distributed":
        compare_operands(op, tensors, mesh)  # which waits for other ranks, so not under the lock
    PROGRAMS[key] = run
    return run(args, kwargs)


def _make(op: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], mesh: Mesh) -> Run:
    """What runs this call, and all that have its key."""
    devices = devices_of(args, kwargs)
    if devices and any(device.type == "meta" for device in devices) and not _composite(op):
        return lambda args, kwargs: Prepared(op, args, kwargs or {}, mesh).meta()  # shapes alone are nowhere
    _refuse_devices(op, tensors, devices, mesh)
    _refuse_meta(op, tensors)
    if not _ordinary(op) and (other := _otherwise(op, args, kwargs, mesh)) is not None:
        return other
    call = Prepared(op, args, kwargs, mesh)
    if (alike := call.as_before()) is not None:
        return alike
    try:
        meta = call.meta()
    except (NotImplementedError, DynamicOutputShapeException, DataDependentOutputException):
        return lambda args, kwargs: whole(op, args, kwargs or {})
    except RuntimeError as error:
        if not any(text in str(error) for text in _VALUES):
            raise
        return lambda args, kwargs: whole(op, args, kwargs or {})
    return call.viewing(call.direct(meta) or call.program())


@cache
def _ordinary(op: Any) -> bool:
    """Whether an op is sure to run as it is, and to make new tensors or views."""
    return (
        not op._schema.is_mutable
        and torch.Tag.inplace_view not in op.tags
        and not has(op, "storage")
        and op not in DECOMPOSITIONS
        and not op._schema.name.startswith("aten::_foreach_")
        and not _composite(op)
        and _returns_tensors(op)
    )


def _returns_tensors(op: Any) -> bool:
    return any("Tensor" in str(r.type) for r in op._schema.returns)


def _otherwise(op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> Run | None:
    """How an op runs that is not an op on pieces in its own name."""
    if torch.Tag.inplace_view in op.tags and not has(op, "storage"):
        return _turner(op)
    _refuse_storage(op, args)
    if (other := _written_otherwise(op, mesh)) is not None:
        return other
    if op._schema.is_mutable:
        return writer(op, args, kwargs, mesh)
    if not _returns_tensors(op):  # it returns Python values
        return lambda args, kwargs: whole(op, args, kwargs or {})
    return None


# What torch says of meta tensors whose values an op looks at, where it has no exception of its own for it.
_VALUES = ("on meta tensors", "a meta tensor without output_size", "no fake impl registered")


def _written_otherwise(op: Any, mesh: Mesh) -> Run | None:
    """How an op runs that stands for other ops: each of these comes back to `dispatch`."""
    if op._schema.is_mutable and all(a.kwarg_only for a in _outs(op)) and functional_form(op) is not None:
        return through_copies(op)
    if op in DECOMPOSITIONS:
        form = DECOMPOSITIONS[op]
        draws = torch.Tag.nondeterministic_seeded in op.tags

        def decomposed(args: Any, kwargs: Any) -> Any:
            with mesh, one_call() if draws and not in_call() else nullcontext():
                out = form(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
            if op._schema.is_mutable:  # what was written to copies would be lost
                return writer(op, args, kwargs or {}, mesh)(args, kwargs or {})
            return whole(op, args, kwargs or {})

        return decomposed
    if op._schema.name.startswith("aten::_foreach_"):
        return lambda args, kwargs: op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
    if _composite(op) and (row(op) is None or is_view(op)):
        return lambda args, kwargs: op.decompose(*args, **(kwargs or {}))
    return None


def _outs(op: Any) -> list[Any]:
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def through_copies(op: Any) -> Run:
    """The `out=` form of an op: the op, and its results written where they are wanted."""
    functional, names = functional_form(op), [a.name for a in _outs(op)]
    assert functional is not None, f"{op} is the out= form of an op"

    def run(args: Any, kwargs: Any) -> Any:
        outs = [kwargs[name] for name in names]
        made = functional(*args, **{k: x for k, x in kwargs.items() if k not in names})
        made = made if isinstance(made, tuple | list) else (made,)
        for out, new in zip(tensors_of(tuple(outs)), made, strict=True):
            put(op, new, out)
        if not op._schema.returns:
            return None
        return tuple(outs) if len(outs) > 1 else outs[0]

    return run


@cache
def _composite(op: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in op.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _turner(op: Any) -> Run:
    """An op that makes a tensor a view of what it was: `t_`, `squeeze_`."""
    view = functional_form(op)
    assert view is not None, f"{op} is the form in place of a view"

    def turn(args: Any, kwargs: Any) -> Any:
        x, *rest = args
        x.data = view(x, *rest, **(kwargs or {}))
        return x

    return turn


def _learn(op: Any) -> None:
    """Note whether an op's numbers only enter its arithmetic."""
    arguments = op._schema.arguments
    pointwise = torch.Tag.pointwise in op.tags or op in FILLS
    sizes = any(str(a.type) in ("int", "SymInt", "List[int]", "Optional[int]") for a in arguments)
    if pointwise and not sizes:
        LOOSE.add(id(op))
    _known.add(op)


# --- ops with a way of their own --------------------------------------------------------------------------------------


@handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
def _alias(op: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    PROGRAMS[key_of(op, args, kwargs)] = _aliased
    return _aliased((x,), None)


def _aliased(args: Any, kwargs: Any) -> ShardedTensor:
    (x,) = args
    with aliases.like(x):
        out = wrap(x._form, x._locals)
    aliases.view(x, out, ())
    return out


@handles(aten.as_strided.default)
def _as_strided(op: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Strides speak of the owner's memory, whatever of it the tensor shows."""
    x, size, stride, *rest = args
    offset = rest[0] if rest else kwargs.get("storage_offset")
    memory = aliases.memory_of(x)
    start = (x._form.offset if offset is None else offset) - memory.form.offset
    path = ((op, (tuple(size), tuple(stride), start), (), None),)
    value = strided(memory.form, memory.locals, path)
    form = Form.of(Layout.replicated(value.shape), x.mesh, x.dtype, x._form.device, None, stride, start)
    with aliases.like(x):
        out = wrap(form, pieces(value, x.mesh))
    memory.join(out, path)
    return out


@handles(aten.resize_.default, aten.resize_as_.default)
def _resize(op: Any, args: Any, kwargs: Any) -> Any:
    x, size = args[0], args[1]
    shape = torch.Size(size.shape if isinstance(size, torch.Tensor) else size)
    if isinstance(x, ShardedTensor) and x.shape != shape and x.numel() == shape.numel() and x.is_contiguous():
        x.data = x.view(shape)
    elif isinstance(x, ShardedTensor) and x.shape != shape:
        put(op, torch.empty(shape, dtype=x.dtype, device=x.device), x)
    elif not isinstance(x, ShardedTensor):
        x.resize_(shape)
    return x


@handles(aten.set_.source_Tensor)
def _set(op: Any, args: Any, kwargs: Any) -> Any:
    """What a tensor becomes another one by; torch's parametrizations do so with a module's parameter."""
    x, source = args
    if not (isinstance(x, ShardedTensor) and isinstance(source, ShardedTensor)):
        return NotImplemented
    x.data = source.detach()
    return x


@handles(aten._local_scalar_dense.default)
def _item(op: Any, args: Any, kwargs: Any) -> Any:
    return args[0].full_tensor().item()


@handles(aten.equal.default)
def _equal(op: Any, args: Any, kwargs: Any) -> bool:
    x, y = args
    return x.shape == y.shape and bool((x == y).all())


@handles(aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def _masked(op: Any, args: Any, kwargs: Any) -> Any:
    """A mask among the indices says where its elements are; how many these are, only its values say."""
    x, indices, *rest = args
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    if rest and rest[0].dim() == 0 and torch.can_cast(rest[0].dtype, x.dtype):
        rest[0] = rest[0].to(x.dtype)  # as torch fills with one value
    if rest and (at := mask_filled(x, indices, *rest, *kwargs.values())) is not None:
        wide = indices[at][(..., *[None] * (x.dim() - at - indices[at].dim()))]
        return (aten.masked_fill if op is aten.index_put.default else aten.masked_fill_).Tensor(x, wide, rest[0])
    found: list[torch.Tensor | None] = []
    for i in indices:
        if i is not None and i.dtype in (torch.bool, torch.uint8):
            mask = i.full_tensor() if isinstance(i, ShardedTensor) else i
            found += mask.nonzero().unbind(1)
        else:
            found.append(i)
    return op(x, found, *rest, **kwargs)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _mesh(op: Any, sharded: Sequence[ShardedTensor]) -> Mesh:
    meshes = list(dict.fromkeys([x._form.mesh for x in sharded]))
    if len(meshes) > 1:
        raise ShardingError(
            f"{op} takes tensors on {len(meshes)} meshes",
            [f"{typeof(x)} on {x.mesh}" for x in sharded],
            rule="all tensors of a program live on one mesh",
            remedy="place one again: shard(x.full_tensor(), spec) inside `with` the other's mesh",
        )
    return meshes[0]


def _refuse_storage(op: Any, args: Any) -> None:
    if has(op, "storage"):
        raise ShardingError(
            f"{op} on a ShardedTensor",
            [typeof(x) for x in tensors_of(args)],
            rule="a tensor in pieces is strided, keeps its size, and has no storage of its own",
            remedy="make a new tensor: torch.zeros_like(x), torch.cat([x, y]), x[:n]",
        )


def _refuse_meta(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse values and none in one call. Torch takes one such, a write to a meta tensor, which changes nothing."""
    if op.namespace != "aten" or len({x.is_meta for x in tensors}) == 1:
        return
    if tensors[0].is_meta and op._schema.is_mutable:
        return
    raise ShardingError(
        f"{op} takes meta tensors and others",
        [f"{typeof(x)} {'is on meta' if x.is_meta else f'lives on {x.device}'}" for x in tensors],
        rule="a meta tensor has a shape and no values",
        remedy="make values first: torch.empty_like(x, device=mesh.device), module.to_empty(device=mesh.device)",
    )


def _refuse_devices(op: Any, tensors: Sequence[Any], devices: Sequence[torch.device], mesh: Mesh) -> None:
    # A number in a tensor on the CPU goes to a GPU with the kernel that reads it.
    plain = [x.device for x in tensors if not isinstance(x, ShardedTensor) and (x.dim() or x.device.type != "cpu")]
    others = [d for d in (*devices, *plain) if d.type not in (mesh.device, "meta")]
    if others:
        raise ShardingError(
            f"{op} takes a ShardedTensor to another device",
            [f"{typeof(x)} lives on {mesh}, on {mesh.device}" for x in tensors if isinstance(x, ShardedTensor)]
            + [f"{device} is asked for" for device in others],
            rule="a mesh says which devices its tensors live on",
            remedy=f"x.full_tensor().to({str(others[0])!r}), or place it on a mesh of such devices",
        )


def refuse_collective(what: str, found: list[str]) -> NoReturn:
    """Raise the error for a collective of torch.distributed that takes these ShardedTensors."""
    raise ShardingError(
        f"{what} on a ShardedTensor",
        found,
        rule="collectives of torch.distributed take a rank's own tensors; a ShardedTensor is the whole, and its sums "
        "and copies are ordinary ops (x.sum(), x.redistribute(spec))",
        remedy="x.to_local() for this rank's piece alone, x.full_tensor() for the whole, sl.psum and the others in a "
        "shard_map",
    )


above.dispatch = dispatch
