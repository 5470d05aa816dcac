"""Ops outside `jit` that stand for something else on a tensor in pieces, by their names: a table of forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.compiler.simplify.basic import mask_filled
from shardlib.core.aten.op_traits import has
from shardlib.eager import unsupported
from shardlib.eager.inplace import put, strided
from shardlib.eager.prepare import pieces
from shardlib.sharding.layout import Layout
from shardlib.tensor import view_aliases
from shardlib.tensor.host_offload import share
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form

aten = torch.ops.aten


@dataclass(frozen=True)
class OwnForm:
    """What runs an op's calls, and which of them, as far as types and dtypes of the arguments tell."""

    run: Callable[[Any, Any, dict[str, Any]], Any]
    takes: Callable[[Any], bool] = lambda args: True


def _alias(op: Any, args: Any, kwargs: Any) -> ShardedTensor:
    (x,) = args
    with view_aliases.like(x):
        out = wrap(x._form, ())
    share(x, out)
    view_aliases.view(x, out, ())
    return out


def _as_strided(op: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Strides speak of the owner's memory, whatever of it the tensor shows, as numbers of the tensor's dtype and with
    its marks."""
    x, size, stride, *rest = args
    offset = rest[0] if rest else kwargs.get("storage_offset")
    memory = view_aliases.memory_of(x)
    begins = memory.form.offset * memory.form.dtype.itemsize // x.dtype.itemsize
    start = (x._form.offset if offset is None else offset) - begins
    path = (
        *(step for step in x.__dict__["_path"] if has(step[0], "retypes") or has(step[0], "pairs")),
        (op, (tuple(size), tuple(stride), start), (), None),
        *((mark, (), (), None) for mark in view_aliases.bits(x)),
    )
    value = strided(memory.form, memory.locals, path)
    form = Form.of(Layout.replicated(value.shape), x.mesh, x.dtype, x._form.device, None, stride, start + begins)
    with view_aliases.like(x):
        out = wrap(form, pieces(value, x.mesh))
    memory.join(out, path)
    return out


def _resize(op: Any, args: Any, kwargs: Any) -> Any:
    x, size = args[0], args[1]
    shape = torch.Size(size.shape if isinstance(size, torch.Tensor) else size)
    if isinstance(x, ShardedTensor) and x.shape != shape and x.numel() == shape.numel() and x.is_contiguous():
        x.data = x.view(shape)
    elif isinstance(x, ShardedTensor) and x.shape != shape:
        if x.numel():
            unsupported.storage(op, [x])
        put(op, torch.empty(shape, dtype=x.dtype, device=x.device), x)
    elif not isinstance(x, ShardedTensor):
        x.resize_(shape)
    return x


def _fill(op: Any, args: Any, kwargs: Any) -> Any:
    return args[0].fill_(args[1])


def _set(op: Any, args: Any, kwargs: Any) -> Any:
    """What a tensor becomes another one by; torch's parametrizations do so with a module's parameter."""
    x, source = args
    x.data = source.detach()
    return x


def _equal(op: Any, args: Any, kwargs: Any) -> bool:
    x, y = args
    return x.shape == y.shape and bool((x == y).all())


def _masked(op: Any, args: Any, kwargs: Any) -> Any:
    """A mask among the indices says where its elements are; how many these are, only its values say."""
    x, indices, *rest = args
    dim = 0
    for i in indices:
        if _is_mask(i) and i.shape != x.shape[dim : dim + i.dim()]:
            wrong = next(d for d, n in enumerate(i.shape) if x.shape[dim + d : dim + d + 1] != (n,))
            unsupported.mask(i.shape, wrong, x.shape, dim + wrong)
        dim += i.dim() if _is_mask(i) else 1
    if rest and rest[0].dim() == 0 and torch.can_cast(rest[0].dtype, x.dtype):
        rest[0] = rest[0].to(x.dtype)  # as torch fills with one value
    if rest and (at := mask_filled(x, indices, *rest, *kwargs.values())) is not None:
        wide = indices[at][(..., *[None] * (x.dim() - at - indices[at].dim()))]
        return (aten.masked_fill if op is aten.index_put.default else aten.masked_fill_).Tensor(x, wide, rest[0])
    found: list[torch.Tensor | None] = []
    for i in indices:
        if _is_mask(i):
            found += (i.full_tensor() if isinstance(i, ShardedTensor) else i).nonzero().unbind(1)
        else:
            found.append(i)
    return op(x, found, *rest, **kwargs)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _unscale(op: Any, args: Any, kwargs: Any) -> None:
    """What `torch.amp.GradScaler` asks of gradients: to unscale many, and to note whether any is not finite.

    The scaler's own tensors are plain, and alike on all ranks: what one piece shows, all ranks find.
    """
    grads, found, inverse = args
    if plain := [g for g in grads if not isinstance(g, ShardedTensor)]:
        op(plain, found, inverse)
    for g in grads:
        if isinstance(g, ShardedTensor):
            bad = (~g.isfinite()).any().to(found.dtype)
            assert isinstance(bad, ShardedTensor), "an op of one makes one"
            found.copy_(torch.maximum(found, bad if isinstance(found, ShardedTensor) else bad.full_tensor()))
            g.mul_(inverse)


_ALIAS = OwnForm(_alias)
_RESIZE = OwnForm(_resize)
_MASKED = OwnForm(_masked, lambda args: any(map(_is_mask, args[1])))

FORMS: Mapping[Any, OwnForm] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default), _ALIAS),
    aten.as_strided.default: OwnForm(_as_strided),
    **dict.fromkeys((aten.resize_.default, aten.resize_as_.default), _RESIZE),
    aten.set_.source_Tensor: OwnForm(_set, lambda args: all(isinstance(x, ShardedTensor) for x in args)),
    aten.equal.default: OwnForm(_equal),
    aten.copy_.default: OwnForm(_fill, lambda args: not isinstance(args[1], torch.Tensor)),
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default), _MASKED),
    **dict.fromkeys((aten.index_put_.default, aten._index_put_impl_.default), _MASKED),
    aten._amp_foreach_non_finite_check_and_unscale_.default: OwnForm(_unscale),
}
