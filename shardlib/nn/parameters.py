"""Lists the parameters of a module by all of their names, and replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import TENSOR_HOOKS, FakeTensor
from shardlib.tensor import stale_params
from shardlib.tensor.sharded_tensor import ShardedTensor, user_attributes


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a module, with one name or several (tied weights)."""

    names: tuple[str, ...]
    tensor: Any

    @property
    def name(self) -> str:
        return self.names[0]


def list_named(module: nn.Module, *, buffers: bool = False) -> list[NamedTensor]:
    """Returns all parameters of a module, and with `buffers` its buffers, each once."""
    by_id: dict[int, tuple[list[str], Tensor]] = {}
    named = [module.named_parameters, *([module.named_buffers] if buffers else [])]
    for at, x in (item for items in named for item in items(remove_duplicate=False)):
        by_id.setdefault(id(x), ([], x))[0].append(at)
    return [NamedTensor(tuple(names), x) for names, x in by_id.values()]


def refuse_losses(caller: str, tensors: Sequence[NamedTensor]) -> None:
    """Refuses parameters with gradients or hooks, which their replacements would lose."""
    grads = [f"{x.name} of {list(x.tensor.shape)} has a gradient" for x in tensors if x.tensor.grad is not None]
    hooks = [f"{x.name} has hooks" for x in tensors if any(getattr(x.tensor, kind, None) for kind in TENSOR_HOOKS)]
    if grads or hooks:
        raise ShardingError(
            f"{caller} would lose what belongs to parameters",
            [*grads, *hooks],
            rule="parameters are replaced by new ones, without gradients and hooks",
            remedy="call module.zero_grad() before; register hooks after it",
        )


def replace_tensor(module: nn.Module, old: NamedTensor, value: Tensor) -> Tensor:
    """Replaces a tensor under all its names by one of the same kind with the same attributes; returns the new one."""
    is_parameter = isinstance(old.tensor, nn.Parameter)
    new = nn.Parameter(value, requires_grad=old.tensor.requires_grad) if is_parameter else value
    new.__dict__.update(user_attributes(old.tensor))
    if is_parameter:
        stale_params.note_replaced(old.tensor, f"{type(module).__name__}.{old.name}", new)
    set_tensor(module, old.names, new)
    return new


def set_tensor(module: nn.Module, names: Sequence[str], x: Tensor) -> None:
    for at in names:
        path, _, last = at.rpartition(".")
        setattr(module.get_submodule(path), last, x)
    stale_params.forget_replaced(x)


def retie(module: nn.Module) -> None:
    """Replaces parameters that another module shared and has replaced by their successors."""
    for old in list_named(module):
        if (new := stale_params.find_successor(old.tensor)) is not None:
            set_tensor(module, old.names, new)


def refuse_lazy(caller: str, tensors: Sequence[NamedTensor]) -> None:
    if lazy := [f"{x.name} has no shape yet" for x in tensors if nn.parameter.is_lazy(x.tensor)]:
        raise ShardingError(
            caller, lazy, rule="a layout is of a shape", remedy="run the module once on one device before"
        )


def has_own_class(x: Tensor) -> bool:
    """True if a tensor is of another subclass, whose methods a replacement would lose."""
    return not isinstance(x, ShardedTensor | FakeTensor) and type(x) not in (Tensor, nn.Parameter)


def refuse_classes(caller: str, tensors: Sequence[NamedTensor]) -> None:
    """Refuses parameters of other subclasses, such as quantized weights."""
    wrong = [
        f"{x.name} of {list(x.tensor.shape)} is a {type(x.tensor).__module__}.{type(x.tensor).__qualname__}"
        for x in tensors
        if has_own_class(x.tensor)
    ]
    if wrong:
        raise ShardingError(
            f"{caller} would lose the classes of parameters",
            wrong,
            rule="a placed parameter is a ShardedTensor of plain values, without what another class adds",
            remedy="put plain parameters in their place, nn.Parameter(p.detach().as_subclass(torch.Tensor)), what "
            "p.dequantize() returns, or sl.from_dtensor(p); or parallelize only the submodules that have none",
        )
