"""Replaces the tensors that the body of a loop closes over by stand-ins, so that they become inputs of the body.

The mode checks each argument of a torch function in the body, and each tensor that enters a transform there. It
replaces a tensor from outside, always by the same stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import PersistentFunctionMode
from shardlib.core.torch_internals.torch_private import (
    IN_A_FUNCTION,
    INTO_GRAD,
    INTO_VMAP,
    innermost,
    pytree,
    version_of,
    without_transforms,
)
from shardlib.frontend.copy_nodes import make_like
from shardlib.frontend.lifted_inputs import LiftedInputs


class CaptureMode(PersistentFunctionMode):
    """Replaces tensors from outside of the body, the `originals`, by `stand_ins`."""

    def __init__(self) -> None:
        super().__init__()
        self.originals: list[Tensor] = []
        self.stand_ins: list[Tensor] = []
        self._grads: list[Tensor | None] = []  # `.grad` of each stand-in at the start
        self._replacements: dict[int, Tensor] = {}  # by id of the tensor in the body
        self._doors = ExitStack()
        mode = get_proxy_mode()
        assert mode is not None, "the body is being traced"
        self._tracer = mode.tracer

    def __enter__(self) -> Any:
        self._doors.enter_context(_entered(self._argument))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._doors.close()

    def passing(self, tensors: Sequence[Tensor]) -> CaptureMode:
        """Returns the mode itself, which no longer replaces these tensors."""
        self._replacements |= {id(x): x for x in tensors}
        return self

    def refuse_grads(self, inputs: Iterable[tuple[str, Tensor]]) -> None:
        """Raises `ShardingError` if the body has set `.grad` of one of its named inputs or captured tensors."""
        state = LiftedInputs.current()
        state_names = (
            {}
            if state is None
            else {id(x): name for name, x in zip(state.state.names, state.state.tensors, strict=True)}
        )
        with torch.DisableTorchFunction():  # the body's own modes must not see these reads
            wrong = [name for name, x in inputs if x.grad is not None]
            for x, y, grad in zip(self.originals, self.stand_ins, self._grads, strict=True):
                if y.grad is not grad or (grad is not None and version_of(grad)):
                    wrong.append(state_names.get(id(x), f"a tensor of shape {list(x.shape)}"))
        if wrong:
            raise ShardingError(
                "the body of scan sets gradients of tensors that it did not make, by backward() or .grad",
                [f"{name}.grad" for name in wrong],
                rule="a body is traced once for all steps: a sum over the steps is part of its carry",
                remedy="l, d = sl.value_and_grad(loss)(w, b), or torch.autograd.grad(l, params), in the body, and the "
                "sum of the gradients in the carry; set w.grad behind scan",
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._argument, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _argument(self, x: Tensor) -> Tensor:
        """Returns the tensor that a function in the body gets in place of `x`."""
        mode = get_proxy_mode()
        if mode is None or mode.tracer is not self._tracer:  # a nested body is being traced
            return x
        if id(x) in self._replacements:
            return self._replacements[id(x)]
        base = innermost(x)
        if base in self._tracer.tensor_tracker or any(base is y for y in self.stand_ins):
            return x
        if not torch.is_grad_enabled() and _in_autograd_function():
            refuse_lost(x)
        self.originals.append(x)
        with without_transforms():  # a transform in the body may be active
            lifted = LiftedInputs.current()
            like = x if lifted is None else lifted.stand_in(x)
            y = self._replacements[id(x)] = stand_in(like) if is_followed(x) else make_like(like)
        self.stand_ins.append(y)
        self._grads.append(None)
        if x is base and (x.is_leaf or x.retains_grad):
            with torch.DisableTorchFunction():  # a read of `.grad` in the body sees the stand-in's
                grad = x.grad
            if grad is not None:
                at = len(self._grads) - 1
                y.grad = self._grads[at] = self._argument(grad)
        return y


@contextmanager
def _entered(argument: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Applies `argument` to tensors that enter a gradient or a vmap in the body; modes do not see these."""

    def through(enter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *how: enter(_quietly(argument, x), *how)

    with INTO_GRAD.holding(through(INTO_GRAD.value)), INTO_VMAP.holding(through(INTO_VMAP.value)):
        yield


def _quietly(argument: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.DisableTorchFunction():
        return argument(x)


def _in_autograd_function() -> bool:
    """Returns whether an autograd Function, which defines its own gradients, runs in the body."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "trace_body":
        if frame.f_code is IN_A_FUNCTION:
            return True
        frame = frame.f_back
    return False


def stand_in(x: Tensor) -> Tensor:
    """Returns a tensor like `x` that requires a gradient, if its dtype allows one."""
    y = make_like(x)
    return y.requires_grad_(y.is_floating_point() or y.is_complex())


def is_followed(x: Tensor) -> bool:
    """Returns whether a tensor from outside may be differentiated; a transform outside may always do so."""
    return x.requires_grad or x is not innermost(x)


def refuse_lost(x: Tensor) -> None:
    """Raises `ShardingError` for a differentiable tensor from outside that autograd does not follow into the body."""
    if is_followed(x):
        raise ShardingError(
            f"the body of scan closes over a tensor of shape {list(x.shape)} where its gradient is not followed",
            rule="inside custom autograd functions, tensors from outside are constants",
            remedy="pass the tensor in as part of the carry or of xs, or detach it",
        )
