"""Ops on `PerDevice` values: each is a `vmap` over the axes of the body, one that writes is its functional form and a
copy, and a collective is arithmetic along the stacked dims."""

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
from shardlib.core.torch_private import (
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
from shardlib.primitives.per_device import PerDevice, in_order

aten = torch.ops.aten


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an op on values of a body gives."""
    if (form := _FORMS.get(func)) is not None:
        return form(*args, **kwargs)
    if may_draw_random(func, args, kwargs):
        raise refuse_draws()
    if torch.Tag.inplace_view in func.tags:
        functional: Any = functional_form(func)
        if functional is not None and is_view(functional):
            return args[0].become(functional(*args, **kwargs))
    if written := written_arguments(func):
        return _write(func, written, args, kwargs)
    out = run(func, args, kwargs)
    return _as_views(func, args, kwargs, out) if is_view(func) else out


def refuse_draws() -> ShardingError:
    """The error for a draw in a body."""
    return ShardingError(
        "a shard_map body draws random numbers",
        rule="an element's number belongs to its place in the whole tensor, which a body does not know",
        remedy="draw outside, from the whole tensor's shape, and pass the numbers in as an argument of the body",
    )


_TRANSFORM_MODES = ("Batched", "BatchedDecomposition", "VmapMode", "DynamicLayerFrontMode", "DynamicLayerBackMode")
# The stack of a conjugate is one that is only marked as such.
_BATCHING = (
    *(f"FuncTorch{name}" for name in _TRANSFORM_MODES),
    "Conjugate",
    "Negative",
)


def _vmap_below_autograd() -> Any:
    """A context in which `torch.vmap` batches, where an op of a tensor class is dispatched."""
    excluded = excluded_keys()
    for name in _BATCHING:
        excluded = excluded.remove(getattr(DispatchKey, name))
    return forced_keys(included_keys(), excluded)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """An op that writes nothing, on all devices: its results vary over the axes over which its operands do."""
    masked = func is aten.index.Tensor and any(k is not None and k.dtype in _MASKS for k in args[1])
    if masked or (torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor):
        raise ShardingError(
            f"a shard_map body makes a shape that depends on values, by {'x[mask]' if masked else func}",
            rule="devices hold other values, and run the same code on the same shapes",
            remedy="x.where(mask, 0) keeps the shape",
        )
    if func is aten.index_put.default and (plain := _masked(*args, **kwargs)) is not None:
        return plain
    leaves, tree = pytree.tree_flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, PerDevice)]
    first: PerDevice = leaves[at[0]]
    axes = in_order(first.mesh, {a for i in at for a in leaves[i].axes})

    def call(*stacks: Tensor) -> Any:
        full = list(leaves)
        for i, x in zip(at, stacks, strict=True):
            full[i] = x
        a, k = pytree.tree_unflatten(full, tree)
        out = _FUNCTIONS[func].apply(*_positional(func, a, k)) if func in _FUNCTIONS else func(*a, **k)
        results[:] = pytree.tree_flatten(out)
        return [x for x in results[0] if isinstance(x, Tensor)]  # the others are the same on all devices

    results: list[Any] = []
    for name in reversed(axes):
        dims = tuple(0 if name in leaves[i].axes else None for i in at)
        call = torch.vmap(call, in_dims=dims, randomness="error")
    with _vmap_below_autograd():
        tensors = iter(call(*(leaves[i].stack for i in at)))
    flat, out_tree = results
    out = [next(tensors) if isinstance(x, Tensor) else x for x in flat]
    # Made of a form alone, which is one for all devices.
    if has_trait(func, "metadata_only") or has_trait(func, "creates"):
        out, axes = [x[(0,) * len(axes)] for x in out], ()
    return pytree.tree_unflatten([first.like(x, axes) if isinstance(x, Tensor) else x for x in out], out_tree)


def _positional(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    rest = schema_of(func).arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


_MASKS = (torch.bool, torch.uint8)


def _masked(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:
    """`x[mask] = value` of one value for all places that the mask has; None where no index is a mask."""
    places = [(d, k) for d, k in enumerate(indices) if k is not None]
    if not any(k.dtype in _MASKS for _, k in places):
        return None
    first, mask = places[0]
    behind = x.dim() - mask.dim() - first
    at = values.dim() - behind - 1  # the dim of a value for each place
    if len(places) > 1 or (at >= 0 and values.shape[at] != 1):
        raise ShardingError(
            "a shard_map body writes several values where a mask says",
            [f"values of shape {list(values.shape)} at a mask of shape {list(mask.shape)}"],
            rule="how many places a mask has differs from device to device, and shapes do not",
            remedy="torch.where(mask, values, x), with a value for every place",
        )
    if at >= 0:
        values = values.reshape([*values.shape[:at], *(1,) * mask.dim(), *values.shape[at + 1 :]])
    mask = mask.bool().reshape([*mask.shape, *(1,) * behind])
    return torch.where(mask, x + values if accumulate else values, x)


def _as_views(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    source, rest = args[0], args[1:]  # no view holds itself: an op may change what its operand shows
    for i, x in enumerate(out if isinstance(out, list | tuple) else [out]):

        def again(owner: PerDevice, i: int = i) -> Any:
            result = run(func, (owner, *rest), kwargs)
            return result[i] if isinstance(result, list | tuple) else result

        x.shows(source, again)
    return out


def _write(func: Any, names: Sequence[str], args: Any, kwargs: Any) -> Any:
    """An op that writes: its functional form, and its results copied to where they belong."""
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
        out = _called(form, inputs)
        out = list(out) if isinstance(out, list | tuple) else [out]
        values = out[-len(names) :]
    for into, value in zip(targets, values, strict=True):
        _copy(func, into, value)
    returned = [x for x in schema_of(func).returns if x.alias_info is not None]
    if not returned:
        return out[: -len(names)] if len(out) > len(names) else None
    return targets[0] if len(schema_of(func).returns) == 1 else (*targets,)


def _is_out(func: Any, name: str) -> bool:
    return any(a.kwarg_only and a.name == name for a in schema_of(func).arguments)


def _called(form: Any, arguments: dict[str, Any]) -> Any:
    positional = [a.name for a in schema_of(form).arguments if not a.kwarg_only]
    args = []
    for name in positional:
        if name not in arguments:
            break
        args.append(arguments[name])
    taken = {a.name for a in schema_of(form).arguments}
    return form(*args, **{k: x for k, x in arguments.items() if k in taken and k not in positional[: len(args)]})


def _copy(func: Any, into: Any, value: Any) -> None:
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
        into.vary(value.axes)
    dims = len(into.axes)
    source = value.over(into.axes) if stacked else value
    rank = value.dim()
    if stacked and rank < into.dim():
        source = source.reshape([*source.shape[:dims], *(1,) * (into.dim() - rank), *source.shape[dims:]])
    into.stack.copy_(source)


# --- ops of bodies ----------------------------------------------------------------------------------------------------


def _collective(kind: str) -> Callable[..., PerDevice]:
    def form(x: PerDevice, axes: Sequence[str], *args: Any) -> PerDevice:
        mesh, same = x.mesh, kind in vmap_body.SAME
        group = in_order(mesh, axes)
        present = [a for a in group if a in x.axes]
        if kind == "all_reduce":
            n = math.prod(mesh.axes[a] for a in group if a not in present) if args[0] == "sum" else 1
            if not present:
                return x.like(x.stack * n if n > 1 else x.stack.clone(), x.axes)
            group = in_order(mesh, present)
            axes = [a for a in axes if a in group]
        else:
            n = 1
        around = in_order(mesh, {*x.axes, *group})
        others = [a for a in around if a not in group]
        stack = x.over(around).movedim([around.index(a) for a in (*group, *others)], [*range(len(around))])
        dims = vmap_body.DIMS.get(kind, 0)
        shifted = (*(d + len(others) for d in args[:dims]), *args[dims:])
        out = vmap_body.collective(stack, group, axes, kind, shifted)
        if kind in _VIEWS and not is_tracing():  # what a trace writes to has memory of its own
            out = out.clone()
        if same:
            return x.like(out * n if n > 1 else out, others)
        order = [(*group, *others).index(a) for a in around]
        return x.like(out.permute([*order, *range(len(around), out.dim())]), around)

    return form


def _constrained(x: PerDevice, spec: str) -> PerDevice:
    """The compiler places it over the axes that are left; where it lies along the body's, it does already."""
    return x.like(constrain(x.stack, " ".join(["_?"] * len(x.axes) + [spec]).rstrip()), x.axes)


def _index(like: PerDevice, axes: Sequence[str]) -> PerDevice:
    mesh = like.mesh
    sizes = [mesh.axes[a] for a in axes]
    group = in_order(mesh, axes)
    at = torch.arange(math.prod(sizes), device=like.stack.device).reshape(sizes)
    return like.like(vmap_body.placed(at.permute([axes.index(a) for a in group]), *((a,) for a in group)), group)


def _set_data(x: PerDevice, value: PerDevice) -> None:
    """`x.data = value`: from here on it shows the memory of the value."""
    shown = value.like(value.stack, value.axes)
    shown.shows(value, lambda owner: owner.like(owner.stack, owner.axes))
    x.become(shown)


_VIEWS = ("all_gather", "all_to_all")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
_FORMS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.ops.shardlib, f"manual_{kind}").default: _collective(kind) for kind in _KINDS},
    torch.ops.shardlib.manual_axis_index.default: _index,
    torch.ops.shardlib.constrain.default: _constrained,
    aten._has_compatible_shallow_copy_type.default: lambda x, other: isinstance(other, PerDevice),
    set_data.OP: _set_data,
}
# Ops whose form under a vmap is that of their function, which takes all arguments by position.
_FUNCTIONS: dict[Any, Any] = dict(zip(ATTENTION, (Attention, AttentionBackward), strict=True))
