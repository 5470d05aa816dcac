"""What optimizers are told: those of parameters that a module no longer has are refused, moments live where a
parameter's `moments_at` says. Both are hooks of every optimizer's step, so they hold inside `jit` and outside. Outside,
Adam steps all parameters in one call, as torch does with tensors of its own on GPUs."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import LOAD_OPTIMIZER, LOADED_STATE, SINGLE_ADAM
from shardlib.jit.optimizer_state import begins, parameters, place, placed
from shardlib.nn.moments_layout import Resharded, go_home, reshard
from shardlib.ops.adam import DTYPES
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.stale_params import refuse_replaced
from shardlib.tensor.tensor_meta import Form, contiguous
from shardlib.tensor.view_aliases import are_apart

aten = torch.ops.aten
_known: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # what an optimizer keeps in front of its step
_resharded: WeakKeyDictionary[Any, list[Resharded]] = WeakKeyDictionary()  # while an optimizer steps


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    """An optimizer of parameters that no module has would step, and train nothing."""
    named = ((f"parameter {i}", p) for i, p in enumerate(parameters(optimizer)))
    refuse_replaced(
        f"this {type(optimizer).__name__} steps parameters that were replaced",
        named,
        "make it after parallelize and materialize, which take the module that holds all places of a tied weight",
    )
    begins(optimizer)
    go_home(_resharded.pop(optimizer, ()))  # where the last step failed
    if not is_tracing() and not any(map(callable, (*args, *kwargs.values()))):  # a closure runs the model
        _resharded[optimizer] = reshard(parameters(optimizer))
    elif is_tracing():
        _known[optimizer] = {id(x) for p in parameters(optimizer) for x in optimizer.state.get(p, {}).values()}


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    go_home(_resharded.pop(optimizer, ()))
    place(optimizer, _known.pop(optimizer, ()))


_one_by_one = SINGLE_ADAM.value


@functools.wraps(_one_by_one)
def _adam(
    params: list[Any], grads: list[Any], exp_avgs: list[Any], exp_avg_sqs: list[Any], max_exp_avg_sqs: list[Any],
    state_steps: list[Any], *scales: Any, **how: Any,
) -> None:  # fmt: skip
    """By torch's fused kernel on the pieces, which a program has, too, where they lie alike; else parameter by
    parameter."""
    lists = params, grads, exp_avgs, exp_avg_sqs
    if is_tracing() or not _lie_alike(*lists) or not _are_numbers(state_steps, how):
        _one_by_one(*lists, max_exp_avg_sqs, state_steps, *scales, **how)
        return
    kernel = aten._fused_adamw_ if how["decoupled_weight_decay"] else aten._fused_adam_
    told = {name: how[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize")}
    aten._foreach_add_(state_steps, 1)
    kernel(*lists, [], [x.float() for x in state_steps], **told)


def _lie_alike(params: list[Any], *lists: list[Any]) -> bool:
    """Whether all are on CPUs, of one dtype in which the kernel rounds as torch's steps do, and what belongs to a
    parameter is in its pieces. Two that share memory step one after the other."""
    if not all(type(x) is ShardedTensor for x in chain(params, *lists)):
        return False
    forms: list[Form] = [x._form for x in params]
    kinds = {(f.dtype, f.mesh.device, bool(f.layout.pending), f.strides == contiguous(f.shape)) for f in forms}
    alike = all(x._form is form for xs in lists for x, form in zip(xs, forms, strict=True))
    return (
        alike and kinds in [{(dtype, "cpu", False, True)} for dtype in DTYPES] and are_apart([*chain(params, *lists)])
    )


def _are_numbers(steps: list[Any], how: dict[str, Any]) -> bool:
    """Whether the kernel is told all: a step is made of numbers of Python, every parameter counts its own, and nobody
    differentiates through them."""
    return (
        not (how["amsgrad"] or how["differentiable"] or how["capturable"] or torch.is_grad_enabled())
        and how.get("grad_scale") is None
        and all(isinstance(how[name], int | float) for name in ("lr", "beta1", "beta2", "weight_decay", "eps"))
        and all(type(x) is torch.Tensor and not x.dim() and x.device.type == "cpu" for x in steps)
        and len({x.data_ptr() for x in steps}) == len(steps)
    )


_loaded = LOADED_STATE.value


@functools.wraps(_loaded)
def _placed(param: Any, *args: Any, **kwargs: Any) -> Any:
    """What is loaded, from a checkpoint of one device, say."""
    return placed(param, _loaded(param, *args, **kwargs))


SINGLE_ADAM.value = _adam
LOADED_STATE.value = staticmethod(_placed)
_load = LOAD_OPTIMIZER.value


@functools.wraps(_load)
def _loaded_in_order(self: Any, state_dict: Any) -> None:
    """Torch puts a group's parameters behind its settings then: for a program that is another order of inputs."""
    _refuse_others(self, state_dict)
    before = [list(group) for group in self.param_groups]
    _load(self, state_dict)
    for group, names in zip(self.param_groups, before, strict=False):
        now = dict(group)
        group.clear()
        group.update({k: now[k] for k in (*(k for k in names if k in now), *now)})


def _refuse_others(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise `ShardingError` for what was kept of parameters of other shapes. Torch's own optimizers keep one element of
    each of a parameter, or one for all along a dim; LBFGS keeps all in one row."""
    if not type(optimizer).__module__.startswith("torch.") or isinstance(optimizer, torch.optim.LBFGS):
        return
    saved = [group["params"] for group in state_dict["param_groups"]]
    groups = [group["params"] for group in optimizer.param_groups]
    if list(map(len, saved)) != list(map(len, groups)):
        return  # torch says so
    wrong = []
    for p, at in zip(chain(*groups), chain(*saved), strict=True):
        if isinstance(p, ShardedTensor):
            kept = {k: x for k, x in state_dict["state"].get(at, {}).items() if isinstance(x, torch.Tensor) and x.dim()}
            wrong += [
                f"parameter {at!r} of shape {list(p.shape)} has {k} of shape {list(x.shape)}"
                for k, x in kept.items()
                if x.dim() != p.dim() or any(n not in (1, size) for n, size in zip(x.shape, p.shape, strict=True))
            ]
    if wrong:
        raise ShardingError(
            f"{type(optimizer).__name__} cannot load this state",
            wrong,
            rule="it is that of an optimizer of other parameters, or of these in another order",
            remedy="load what the optimizer of this model saved; nothing was loaded",
        )


LOAD_OPTIMIZER.value = _loaded_in_order
register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
