"""Ops outside `jit` with an implementation of their own for ShardedTensors: a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.compiler.simplify.single_ops import find_fill_mask
from shardlib.core.aten.op_traits import has_trait
from shardlib.eager import unsupported
from shardlib.eager.inplace import apply_view_path, write_out
from shardlib.eager.prepare import get_local_shards
from shardlib.sharding.layout import Layout
from shardlib.tensor import view_aliases
from shardlib.tensor.host_offload import share_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form

aten = torch.ops.aten


@dataclass(frozen=True)
class Implementation:
    """Runs the calls of an op for which `takes` holds; `takes` may read types and dtypes of arguments alone."""

    run: Callable[[Any, Any, dict[str, Any]], Any]
    takes: Callable[[Any], bool] = lambda args: True


def _alias(op: Any, args: Any, kwargs: Any) -> ShardedTensor:
    (x,) = args
    with view_aliases.match_inference_mode(x):
        out = wrap(x._form, ())
    share_shards(x, out)
    view_aliases.note_view(x, out, ())
    return out


def _as_strided(op: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Views the owner's memory by strides, in the tensor's dtype and with its conj and neg marks."""
    x, size, stride, *rest = args
    offset = rest[0] if rest else kwargs.get("storage_offset")
    memory = view_aliases.memory_of(x)
    owner_offset = memory.form.offset * memory.form.dtype.itemsize // x.dtype.itemsize
    start = (x._form.offset if offset is None else offset) - owner_offset
    path = (
        *(
            step
            for step in x.__dict__["_path"]
            if has_trait(step[0], "bitcasts") or has_trait(step[0], "complex_pairs")
        ),
        (op, (tuple(size), tuple(stride), start), (), None),
        *((mark, (), (), None) for mark in view_aliases.pending_marks(x)),
    )
    value = apply_view_path(memory.form, memory.locals, path)
    form = Form.intern(
        Layout.replicated(value.shape), x.mesh, x.dtype, x._form.device, None, stride, start + owner_offset
    )
    with view_aliases.match_inference_mode(x):
        out = wrap(form, get_local_shards(value, x.mesh))
    memory.join(out, path)
    return out


def _resize(op: Any, args: Any, kwargs: Any) -> Any:
    x, size = args[0], args[1]
    shape = torch.Size(size.shape if isinstance(size, torch.Tensor) else size)
    if isinstance(x, ShardedTensor) and x.shape != shape and x.numel() == shape.numel() and x.is_contiguous():
        x.data = x.view(shape)
    elif isinstance(x, ShardedTensor) and x.shape != shape:
        if x.numel():
            unsupported.refuse_storage(op, [x])
        write_out(op, torch.empty(shape, dtype=x.dtype, device=x.device), x)
    elif not isinstance(x, ShardedTensor):
        x.resize_(shape)
    return x


def _fill(op: Any, args: Any, kwargs: Any) -> Any:
    return args[0].fill_(args[1])


def _set(op: Any, args: Any, kwargs: Any) -> Any:
    """Makes a tensor another one, as torch's parametrizations do with a module's parameter."""
    x, source = args
    x.data = source.detach()
    return x


def _equal(op: Any, args: Any, kwargs: Any) -> bool:
    x, y = args
    return x.shape == y.shape and bool((x == y).all())


def _index_by_mask(op: Any, args: Any, kwargs: Any) -> Any:
    """Indexes by masks: as `masked_fill` if possible, else by the positions in the gathered masks."""
    x, indices, *rest = args
    dim = 0
    for i in indices:
        if _is_mask(i) and i.shape != x.shape[dim : dim + i.dim()]:
            wrong = next(d for d, n in enumerate(i.shape) if x.shape[dim + d : dim + d + 1] != (n,))
            unsupported.refuse_mask(i.shape, wrong, x.shape, dim + wrong)
        dim += i.dim() if _is_mask(i) else 1
    if rest and rest[0].dim() == 0 and torch.can_cast(rest[0].dtype, x.dtype):
        rest[0] = rest[0].to(x.dtype)  # as torch fills with one value
    if rest and (at := find_fill_mask(x, indices, *rest, *kwargs.values())) is not None:
        wide = indices[at][(..., *[None] * (x.dim() - at - indices[at].dim()))]
        return (aten.masked_fill if op is aten.index_put.default else aten.masked_fill_).Tensor(x, wide, rest[0])
    positions: list[torch.Tensor | None] = []
    for i in indices:
        if _is_mask(i):
            positions += (i.full_tensor() if isinstance(i, ShardedTensor) else i).nonzero().unbind(1)
        else:
            positions.append(i)
    return op(x, positions, *rest, **kwargs)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _unscale(op: Any, args: Any, kwargs: Any) -> None:
    """Unscales gradients for `torch.amp.GradScaler`, and sets `found_inf` if any is not finite.

    The scaler's own tensors are plain and equal on all ranks, so `found_inf` takes the result of all shards.
    """
    grads, found_inf, inverse = args
    if plain := [g for g in grads if not isinstance(g, ShardedTensor)]:
        op(plain, found_inf, inverse)
    for g in grads:
        if isinstance(g, ShardedTensor):
            bad = (~g.isfinite()).any().to(found_inf.dtype)
            assert isinstance(bad, ShardedTensor), "an op on a ShardedTensor returns one"
            found_inf.copy_(
                torch.maximum(found_inf, bad if isinstance(found_inf, ShardedTensor) else bad.full_tensor())
            )
            g.mul_(inverse)


_ALIAS = Implementation(_alias)
_RESIZE = Implementation(_resize)
_MASKED = Implementation(_index_by_mask, lambda args: any(map(_is_mask, args[1])))

IMPLEMENTATIONS: Mapping[Any, Implementation] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default), _ALIAS),
    aten.as_strided.default: Implementation(_as_strided),
    **dict.fromkeys((aten.resize_.default, aten.resize_as_.default), _RESIZE),
    aten.set_.source_Tensor: Implementation(_set, lambda args: all(isinstance(x, ShardedTensor) for x in args)),
    aten.equal.default: Implementation(_equal),
    aten.copy_.default: Implementation(_fill, lambda args: not isinstance(args[1], torch.Tensor)),
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default), _MASKED),
    **dict.fromkeys((aten.index_put_.default, aten._index_put_impl_.default), _MASKED),
    aten._amp_foreach_non_finite_check_and_unscale_.default: Implementation(_unscale),
}
