"""`materialize`: a module that was made on the meta device gets its values, each device only its own pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import version_of
from shardlib.distributed.world import current_device
from shardlib.jit.global_random import global_random
from shardlib.nn.parameters import held, put, put_back, refuse_classes, refuse_lazy, refuse_losses
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form

LARGE = 1 << 20  # bytes of a tensor's pieces in this process
_trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # glibc has it


def materialize(module: nn.Module, init: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """Give a module whose tensors are on the meta device their values; returns the same module.

    Make it under `with torch.device("meta")`, place it by `parallelize`, then call this: every device makes its own
    pieces and never holds a whole parameter. Values are those that one device would draw, `torch.manual_seed` given,
    when `init` runs there on every submodule, children first, under `sl.global_random()`. Without `init`, modules of
    `torch.nn` have the values that they are made with there: each draws as its constructor does (`reset_parameters()`).
    A model of transformers does what it does itself (`initialize_weights`). Parameters are new ones: an optimizer is
    made afterwards.

    Raises `ShardingError`, with all of them, for tensors that are not written to as a whole, and for parametrized ones;
    the module is as it was then.

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
    old = [x for x in held(module, buffers=True) if x.tensor.is_meta]
    refuse_lazy(name, old)
    refuse_classes(name, old)
    refuse_losses(name, old)
    if init is None and not hasattr(module, "initialize_weights"):
        _refuse_parametrized(name, module)
    with torch.no_grad():
        new = [put(module, x, _unwritten(x.tensor)) for x in old]
    versions = [version_of(x) for x in new]
    try:
        _draw(module, init)
        now = {at: x.tensor for x in held(module, buffers=True) for at in x.names}
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
            put_back(module, x.names, x.tensor)
        raise
    return module


def _draw(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    own: Any = getattr(module, "initialize_weights", None)
    with global_random(), torch.no_grad(), _Trimmed():
        if init is not None:
            module.apply(init)
        elif callable(own):
            own()
        else:
            _draw_each(module, set())


class _Trimmed(TorchFunctionMode):
    """Gives memory back to the system when a large tensor was written.

    What is used while a piece is drawn is several times as large as the piece, and leaves holes between those that
    stay, too small for the next: half as much again as the pieces take.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        is_written = isinstance(out, ShardedTensor) and any(out is x for x in (*args, *kwargs.values()))
        if is_written and sum(x.nbytes for x in out._locals) >= LARGE:
            _trim(0)
        return out


RESETS = ("reset_parameters", "_reset_parameters")  # what a constructor calls to fill its parameters
AS_CHILDREN_ARE = (nn.AdaptiveLogSoftmaxWithLoss,)  # have one that their constructor does not call
COPIES = (nn.TransformerEncoder, nn.TransformerDecoder)  # all their `layers` are copies of one


def _draw_each(module: nn.Module, seen: set[nn.Module]) -> None:
    """Fill the parameters of a module as its constructor does, once: those of what it is made of first."""
    if module in seen:
        return
    seen.add(module)
    layers = [*module.layers] if isinstance(module, COPIES) else []
    for child in module.children():
        if not layers or child is not module.layers:
            _draw_each(child, seen)
            continue
        _draw_each(layers[0], seen)
        for other in layers[1:]:
            for x, first in zip(held(other, buffers=True), held(layers[0], buffers=True), strict=True):
                x.tensor.copy_(first.tensor)
    reset: Any = next(filter(None, (getattr(module, name, None) for name in RESETS)), None)
    if callable(reset) and not isinstance(module, AS_CHILDREN_ARE):
        reset()


def _refuse_parametrized(name: str, module: nn.Module) -> None:
    """Refuse modules with parametrizations, whose constructors read values: there were none."""
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


def _unwritten(x: Tensor) -> Tensor:
    """A tensor that somebody writes to: of NaN, where its dtype has that. Pieces of a placed one take no memory yet."""
    number = torch.nan if x.is_floating_point() or x.is_complex() else 0
    if not isinstance(x, ShardedTensor):
        return torch.full_like(x, number, device=torch.get_default_device())
    one = torch.full((), number, dtype=x.dtype, device=current_device(x.mesh.device, x.mesh.kind))
    form = Form.of(x.sharding, x.mesh, x.dtype, one.device, x._form.names, x.stride())
    return wrap(form, tuple(one.expand(piece.shape) for piece in x._locals))


def _is_unwritten(x: Tensor, version: int) -> bool:
    """Whether some of it is NaN still; of other dtypes, whether nothing wrote to it."""
    if x.is_meta:
        return True
    return bool(x.isnan().any()) if x.is_floating_point() or x.is_complex() else version_of(x) == version
