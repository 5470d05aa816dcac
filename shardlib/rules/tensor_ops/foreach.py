"""Ops over lists of tensors, as optimizers use them: written as one op per tensor while a function is traced.

An update in place becomes a new value for every tensor of the list, so that shards of any layout take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import OpOverload, all_op_names, schema_of
from shardlib.rules.out_variants import op_named, refuse_cast

aten = torch.ops.aten

# What one tensor's part is called, where it is not the name behind `_foreach_`.
_SINGLE: dict[str, Callable[..., Any]] = {
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: x.abs().pow(ord).sum(dtype=dtype),
    "copy": lambda x, source, non_blocking=False: aten.copy(x, source),
    "zero": torch.zeros_like,
    # Numbers among the operands: the ops for two tensors do not take them.
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp_min(x, y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp_max(x, y),
    "addcmul": lambda x, a, b, value=1: _plus(x, a * b, value),
    "addcdiv": lambda x, a, b, value=1: _plus(x, a / b, value),
}


def _plus(x: Tensor, y: Tensor, factor: Any) -> Tensor:
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def _each(target: OpOverload) -> Callable[..., Any]:
    """The op tensor by tensor: lists (and a vector of scalars) are taken item by item, everything else as it is."""
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
    """All `_foreach` ops of this torch but the forms with `out`, which are functionalized."""
    for full in all_op_names():
        name = full.removeprefix("aten::")
        if name.startswith("_foreach_") and not name.endswith("out"):
            yield name


# Optimizer steps -----------------------------------------------------------------------------------------------------


def _fused(step: Callable[..., list[Tensor]], lists: int, *, decoupled: bool = False) -> Callable[..., None]:
    """An optimizer's step in place, from `step(parameter, gradient, states..., **options)`.

    That returns the new values of the parameter and of its states. Weight decay is added to the gradient before, or
    taken off the parameter (`decoupled`).

    The first `lists` arguments are lists. A step whose `found_inf` is 1 changes nothing.
    """

    def form(*args: Any, grad_scale: Tensor | None = None, found_inf: Tensor | None = None, **options: Any) -> None:
        def kept(new: Tensor, old: Tensor) -> Tensor:
            return new if found_inf is None else torch.where(found_inf == 1, old, new)

        if isinstance(options["lr"], Tensor):
            options["lr"] = options["lr"].double()  # as the kernels do
        for i in range(len(args[0])):
            p, grad, *states = _of_one(args[:lists], i)
            if grad_scale is not None:
                grad.copy_(kept(grad / grad_scale, grad))
            given, pull, decay = p, -grad if options["maximize"] else grad, options["weight_decay"]
            if decoupled:
                given = p * (1 - options["lr"] * decay)
            elif decay:
                pull = pull + decay * p
            new = step(given, pull, *states, **options)
            for old, value in zip((p, *states), new, strict=False):
                if old is not None:
                    old.copy_(kept(value, old))

    return form


def _of_one(lists: Any, i: int) -> list[Any]:
    """The tensors of one parameter; None for a state that is not kept: its list is empty."""
    return [a[i] if a else None for a in lists]


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
    p: Tensor, grad: Tensor, kept: Tensor | None, *, momentum: float, lr: Any, dampening: float, nesterov: bool,
    is_first_step: bool, **_: Any,
) -> list[Any]:  # fmt: skip
    if kept is not None and momentum:
        kept = grad if is_first_step else momentum * kept + (1 - dampening) * grad
        grad = grad + momentum * kept if nesterov else kept
    return [p - lr * grad, kept]


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
