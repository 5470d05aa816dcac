"""What optimizers are told: those of parameters that a module no longer has are refused, moments live where a
parameter's `moments_at` says. Both are hooks of every optimizer's step, so they hold inside `jit` and outside."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlib.placing import shard
from shardlib.tensors.replaced import refuse_replaced
from shardlib.tensors.tensor import ShardedTensor


def _refuse_replaced(optimizer: Any, args: Any, kwargs: Any) -> None:
    """An optimizer of parameters that no module has would step, and train nothing."""
    named = ((f"parameter {i}", p) for i, p in enumerate(_parameters(optimizer)))
    refuse_replaced(
        f"this {type(optimizer).__name__} steps parameters that were replaced",
        named,
        "make it behind parallelize and materialize, which take the module that holds all places of a tied weight",
    )


def _cut_moments(optimizer: Any, args: Any, kwargs: Any) -> None:
    """What an optimizer keeps of a parameter, element by element, is where its strategy says."""
    for p in _parameters(optimizer):
        if isinstance(p, ShardedTensor) and (at := getattr(p, "moments_at", None)) is not None:
            moments = {k: x for k, x in optimizer.state.get(p, {}).items() if _is_moment(x, p)}
            with p.mesh:
                cut = {k: shard(x, at) for k, x in moments.items()}
            if cut:
                optimizer.state[p].update(cut)


def _is_moment(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


register_optimizer_step_pre_hook(_refuse_replaced)
register_optimizer_step_post_hook(_cut_moments)
