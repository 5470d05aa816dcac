"""Hooks of every optimizer's step, inside `jit` and outside.

They refuse optimizers of replaced parameters and place moments by a parameter's `moments_at`. Outside `jit`, Adam steps
all parameters in one call, as torch does for plain tensors on GPUs.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import LOAD_OPTIMIZER, LOADED_STATE, SINGLE_ADAM
from shardlib.jit.optimizer_state import begins, parameters, place, placed
from shardlib.nn.moments_layout import Resharded, reshard, restore_layouts
from shardlib.ops.adam import DTYPES
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.stale_params import refuse_replaced
from shardlib.tensor.tensor_meta import Form, contiguous_strides
from shardlib.tensor.view_aliases import have_separate_memory

aten = torch.ops.aten
_old_state: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # ids of an optimizer's state before its step
_resharded: WeakKeyDictionary[Any, list[Resharded]] = WeakKeyDictionary()  # while an optimizer steps


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuses replaced parameters, and reshards parameters to their moments."""
    named = ((f"parameter {i}", p) for i, p in enumerate(parameters(optimizer)))
    refuse_replaced(
        f"this {type(optimizer).__name__} steps parameters that were replaced",
        named,
        "make it after parallelize and materialize, which take the module that holds all places of a tied weight",
    )
    begins(optimizer)
    restore_layouts(_resharded.pop(optimizer, ()))  # if the last step failed
    if not is_tracing() and not any(map(callable, (*args, *kwargs.values()))):  # a closure runs the model
        _resharded[optimizer] = reshard(parameters(optimizer))
    elif is_tracing():
        _old_state[optimizer] = {id(x) for p in parameters(optimizer) for x in optimizer.state.get(p, {}).values()}


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    restore_layouts(_resharded.pop(optimizer, ()))
    place(optimizer, _old_state.pop(optimizer, ()))


_adam_one_by_one = SINGLE_ADAM.value


@functools.wraps(_adam_one_by_one)
def _adam(
    params: list[Any], grads: list[Any], exp_avgs: list[Any], exp_avg_sqs: list[Any], max_exp_avg_sqs: list[Any],
    state_steps: list[Any], *scales: Any, **options: Any,
) -> None:  # fmt: skip
    """Steps by torch's fused kernel on the shards, as in a program, if it can; else parameter by parameter."""
    lists = params, grads, exp_avgs, exp_avg_sqs
    if is_tracing() or not _have_same_layouts(*lists) or not _fits_kernel(state_steps, options):
        _adam_one_by_one(*lists, max_exp_avg_sqs, state_steps, *scales, **options)
        return
    kernel = aten._fused_adamw_ if options["decoupled_weight_decay"] else aten._fused_adam_
    kernel_options = {
        name: options[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize")
    }
    aten._foreach_add_(state_steps, 1)
    kernel(*lists, [], [x.float() for x in state_steps], **kernel_options)


def _have_same_layouts(params: list[Any], *lists: list[Any]) -> bool:
    """True if all tensors are on CPUs in one dtype, with the form of their parameter, and share no memory.

    The kernel rounds as torch's steps do for the dtypes in `DTYPES`.
    """
    if not all(type(x) is ShardedTensor for x in chain(params, *lists)):
        return False
    forms: list[Form] = [x._form for x in params]
    kinds = {(f.dtype, f.mesh.device, bool(f.layout.pending), f.strides == contiguous_strides(f.shape)) for f in forms}
    alike = all(x._form is form for xs in lists for x, form in zip(xs, forms, strict=True))
    fits = kinds in [{(dtype, "cpu", False, True)} for dtype in DTYPES]
    return alike and fits and have_separate_memory([*chain(params, *lists)])


def _fits_kernel(steps: list[Any], options: dict[str, Any]) -> bool:
    """True if the kernel supports the options, and every parameter has a step count of its own."""
    return (
        not (options["amsgrad"] or options["differentiable"] or options["capturable"] or torch.is_grad_enabled())
        and options.get("grad_scale") is None
        and all(isinstance(options[name], int | float) for name in ("lr", "beta1", "beta2", "weight_decay", "eps"))
        and all(type(x) is torch.Tensor and not x.dim() and x.device.type == "cpu" for x in steps)
        and len({x.data_ptr() for x in steps}) == len(steps)
    )


_load_value = LOADED_STATE.value


@functools.wraps(_load_value)
def _load_and_place(param: Any, *args: Any, **kwargs: Any) -> Any:
    """Places loaded state, which may come from one device."""
    return placed(param, _load_value(param, *args, **kwargs))


SINGLE_ADAM.value = _adam
LOADED_STATE.value = staticmethod(_load_and_place)
_load = LOAD_OPTIMIZER.value


@functools.wraps(_load)
def _load_in_order(self: Any, state_dict: Any) -> None:
    """Loads the state and keeps the order of each group's keys, which is a program's order of inputs."""
    _refuse_other_shapes(self, state_dict)
    before = [list(group) for group in self.param_groups]
    _load(self, state_dict)
    for group, names in zip(self.param_groups, before, strict=False):
        now = dict(group)
        group.clear()
        group.update({k: now[k] for k in (*(k for k in names if k in now), *now)})


def _refuse_other_shapes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raises `ShardingError` for state of parameters of other shapes.

    Torch's optimizers keep state of the parameter's shape, or with size 1 for some dims. LBFGS keeps all in one row.
    """
    if not type(optimizer).__module__.startswith("torch.") or isinstance(optimizer, torch.optim.LBFGS):
        return
    saved = [group["params"] for group in state_dict["param_groups"]]
    groups = [group["params"] for group in optimizer.param_groups]
    if list(map(len, saved)) != list(map(len, groups)):
        return  # torch raises the error
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


LOAD_OPTIMIZER.value = _load_in_order
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
