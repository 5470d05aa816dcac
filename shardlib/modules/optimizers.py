"""What optimizers are told: those of parameters that a module no longer has are refused, moments live where a
parameter's `moments_at` says. Both are hooks of every optimizer's step, so they hold inside `jit` and outside."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlib.internals import LOAD_OPTIMIZER, LOADED_STATE
from shardlib.moments import begins, parameters, place, placed
from shardlib.state import is_tracing
from shardlib.tensors.replaced import refuse_replaced

_known: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # what an optimizer keeps in front of its step


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    """An optimizer of parameters that no module has would step, and train nothing."""
    named = ((f"parameter {i}", p) for i, p in enumerate(parameters(optimizer)))
    refuse_replaced(
        f"this {type(optimizer).__name__} steps parameters that were replaced",
        named,
        "make it after parallelize and materialize, which take the module that holds all places of a tied weight",
    )
    begins(optimizer)
    if is_tracing():
        _known[optimizer] = {id(x) for p in parameters(optimizer) for x in optimizer.state.get(p, {}).values()}


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    place(optimizer, _known.pop(optimizer, ()))


_loaded = LOADED_STATE.value


@functools.wraps(_loaded)
def _placed(param: Any, *args: Any, **kwargs: Any) -> Any:
    """What is loaded, from a checkpoint of one device, say."""
    return placed(param, _loaded(param, *args, **kwargs))


LOADED_STATE.value = staticmethod(_placed)
_load = LOAD_OPTIMIZER.value


@functools.wraps(_load)
def _loaded_in_order(self: Any, state_dict: Any) -> None:
    """Torch puts a group's parameters behind its settings then: for a program that is another order of inputs."""
    before = [list(group) for group in self.param_groups]
    _load(self, state_dict)
    for group, names in zip(self.param_groups, before, strict=False):
        now = dict(group)
        group.clear()
        group.update({k: now[k] for k in (*(k for k in names if k in now), *now)})


LOAD_OPTIMIZER.value = _loaded_in_order
register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
