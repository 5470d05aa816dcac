"""`materialize`: a module that was made on the meta device gets its values, each device only its own pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.errors import ShardingError
from shardlib.internals import version_of
from shardlib.plain import global_random
from shardlib.tensors.tensor import ShardedTensor, typeof


def materialize(module: nn.Module, init: Callable[[nn.Module], Any] | None = None) -> nn.Module:
    """Give a module whose tensors are on the meta device their values; returns the same module.

    Make it under `with torch.device("meta")`, place it by `parallelize`, then call this: every device makes its own
    pieces and never holds a whole parameter. Values are those that one device would draw, `torch.manual_seed` given,
    when `init` runs there on every submodule, children first, under `sl.global_random()`. Without `init`, that is
    `reset_parameters()` of each submodule that has one, or what a model of transformers does (`initialize_weights`).

    Raises `ShardingError`, with all of them, for tensors that nothing has written to; the module is as it was then.

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
    old = dict(_tensors(module))
    new = {at: _empty(x) for at, x in old.items() if x.is_meta}
    ties = {id(x): at for at, x in reversed(old.items()) if at in new}
    _put(module, {at: new[ties[id(old[at])]] for at in new})
    written = {at: version_of(x) for at, x in new.items()}
    own: Any
    done = False
    try:
        with global_random(), torch.no_grad():
            if init is not None:
                module.apply(init)
            elif callable(own := getattr(module, "initialize_weights", None)):
                own()
            else:
                module.apply(_reset)
        now = dict(_tensors(module))
        missing = [at for at in new if now[at].is_meta or (now[at] is new[at] and version_of(new[at]) == written[at])]
        done = not [at for at in missing if ties[id(old[at])] == at]
    finally:
        if not done:
            _put(module, {at: old[at] for at in new})
    if not done:
        raise ShardingError(
            f"materialize({type(module).__name__}) leaves tensors without values",
            [
                f"{at} of {typeof(old[at]) if isinstance(old[at], ShardedTensor) else list(old[at].shape)}"
                for at in missing
            ],
            rule="values are drawn by reset_parameters() of the submodule that holds a tensor",
            remedy="give init=, a function that writes the tensors of one submodule: lambda m: ...",
        )
    return module


def _reset(module: nn.Module) -> None:
    reset: Any = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, under all of their names."""
    parameters, buffers = (f(remove_duplicate=False) for f in (module.named_parameters, module.named_buffers))
    return [*parameters, *buffers]


def _empty(x: Tensor) -> Tensor:
    """Memory for one tensor; of a placed one, for the pieces that are here."""
    device = x.mesh.device if isinstance(x, ShardedTensor) else torch.get_default_device()
    made = torch.empty_like(x, device=device)
    return nn.Parameter(made, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else made


def _put(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for at, x in tensors.items():
        path, _, last = at.rpartition(".")
        setattr(module.get_submodule(path), last, x)
