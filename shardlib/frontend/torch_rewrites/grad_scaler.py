"""Traces `GradScaler`: whether gradients are finite is a value of the program, and a skipped step changes nothing.

Torch reads that value, and then calls `optimizer.step()` or not. Here the step is part of the program. If a gradient is
not finite, every parameter, moment and counter keeps its value. One sum tells all devices.
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
from shardlib.core.torch_internals.torch_private import SCALER_CHECKS, SCALER_STEPS


@dataclass
class _Skips:
    """The running step: a tensor that is true if it is skipped, and whether its optimizer has read that."""

    is_skipped: Tensor
    is_read: bool = False


_skips: ContextVar[_Skips | None] = ContextVar("shardlib_skips", default=None)


@contextmanager
def trace_grad_scalers() -> Iterator[None]:
    """Runs gradient scalers in this way in traced functions, inside the context."""
    with ExitStack() as stack:
        for slot, form in ((SCALER_CHECKS, _unscale), (SCALER_STEPS, _step)):
            stack.enter_context(slot.holding(_traced(slot.value, form)))
        yield


def _traced(original: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (form if is_tracing() else original)(*args, **kwargs)


def _unscale(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[Any, Tensor]:
    """Unscales all gradients, and counts their infinite values."""
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
    """Runs the optimizer's step, which changes nothing if some gradient is not finite."""
    infinite: Any = sum(state["found_inf_per_device"].values())
    skips = _Skips(infinite > 0)
    token = _skips.set(skips)
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        _skips.reset(token)
    if not skips.is_read:
        raise ShardingError(
            f"a gradient scaler steps {type(optimizer).__name__} inside a traced function",
            rule="a step that is skipped is part of the program all the same: torch's own optimizers then change "
            "nothing",
            remedy="scaler.unscale_(opt) inside, and opt.step() outside jit; or bfloat16, which needs no scaler",
        )
    return result


def make_skippable(run: Callable[..., None], call: dict[str, Any]) -> tuple[Callable[..., None], Tensor | None]:
    """Makes an update of parameters, `run(**call)`, undo its changes if the step is skipped.

    Returns the update, and the tensor that is true for a skipped step, or None. A fused optimizer passes that tensor
    itself, and unscales its gradients.
    """
    now, found_inf, scale = _skips.get(), call.get("found_inf"), call.get("grad_scale")
    skips = None if now is None else now.is_skipped
    if now is not None:
        now.is_read = True
    if found_inf is not None:
        skips = found_inf > 0
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
    """Returns a state that the first step creates; zeros if this step is skipped, where the next one begins."""
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
    """Runs `torch._amp_update_scale_`: a smaller scale after infinite gradients, a larger one after some steps."""
    skipped = found_inf > 0
    steps = growth_tracker + 1
    grows = ~skipped & (steps == growth_interval)
    grown = scale * growth_factor
    now = torch.where(grows & torch.isfinite(grown), grown, scale)
    growth_tracker.copy_(torch.where(skipped | grows, 0, steps))
    return scale.copy_(torch.where(skipped, scale * backoff_factor, now))
