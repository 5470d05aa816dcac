"""The parameters of a module by all of their names, and new ones in the place of old ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import TENSOR_HOOKS, FakeTensor
from shardlib.tensor import stale_params
from shardlib.tensor.sharded_tensor import ShardedTensor, marks


@dataclass(frozen=True)
class Held:
    """One tensor that a module holds, under one name or several (tied weights)."""

    names: tuple[str, ...]
    tensor: Any

    @property
    def name(self) -> str:
        return self.names[0]


def held(module: nn.Module, *, buffers: bool = False) -> list[Held]:
    """All parameters of a module, and buffers if asked for, each once."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    named = [module.named_parameters, *([module.named_buffers] if buffers else [])]
    for at, x in (item for items in named for item in items(remove_duplicate=False)):
        found.setdefault(id(x), ([], x))[0].append(at)
    return [Held(tuple(names), x) for names, x in found.values()]


def refuse_losses(what: str, tensors: Sequence[Held]) -> None:
    """Refuse parameters with gradients or hooks, which new ones in their place would not have."""
    grads = [f"{x.name} of {list(x.tensor.shape)} has a gradient" for x in tensors if x.tensor.grad is not None]
    hooks = [f"{x.name} has hooks" for x in tensors if any(getattr(x.tensor, kind, None) for kind in TENSOR_HOOKS)]
    if grads or hooks:
        raise ShardingError(
            f"{what} would lose what belongs to parameters",
            [*grads, *hooks],
            rule="parameters are replaced by new ones, without gradients and hooks",
            remedy="call module.zero_grad() before; register hooks after it",
        )


def put(module: nn.Module, old: Held, value: Tensor) -> Tensor:
    """Give all places of a tensor another one, of the same kind and with the same attributes; returns that."""
    is_parameter = isinstance(old.tensor, nn.Parameter)
    new = nn.Parameter(value, requires_grad=old.tensor.requires_grad) if is_parameter else value
    new.__dict__.update(marks(old.tensor))
    if is_parameter:
        stale_params.note(old.tensor, f"{type(module).__name__}.{old.name}", new)
    put_back(module, old.names, new)
    return new


def put_back(module: nn.Module, names: Sequence[str], x: Tensor) -> None:
    """Give a module's places this very tensor."""
    for at in names:
        path, _, last = at.rpartition(".")
        setattr(module.get_submodule(path), last, x)
    stale_params.forget(x)


def retie(module: nn.Module) -> None:
    """Weights tied to those of another module, where new ones have taken their place, follow them."""
    for old in held(module):
        if (new := stale_params.successor(old.tensor)) is not None:
            put_back(module, old.names, new)


def refuse_lazy(what: str, tensors: Sequence[Held]) -> None:
    """Refuse parameters that have no shape yet."""
    if lazy := [f"{x.name} has no shape yet" for x in tensors if nn.parameter.is_lazy(x.tensor)]:
        raise ShardingError(
            what, lazy, rule="a layout is of a shape", remedy="run the module once on one device before"
        )


def has_own_class(x: Tensor) -> bool:
    """True if a tensor is of a class of its own, whose methods another tensor in its place would not have."""
    return not isinstance(x, ShardedTensor | FakeTensor) and type(x) not in (Tensor, nn.Parameter)


def refuse_classes(what: str, tensors: Sequence[Held]) -> None:
    """Refuse parameters of classes of their own, such as quantized weights: new ones in their place are of another."""
    wrong = [
        f"{x.name} of {list(x.tensor.shape)} is a {type(x.tensor).__module__}.{type(x.tensor).__qualname__}"
        for x in tensors
        if has_own_class(x.tensor)
    ]
    if wrong:
        raise ShardingError(
            f"{what} would lose the classes of parameters",
            wrong,
            rule="a placed parameter is a ShardedTensor of plain values, without what another class adds",
            remedy="put plain parameters in their place, nn.Parameter(p.detach().as_subclass(torch.Tensor)), what "
            "p.dequantize() returns, or sl.from_dtensor(p); or parallelize only the submodules that have none",
        )
