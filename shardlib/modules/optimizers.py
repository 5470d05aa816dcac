"""What optimizers are told: those of parameters that a module no longer has are refused, moments live where a
parameter's `moments_at` says. Both are hooks of every optimizer's step, so they hold inside `jit` and outside."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.errors import ShardingError
from shardlib.placing import shard

replaced = WeakTensorKeyDictionary()  # a plain parameter that a module no longer has -> its name


def _refuse_replaced(optimizer: Any, args: Any, kwargs: Any) -> None:
    """An optimizer of parameters that no module has would step, and train nothing."""
    if old := [replaced[p] for p in _parameters(optimizer) if p in replaced] if replaced else []:
        raise ShardingError(
            f"this {type(optimizer).__name__} was made before parallelize",
            [f"{at} has been replaced by a parameter on the mesh" for at in old],
            rule="an optimizer steps the parameters that it was given",
            remedy="make the optimizer behind parallelize(module, ...), from module.parameters()",
        )


def _cut_moments(optimizer: Any, args: Any, kwargs: Any) -> None:
    """What an optimizer keeps of a parameter, element by element, is where its strategy says."""
    for p in _parameters(optimizer):
        if (at := getattr(p, "moments_at", None)) is not None:
            with p.mesh:
                moments = {k: x for k, x in optimizer.state.get(p, {}).items() if _is_moment(x, p)}
                optimizer.state[p].update({k: shard(x, at) for k, x in moments.items()}) if moments else None


def _is_moment(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


register_optimizer_step_pre_hook(_refuse_replaced)
register_optimizer_step_post_hook(_cut_moments)
