"""`GradScaler` inside a trace: whether gradients are finite is a value, and a step that is skipped changes nothing.

Torch asks for that value, and then calls `optimizer.step()` or not. Here the step is part of the program, and every
parameter, moment and counter of it stays what it was where some gradient is not finite: all devices find that by one
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import SCALER_CHECKS, SCALER_STEPS


@dataclass
class _Skips:
    """Whether the step that runs is skipped, and whether its optimizer has asked."""

    found: Tensor
    is_asked: bool = False


_skips: ContextVar[_Skips | None] = ContextVar("shardlib_skips", default=None)


@contextmanager
def scaling() -> Iterator[None]:
    """While on, gradient scalers are such wherever a function is traced."""
    with ExitStack() as stack:
        for slot, form in ((SCALER_CHECKS, _unscale), (SCALER_STEPS, _step)):
            stack.enter_context(slot.holding(_traced(slot.value, form)))
        yield


def _traced(original: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (form if is_tracing() else original)(*args, **kwargs)


def _unscale(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[Any, Tensor]:
    """Unscale all gradients, and count what is not finite in them."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError("Attempting to unscale FP16 gradients.")
    with torch.no_grad():
        counts = [(~torch.isfinite(grad)).sum(dtype=torch.float32) for grad in grads]
        for grad in grads:
            grad.mul_(inv_scale.to(grad.dtype))
        if counts:
            found_inf.copy_(sum(counts[1:], start=counts[0]) > 0)
    return {grads[0].device: found_inf} if grads else {}


def _step(scaler: Any, optimizer: Any, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The optimizer's step, which changes nothing where some gradient is not finite."""
    found: Any = sum(state["found_inf_per_device"].values())
    skips = _Skips(found > 0)
    token = _skips.set(skips)
    try:
        made = optimizer.step(*args, **kwargs)
    finally:
        _skips.reset(token)
    if not skips.is_asked:
        raise ShardingError(
            f"a gradient scaler steps {type(optimizer).__name__} inside a traced function",
            rule="a step that is skipped is part of the program all the same: torch's own optimizers then change "
            "nothing",
            remedy="scaler.unscale_(opt) inside, and opt.step() outside jit; or bfloat16, which needs no scaler",
        )
    return made


def skipping(run: Callable[..., None], call: dict[str, Any]) -> tuple[Callable[..., None], Tensor | None]:
    """An update of parameters, `run(**call)`, that is skipped where the step is: what it changes, it changes back; and
    the tensor that says so.

    A fused optimizer is told so itself, and unscales its gradients.
    """
    now, told, scale = _skips.get(), call.get("found_inf"), call.get("grad_scale")
    skips = None if now is None else now.found
    if now is not None:
        now.is_asked = True
    if told is not None:
        skips = told > 0
        call |= {"found_inf": None, "grad_scale": None}
    if scale is not None:
        call["grads"] = [grad / scale.to(grad.dtype) for grad in call["grads"]]
    if skips is None:
        return run, None

    def update(**call: Any) -> None:
        lists = {k: x for k, x in call.items() if isinstance(x, list) and k != "grads"}
        before = {k: [y.clone() if isinstance(y, Tensor) else y for y in x] for k, x in lists.items()}
        run(**call)
        for k, old in before.items():
            for i, (was, now) in enumerate(zip(old, lists[k], strict=True)):
                if isinstance(was, Tensor):
                    now.copy_(torch.where(skips, was, now))
                elif isinstance(now, Tensor):
                    lists[k][i] = _begun(k, now, skips, call)

    return update, skips


def _begun(name: str, x: Tensor, skips: Tensor, call: Mapping[str, Any]) -> Tensor:
    """What an update makes at its first step: on the next one it begins with zeros, if this one is skipped."""
    if call.get("dampening"):
        raise ShardingError(
            f"the first step of SGD with dampening may be skipped by a gradient scaler, which has no {name} then",
            rule="a program's results exist in every call",
            remedy="dampening=0, or take the first step outside jit",
        )
    return torch.where(skips, torch.zeros_like(x), x)


def update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth_factor: float, backoff_factor: float,
    growth_interval: int,
) -> Tensor:  # fmt: skip
    """`torch._amp_update_scale_`, of whole tensors: less where something was not finite, more after some steps."""
    skipped = found_inf > 0
    steps = growth_tracker + 1
    grows = ~skipped & (steps == growth_interval)
    grown = scale * growth_factor
    now = torch.where(grows & torch.isfinite(grown), grown, scale)
    growth_tracker.copy_(torch.where(skipped | grows, 0, steps))
    return scale.copy_(torch.where(skipped, scale * backoff_factor, now))
