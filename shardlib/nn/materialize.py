"""`materialize`: initializes a module from the meta device; each device creates only its own shards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import version_of
from shardlib.distributed.world import current_device
from shardlib.jit.global_random import global_random
from shardlib.nn.parameters import list_named, refuse_classes, refuse_lazy, refuse_losses, replace_tensor, set_tensor
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form

LARGE = 1 << 20  # bytes of a tensor's shards in this process
_trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # only in glibc


def materialize(module: nn.Module, init: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """Initializes the tensors of a module that are on the meta device; returns the same module.

    Make the module under `with torch.device("meta")` and place it by `parallelize` first: then no device ever holds a
    whole parameter. `init` runs on every submodule, children first. Without `init`, each module of `torch.nn`
    initializes itself as its constructor does (`reset_parameters()`), and a model of transformers by its
    `initialize_weights`. The values are those of one device with the same `torch.manual_seed` under
    `sl.global_random()`. Parameters are new objects, so make the optimizer afterwards.

    Raises `ShardingError` with all tensors that are not completely written, and for parametrized tensors. The module
    is unchanged then.

    Example:
        >>> import torch
        >>> from shardlib import Mesh, parallelize, typeof
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        >>> with Mesh(tensor=2):
        ...     model = materialize(parallelize(model, {"0.*": "ff@tensor ...", "1.weight": "_ ff@tensor"}))
        >>> model[0].weight.device.type, typeof(model[0].weight)
        ('cpu', 'f32[16@tensor, 8]')
    """
    name = f"materialize({type(module).__name__})"
    old = [x for x in list_named(module, buffers=True) if x.tensor.is_meta]
    refuse_lazy(name, old)
    refuse_classes(name, old)
    refuse_losses(name, old)
    if init is None and not hasattr(module, "initialize_weights"):
        _refuse_parametrized(name, module)
    with torch.no_grad():
        new = [replace_tensor(module, x, _nan_like(x.tensor)) for x in old]
    versions = [version_of(x) for x in new]
    try:
        _initialize(module, init)
        now = {at: x.tensor for x in list_named(module, buffers=True) for at in x.names}
        pairs = [(x, y, now[x.name], n) for x, y, n in zip(old, new, versions, strict=True) if x.name in now]
        missing = [f"{x.name} of {typeof(x.tensor)}" for x, y, z, n in pairs if _is_unwritten(z, n if z is y else -1)]
        missing += [
            f"{x.name} of {typeof(x.tensor)} is a plain tensor now" for x, y, z, _ in pairs if type(z) is not type(y)
        ]
        if missing:
            raise ShardingError(
                f"{name} leaves tensors without values, without some, or elsewhere",
                missing,
                rule="values are written, in place, by reset_parameters() of the submodule that holds a tensor",
                remedy="give init=, a function that writes the tensors of one submodule: lambda m: ...",
            )
    except BaseException:
        for x in old:
            set_tensor(module, x.names, x.tensor)
        raise
    return module


def _initialize(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    own: Any = getattr(module, "initialize_weights", None)
    with global_random(), torch.no_grad(), _TrimMemory():
        if init is not None:
            module.apply(init)
        elif callable(own):
            own()
        else:
            _reset_each(module, set())


class _TrimMemory(TorchFunctionMode):
    """Returns memory to the system after a large tensor was written.

    Drawing a shard takes temporary memory of several times its size. Without trimming, holes between the shards would
    add half of their total size.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        is_written = isinstance(out, ShardedTensor) and any(out is x for x in (*args, *kwargs.values()))
        if is_written and sum(x.nbytes for x in out._locals) >= LARGE:
            _trim(0)
        return out


RESETS = ("reset_parameters", "_reset_parameters")  # methods by which constructors initialize parameters
RESET_BY_CHILDREN = (nn.AdaptiveLogSoftmaxWithLoss,)  # their constructor does not call their reset method
COPIES = (nn.TransformerEncoder, nn.TransformerDecoder)  # all their `layers` are copies of one


def _reset_each(module: nn.Module, seen: set[nn.Module]) -> None:
    """Initializes each module once, as its constructor does: children first."""
    if module in seen:
        return
    seen.add(module)
    layers = [*module.layers] if isinstance(module, COPIES) else []
    for child in module.children():
        if not layers or child is not module.layers:
            _reset_each(child, seen)
            continue
        _reset_each(layers[0], seen)
        for other in layers[1:]:
            for x, first in zip(list_named(other, buffers=True), list_named(layers[0], buffers=True), strict=True):
                x.tensor.copy_(first.tensor)
    reset: Any = next(filter(None, (getattr(module, name, None) for name in RESETS)), None)
    if callable(reset) and not isinstance(module, RESET_BY_CHILDREN):
        reset()


def _refuse_parametrized(name: str, module: nn.Module) -> None:
    """Refuses parametrizations, whose constructors would have read values on the meta device."""
    wrong = [
        f"{at or 'it'} has {', '.join(part.parametrizations)}"
        for at, part in module.named_modules()
        if is_parametrized(part) and any(x.is_meta for x in part.parameters())
    ]
    if wrong:
        raise ShardingError(
            f"{name} finds parametrized tensors",
            wrong,
            rule="a parametrization is made of values, and there are none yet",
            remedy="register it after materialize: weight_norm(module.fc), and so on; or give init=, a function that "
            "writes the tensors of one submodule",
        )


def _nan_like(x: Tensor) -> Tensor:
    """Returns a tensor of NaN, or of 0 for other dtypes; shards of a placed one take no memory yet."""
    number = torch.nan if x.is_floating_point() or x.is_complex() else 0
    if not isinstance(x, ShardedTensor):
        return torch.full_like(x, number, device=torch.get_default_device())
    one = torch.full((), number, dtype=x.dtype, device=current_device(x.mesh.device, x.mesh.kind))
    form = Form.intern(x.sharding, x.mesh, x.dtype, one.device, x._form.names, x.stride())
    return wrap(form, tuple(one.expand(shard.shape) for shard in x._locals))


def _is_unwritten(x: Tensor, version: int) -> bool:
    """True if some elements are still NaN; for other dtypes, True if nothing wrote to the tensor."""
    if x.is_meta:
        return True
    return bool(x.isnan().any()) if x.is_floating_point() or x.is_complex() else version_of(x) == version
