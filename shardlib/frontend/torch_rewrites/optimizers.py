"""Traces optimizers that count steps in a tensor: a trace computes with it, while torch reads its value.

Most of torch's optimizers support that: they are `capturable`. Three do not, or compute something else then; this
module has forms of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.context import is_tracing
from shardlib.core.torch_internals.torch_private import BY_LISTS, OPTIMIZERS, SINGLY, UPDATES, is_wrapped
from shardlib.frontend.copy_nodes import RecordedNodes
from shardlib.frontend.torch_rewrites import muon
from shardlib.frontend.torch_rewrites.grad_scaler import make_skippable
from shardlib.ops.adam import ADAM, DTYPES
from shardlib.rules.tensor_ops.foreach import ADAGRAD


@contextmanager
def trace_optimizers() -> Iterator[None]:
    """Makes optimizers `capturable` in traced functions, inside the context.

    The nodes of one parameter's update are copied for other parameters of its shape.
    """
    with ExitStack() as stack:
        for module, name, update in _updates():
            stack.callback(setattr, module, name, update)
            setattr(module, name, _traced(update))
        yield


@functools.cache
def _traced(update: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(update)
    name = next(update.__name__.removeprefix(kind) for kind in UPDATES if update.__name__.startswith(kind))
    one = _singly().get(name, update) if update.__name__.startswith(BY_LISTS) else update
    run = _OWN.get(name) or (_capturable(one) if "capturable" in signature.parameters else update)
    run = _adam(run) if name == "adam" else run

    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> None:
        if not is_tracing():
            update(*args, **kwargs)
            return
        call = signature.bind(*args, **kwargs).arguments
        if name == "muon" and muon.are_sharded(call["params"]):
            make_skippable(muon.update, call)[0](**call)
        else:
            _one_by_one(run, call)

    return updated


def _capturable(update: Callable[..., Any]) -> Callable[..., Any]:
    def run(**call: Any) -> None:
        # In float64, 0.999**n has all digits, as for Python's numbers.
        exact = {k: [x.double() for x in call[k]] for k in _NUMBERS if k in call}
        update(**call | exact | {"capturable": True})
        for k, updated in exact.items():
            for x, now in zip(call[k], updated, strict=True):
                x.copy_(now)

    return run


_NUMBERS = ("state_steps", "etas", "mus")  # tensors that updates read as numbers


def _one_by_one(run: Callable[..., Any], call: dict[str, Any]) -> None:
    """Updates each parameter by itself; a parameter of an earlier form gets a copy of the earlier nodes."""
    run, skips = make_skippable(run, call)
    count = len(call["params"])
    lists = [k for k, x in call.items() if isinstance(x, list) and len(x) == count and all(map(_is_state, x))]
    if torch.is_grad_enabled() or get_proxy_mode() is None:  # code may differentiate through the step
        run(**call)
        return
    recorded: dict[Any, RecordedNodes] = {}
    shared = [*(x for k, x in call.items() if k not in lists), skips]
    for i in range(count):
        with torch.DisableTorchFunction():
            operands = [call[k][i] for k in lists]
            key = tuple(map(_form, operands)), tuple(map([id(x) for x in operands].index, map(id, operands)))
            region = recorded.get(key)
            if region is not None:
                results = region.again(operands)
        if region is None:
            with torch.DisableTorchFunction():
                region = RecordedNodes(operands, shared)
            one = {k: [x] for k, x in zip(lists, operands, strict=True)}
            run(**call | one)
            results = [one[k][0] for k in lists]
            with torch.DisableTorchFunction():
                if region.end(operands, results):
                    recorded[key] = region
        for k, x in zip(lists, results, strict=True):
            if x is not call[k][i]:
                call[k][i] = x


def _is_state(x: Any) -> bool:
    return isinstance(x, Tensor | None)


def _form(x: Any) -> Any:
    return (type(x), x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x


@functools.cache
def _updates() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns the functions of torch that update parameters, each with its module and name."""
    modules = [importlib.import_module(f"torch.optim.{name}") for name in OPTIMIZERS]
    named = ((m, name, x) for m in modules for name, x in vars(m).items() if name.startswith(UPDATES))
    return [(m, name, x) for m, name, x in named if callable(x)]


def _singly() -> dict[str, Callable[..., Any]]:
    """Returns the updates that take one parameter at a time, by name: some others compute factors in float32."""
    return {name.removeprefix(SINGLY): x for _, name, x in _updates() if name.startswith(SINGLY)}


def _adam(run_plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Adam's update to be one op per parameter, where the op computes the same as torch."""

    def run(**call: Any) -> None:
        state = [call[k] for k in ("params", "grads", "exp_avgs", "exp_avg_sqs")]
        numbers = [call[k] for k in ("lr", "beta1", "beta2")]
        if call["amsgrad"] or any(isinstance(x, Tensor) for x in numbers) or not _is_one_op(state, call["state_steps"]):
            run_plain(**call)
            return
        decoupled = call.get("decoupled_weight_decay", False)
        for p, grad, *moments, step in zip(*state, call["state_steps"], strict=True):
            grad = -grad if call["maximize"] else grad
            results = ADAM(p, grad, *moments, step, *numbers, call["eps"], call["weight_decay"], decoupled)
            for old, new in zip((p, *moments, step), results, strict=True):
                old.copy_(new)

    return run


def _is_one_op(state: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]) -> bool:
    """Returns whether `ADAM` supports the call: no gradient, tangent or batch, one counter, and its dtypes."""
    if torch.is_grad_enabled() or any(x.dim() for x in steps):
        return False
    unpacked: Callable[..., Any] = unpack_dual
    if any(is_wrapped(x) or unpacked(x).tangent is not None for x in itertools.chain(*state, steps)):
        return False
    return all(x.dtype in DTYPES and x.dtype == xs[0].dtype for xs in zip(*state, strict=True) for x in xs)


# --- those that read their numbers ------------------------------------------------------------------------------------


def _adagrad(
    params: Sequence[Tensor], grads: Sequence[Tensor], state_sums: Sequence[Tensor], state_steps: Sequence[Tensor],
    **how: Any,
) -> None:  # fmt: skip
    """Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization" (2011)."""
    for step in state_steps:
        step += 1
    real = ([torch.view_as_real(x) if x.is_complex() else x for x in xs] for xs in (params, grads, state_sums))
    ADAGRAD(*real, state_steps, **how)


def _nadam(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    mu_products: Sequence[Tensor], state_steps: Sequence[Tensor],
    *, beta1: Any, beta2: Any, lr: Any, weight_decay: float, momentum_decay: float, eps: float,
    decoupled_weight_decay: bool, maximize: bool, **_: Any,
) -> None:  # fmt: skip
    """Dozat, "Incorporating Nesterov Momentum into Adam" (2016), its product kept in the product's own digits."""
    for p, grad, mean, square, product, step in zip(
        params, grads, exp_avgs, exp_avg_sqs, mu_products, state_steps, strict=True
    ):
        step += 1
        count = step.double()
        grad = -grad if maximize else grad
        if p.is_complex():
            p, grad, mean, square = map(torch.view_as_real, (p, grad, mean, square))
        if weight_decay and decoupled_weight_decay:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * p
        mu, next_mu = (beta1 * (1 - 0.5 * 0.96 ** (n * momentum_decay)) for n in (count, count + 1))
        product.mul_(mu.to(product.dtype))
        so_far = product.double()
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = square.div(1 - beta2**count).sqrt() + eps
        p.sub_(lr * (1 - mu) / (1 - so_far) * grad / size)
        p.sub_(lr * next_mu / (1 - so_far * next_mu) * mean / size)


def _adafactor(
    params: Sequence[Tensor], grads: Sequence[Tensor], row_vars: Sequence[Any], col_vars: Sequence[Any],
    variances: Sequence[Any], state_steps: Sequence[Tensor],
    *, d: float, lr: Any, beta2_decay: float, weight_decay: float, eps1: float | None, eps2: float, maximize: bool,
    **_: Any,
) -> None:  # fmt: skip
    """Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), as torch has it."""
    for p, grad, row, column, variance, step in zip(
        params, grads, row_vars, col_vars, variances, state_steps, strict=True
    ):
        small, root = torch.finfo(p.dtype).eps if eps1 is None else eps1, math.sqrt(p.numel())
        step += 1
        count = step.double()
        fresh = (count**beta2_decay).to(p.dtype)
        rate = count.rsqrt().clamp(max=lr) * (p.norm(2).double() / root).clamp(min=eps2)
        if weight_decay:
            p.mul_(1 - lr * weight_decay)
        grad = -grad if maximize else grad
        if grad.dim() > 1:
            for kept, dim in ((row, -1), (column, -2)):
                kept.lerp_(grad.norm(dim=dim, keepdim=True).square() / grad.shape[dim], fresh)
            estimate = row @ column / row.mean(-2, keepdim=True).clamp(min=small)
        else:
            estimate = variance.lerp_(grad * grad, fresh)
        update = estimate.clamp(min=small * small).rsqrt() * grad
        p.sub_(update * (rate / (update.norm(2).double() / (root * d)).clamp(min=1)))


# Replacements of updates that read their numbers.
_OWN: dict[str, Callable[..., None]] = {"adagrad": _adagrad, "nadam": _nadam, "adafactor": _adafactor}
