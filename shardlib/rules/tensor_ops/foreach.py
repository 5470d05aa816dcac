"""Ops over lists of tensors, as in optimizers: traced as one op per tensor.

An update in place becomes a new value per tensor of the list, so that the tensors may have any layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import OpOverload, all_op_names, schema_of
from shardlib.rules.out_variants import op_named, refuse_cast

aten = torch.ops.aten

# The op for one tensor, where its name is not the one after `_foreach_`.
_SINGLE: dict[str, Callable[..., Any]] = {
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: x.abs().pow(ord).sum(dtype=dtype),
    "copy": lambda x, source, non_blocking=False: aten.copy(x, source),
    "zero": torch.zeros_like,
    # The ops for two tensors take no numbers.
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp_min(x, y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp_max(x, y),
    "addcmul": lambda x, a, b, value=1: _plus(x, a * b, value),
    "addcdiv": lambda x, a, b, value=1: _plus(x, a / b, value),
}


def _plus(x: Tensor, y: Tensor, factor: Any) -> Tensor:
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def _each(target: OpOverload) -> Callable[..., Any]:
    """The op tensor by tensor: takes lists, and a vector of scalars, item by item, and other arguments as a whole."""
    arguments = schema_of(target).arguments
    name = schema_of(target).name.removeprefix("aten::_foreach_")
    writes = schema_of(target).is_mutable
    single = _SINGLE.get(name.rstrip("_")) or getattr(torch, name.rstrip("_"))
    listed = [str(a.type).startswith("List[") or (a.name == "scalars" and str(a.type) == "Tensor") for a in arguments]

    def form(*args: Any, **kwargs: Any) -> Any:
        count = len(next(a for a, is_list in zip(args, listed, strict=False) if is_list))
        out = []
        for i in range(count):
            value = single(*(a[i] if is_list else a for a, is_list in zip(args, listed, strict=False)), **kwargs)
            if writes:
                _write(args[0][i], value)
            out.append(value)
        return None if writes else out

    return form


def _write(x: Tensor, value: Tensor) -> None:
    refuse_cast(value, x)
    x.copy_(value)


def _overloads() -> Iterator[str]:
    """Yields all `_foreach` ops of this torch, without the out= variants, which torch functionalizes."""
    for full in all_op_names():
        name = full.removeprefix("aten::")
        if name.startswith("_foreach_") and not name.endswith("out"):
            yield name


# Optimizer steps -----------------------------------------------------------------------------------------------------


def _fused(step: Callable[..., list[Tensor]], lists: int, *, decoupled: bool = False) -> Callable[..., None]:
    """Makes an in-place optimizer step of `step(parameter, gradient, states..., **options)`.

    `step` returns the new values of the parameter and of its states. Before it, weight decay is added to the gradient,
    or with `decoupled` subtracted from the parameter. The first `lists` arguments are lists. With `found_inf` 1 nothing
    changes.
    """

    def form(*args: Any, grad_scale: Tensor | None = None, found_inf: Tensor | None = None, **options: Any) -> None:
        def unless_inf(new: Tensor, old: Tensor) -> Tensor:
            return new if found_inf is None else torch.where(found_inf == 1, old, new)

        if isinstance(options["lr"], Tensor):
            options["lr"] = options["lr"].double()  # as the kernels do
        for i in range(len(args[0])):
            tensors: list[Any] = [a[i] if a else None for a in args[:lists]]  # a state that is not kept has no list
            p, grad, *states = tensors
            if grad_scale is not None:
                grad.copy_(unless_inf(grad / grad_scale, grad))
            start, pull, decay = p, -grad if options["maximize"] else grad, options["weight_decay"]
            if decoupled:
                start = p * (1 - options["lr"] * decay)
            elif decay:
                pull = pull + decay * p
            new = step(start, pull, *states, **options)
            for old, value in zip((p, *states), new, strict=False):
                if old is not None:
                    old.copy_(unless_inf(value, old))

    return form


def _adam(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, top: Tensor | None, step: Tensor, *, lr: Any, beta1: float,
    beta2: float, eps: float, amsgrad: bool, **_: Any,
) -> list[Any]:  # fmt: skip
    m = m.lerp(grad, 1 - beta1)
    v = beta2 * v + (1 - beta2) * grad * grad
    top = torch.maximum(top, v) if amsgrad and top is not None else top
    first, second = (1 - torch.pow(beta, step.double()) for beta in (beta1, beta2))
    spread = (v if top is None else top).sqrt() / second.sqrt() + eps
    return [p - lr / first * (m / spread), m, v, top]


def _sgd(
    p: Tensor, grad: Tensor, velocity: Tensor | None, *, momentum: float, lr: Any, dampening: float, nesterov: bool,
    is_first_step: bool, **_: Any,
) -> list[Any]:  # fmt: skip
    if velocity is not None and momentum:
        velocity = grad if is_first_step else momentum * velocity + (1 - dampening) * grad
        grad = grad + momentum * velocity if nesterov else velocity
    return [p - lr * grad, velocity]


def _adagrad(
    p: Tensor, grad: Tensor, total: Tensor, step: Tensor, *, lr: Any, lr_decay: float, eps: float, **_: Any
) -> list[Any]:
    total = total + grad * grad
    rate = lr / (1 + (step.double() - 1) * lr_decay)
    return [p - rate * (grad / (total.sqrt() + eps)), total]


ADAGRAD = _fused(_adagrad, 4)
_STEPS = {
    "_fused_adam_": _fused(_adam, 6),
    "_fused_adamw_": _fused(_adam, 6, decoupled=True),
    "_fused_sgd_": _fused(_sgd, 3),
    "_fused_adagrad_": ADAGRAD,
}

ROWS: dict[str, Any] = {}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **{name: _each(op_named(name)) for name in _overloads()},
    **{
        f"{name}.{overload}".removesuffix(".default"): form
        for name, form in _STEPS.items()
        if hasattr(aten, name)
        for overload in getattr(aten, name).overloads()
    },
}
