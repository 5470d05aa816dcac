"""Ops on `PerDevice` values. An op is a `vmap` over the axes of the body; an op that writes is its functional form and
a copy; a collective is arithmetic along the stacked dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.aten.functional_forms import FILLS, functional_form
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.aten.schemas import may_draw_random, written_arguments
from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import (
    DispatchKey,
    excluded_keys,
    forced_keys,
    included_keys,
    pytree,
    schema_of,
)
from shardlib.ops import set_data
from shardlib.ops.attention.autograd import Attention, AttentionBackward
from shardlib.ops.attention.op import OPS as ATTENTION
from shardlib.ops.constraint import constrain
from shardlib.primitives import manual_ops as _defined  # noqa: F401  the ops exist once it is imported
from shardlib.primitives import vmap_body
from shardlib.primitives.per_device import PerDevice, order_axes

aten = torch.ops.aten


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an op on values of a body."""
    if (form := _FORMS.get(func)) is not None:
        return form(*args, **kwargs)
    if may_draw_random(func, args, kwargs):
        raise random_draw_error()
    if torch.Tag.inplace_view in func.tags:
        functional: Any = functional_form(func)
        if functional is not None and is_view(functional):
            return args[0].replace_view(functional(*args, **kwargs))
    if written := written_arguments(func):
        return _run_write(func, written, args, kwargs)
    out = run_stacked(func, args, kwargs)
    return _mark_views(func, args, kwargs, out) if is_view(func) else out


def random_draw_error() -> ShardingError:
    """Makes the error for random draws in a body."""
    return ShardingError(
        "a shard_map body draws random numbers",
        rule="an element's number belongs to its place in the whole tensor, which a body does not know",
        remedy="draw outside, from the whole tensor's shape, and pass the numbers in as an argument of the body",
    )


_TRANSFORM_MODES = ("Batched", "BatchedDecomposition", "VmapMode", "DynamicLayerFrontMode", "DynamicLayerBackMode")
# A lazy conjugate's stack is a lazy conjugate, too.
_BATCHING = (
    *(f"FuncTorch{name}" for name in _TRANSFORM_MODES),
    "Conjugate",
    "Negative",
)


def _vmap_below_autograd() -> Any:
    """Makes a context in which `torch.vmap` works inside `__torch_dispatch__`."""
    excluded = excluded_keys()
    for name in _BATCHING:
        excluded = excluded.remove(getattr(DispatchKey, name))
    return forced_keys(included_keys(), excluded)


def run_stacked(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an op that writes nothing on all devices: its results vary over the axes of its operands."""
    masked = func is aten.index.Tensor and any(k is not None and k.dtype in _MASKS for k in args[1])
    if masked or (torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor):
        raise ShardingError(
            f"a shard_map body makes a shape that depends on values, by {'x[mask]' if masked else func}",
            rule="devices hold other values, and run the same code on the same shapes",
            remedy="x.where(mask, 0) keeps the shape",
        )
    if func is aten.index_put.default and (masked_result := _put_masked(*args, **kwargs)) is not None:
        return masked_result
    leaves, tree = pytree.tree_flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, PerDevice)]
    first: PerDevice = leaves[at[0]]
    axes = order_axes(first.mesh, {a for i in at for a in leaves[i].axes})

    def call(*stacks: Tensor) -> Any:
        full = list(leaves)
        for i, x in zip(at, stacks, strict=True):
            full[i] = x
        a, k = pytree.tree_unflatten(full, tree)
        out = _FUNCTIONS[func].apply(*_positional(func, a, k)) if func in _FUNCTIONS else func(*a, **k)
        results[:] = pytree.tree_flatten(out)
        return [x for x in results[0] if isinstance(x, Tensor)]  # other results are equal on all devices

    results: list[Any] = []
    for name in reversed(axes):
        dims = tuple(0 if name in leaves[i].axes else None for i in at)
        call = torch.vmap(call, in_dims=dims, randomness="error")
    with _vmap_below_autograd():
        tensors = iter(call(*(leaves[i].stack for i in at)))
    flat, out_tree = results
    out = [next(tensors) if isinstance(x, Tensor) else x for x in flat]
    # The result depends on shapes only, which devices share.
    if has_trait(func, "metadata_only") or has_trait(func, "creates"):
        out, axes = [x[(0,) * len(axes)] for x in out], ()
    return pytree.tree_unflatten([first.like(x, axes) if isinstance(x, Tensor) else x for x in out], out_tree)


def _positional(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    rest = schema_of(func).arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


_MASKS = (torch.bool, torch.uint8)


def _put_masked(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:
    """Computes `x[mask] = value` for one value for all elements of the mask; None if no index is a mask."""
    present = [(d, k) for d, k in enumerate(indices) if k is not None]
    if not any(k.dtype in _MASKS for _, k in present):
        return None
    first, mask = present[0]
    trailing = x.dim() - mask.dim() - first
    at = values.dim() - trailing - 1  # the dim of `values` that counts the elements of the mask
    if len(present) > 1 or (at >= 0 and values.shape[at] != 1):
        raise ShardingError(
            "a shard_map body writes several values where a mask says",
            [f"values of shape {list(values.shape)} at a mask of shape {list(mask.shape)}"],
            rule="how many places a mask has differs from device to device, and shapes do not",
            remedy="torch.where(mask, values, x), with a value for every place",
        )
    if at >= 0:
        values = values.reshape([*values.shape[:at], *(1,) * mask.dim(), *values.shape[at + 1 :]])
    mask = mask.bool().reshape([*mask.shape, *(1,) * trailing])
    return torch.where(mask, x + values if accumulate else values, x)


def _mark_views(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    source, rest = args[0], args[1:]
    for i, x in enumerate(out if isinstance(out, list | tuple) else [out]):

        def replay(owner: PerDevice, i: int = i) -> Any:  # must not hold `source`, which may become another view
            result = run_stacked(func, (owner, *rest), kwargs)
            return result[i] if isinstance(result, list | tuple) else result

        x.mark_view_of(source, replay)
    return out


def _run_write(func: Any, names: Sequence[str], args: Any, kwargs: Any) -> Any:
    """Runs an op that writes: its functional form, and copies of the results to its written operands."""
    arguments = {a.name: x for a, x in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    targets = [arguments[name] for name in names]
    if func in (aten.copy_.default, aten.fill_.Tensor):
        values = [args[1]]
    elif func in FILLS:
        values = [FILLS[func](*args, **kwargs)]
    else:
        form = functional_form(func)
        if form is None:
            raise ShardingError(
                f"a shard_map body calls {func}, which writes to its operands",
                rule="where a body runs on all devices at once, an op that writes has a form that returns the values",
                remedy="call the form of the op that returns its result",
            )
        inputs = {k: x for k, x in arguments.items() if not (k in names and _is_out(func, k))}
        out = _call_form(form, inputs)
        out = list(out) if isinstance(out, list | tuple) else [out]
        values = out[-len(names) :]
    for target, value in zip(targets, values, strict=True):
        _copy_into(func, target, value)
    returned = [x for x in schema_of(func).returns if x.alias_info is not None]
    if not returned:
        return out[: -len(names)] if len(out) > len(names) else None
    return targets[0] if len(schema_of(func).returns) == 1 else (*targets,)


def _is_out(func: Any, name: str) -> bool:
    return any(a.kwarg_only and a.name == name for a in schema_of(func).arguments)


def _call_form(form: Any, arguments: dict[str, Any]) -> Any:
    positional = [a.name for a in schema_of(form).arguments if not a.kwarg_only]
    args = []
    for name in positional:
        if name not in arguments:
            break
        args.append(arguments[name])
    names = {a.name for a in schema_of(form).arguments} - {*positional[: len(args)]}
    return form(*args, **{k: x for k, x in arguments.items() if k in names})


def _copy_into(func: Any, into: Any, value: Any) -> None:
    if not isinstance(into, PerDevice):
        raise ShardingError(
            f"a shard_map body writes to a tensor of shape {list(into.shape)} of the program around it, by {func}",
            rule="a body writes to tensors of its own: every device would write to the one tensor",
            remedy="return the new value from the body, and write it outside",
        )
    stacked = isinstance(value, PerDevice)
    if func not in (aten.copy_.default, aten.fill_.Tensor) and stacked:
        if value.shape != into.shape:
            raise RuntimeError(
                f"output with shape {list(into.shape)} doesn't match the broadcast shape {list(value.shape)}"
            )
        if not torch.can_cast(value.dtype, into.dtype):
            raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {into.dtype}")
    if stacked:
        into.stack_over(value.axes)
    dims = len(into.axes)
    source = value.over(into.axes) if stacked else value
    rank = value.dim()
    if stacked and rank < into.dim():
        source = source.reshape([*source.shape[:dims], *(1,) * (into.dim() - rank), *source.shape[dims:]])
    into.stack.copy_(source)


# --- ops of bodies ----------------------------------------------------------------------------------------------------


def _collective(kind: str) -> Callable[..., PerDevice]:
    def form(x: PerDevice, axes: Sequence[str], *args: Any) -> PerDevice:
        mesh, same = x.mesh, kind in vmap_body.REPLICATED
        group = order_axes(mesh, axes)
        present = [a for a in group if a in x.axes]
        if kind == "all_reduce":
            n = math.prod(mesh.axes[a] for a in group if a not in present) if args[0] == "sum" else 1
            if not present:
                return x.like(x.stack * n if n > 1 else x.stack.clone(), x.axes)
            group = order_axes(mesh, present)
            axes = [a for a in axes if a in group]
        else:
            n = 1
        around = order_axes(mesh, {*x.axes, *group})
        others = [a for a in around if a not in group]
        stack = x.over(around).movedim([around.index(a) for a in (*group, *others)], [*range(len(around))])
        dims = vmap_body.DIMS.get(kind, 0)
        shifted = (*(d + len(others) for d in args[:dims]), *args[dims:])
        out = vmap_body.run_collective(stack, group, axes, kind, shifted)
        if kind in _VIEWS and not is_tracing():  # a trace copies before it writes
            out = out.clone()
        if same:
            return x.like(out * n if n > 1 else out, others)
        order = [(*group, *others).index(a) for a in around]
        return x.like(out.permute([*order, *range(len(around), out.dim())]), around)

    return form


def _constrain(x: PerDevice, spec: str) -> PerDevice:
    """Constrains the stack over the axes that the compiler shards, and leaves the body's axes open."""
    return x.like(constrain(x.stack, " ".join(["_?"] * len(x.axes) + [spec]).rstrip()), x.axes)


def _axis_index(like: PerDevice, axes: Sequence[str]) -> PerDevice:
    mesh = like.mesh
    sizes = [mesh.axes[a] for a in axes]
    group = order_axes(mesh, axes)
    at = torch.arange(math.prod(sizes), device=like.stack.device).reshape(sizes)
    return like.like(
        vmap_body.constrain_leading(at.permute([axes.index(a) for a in group]), *((a,) for a in group)), group
    )


def _set_data(x: PerDevice, value: PerDevice) -> None:
    """Runs `x.data = value`: x becomes a view of the value's memory."""
    view = value.like(value.stack, value.axes)
    view.mark_view_of(value, lambda owner: owner.like(owner.stack, owner.axes))
    x.replace_view(view)


_VIEWS = ("all_gather", "all_to_all")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
_FORMS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.ops.shardlib, f"manual_{kind}").default: _collective(kind) for kind in _KINDS},
    torch.ops.shardlib.manual_axis_index.default: _axis_index,
    torch.ops.shardlib.constrain.default: _constrain,
    aten._has_compatible_shallow_copy_type.default: lambda x, other: isinstance(other, PerDevice),
    set_data.OP: _set_data,
}
# Ops whose autograd Function has their vmap rule; it takes all arguments by position.
_FUNCTIONS: dict[Any, Any] = dict(zip(ATTENTION, (Attention, AttentionBackward), strict=True))
