"""Batch and group normalization: statistics of the whole batch and space, also where these are sharded.

The devices exchange the sums of each channel or group. Ops that use no statistics of their own batch (evaluation, and
its backward) are pointwise in the batch and the space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.iteration_space import arg
from shardlib.rules.local_forms.helpers import ReducedDims, in_accumulation_dtype, may_be_empty, sharded_factors
from shardlib.rules.nn_ops.norm import affine, layer_norm, layer_norm_terms
from shardlib.rules.notation import gradient_pattern
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten

# Batch normalization -------------------------------------------------------------------------------------------------


def _batch_norm(text: str, form: Callable[..., tuple[Tensor, ...]], trains: bool | None = None) -> RuleFn:
    """Returns the rule of a batch normalization with channels `c`.

    `{saved}` in the text are values that only training reads or returns. `trains` is the mode of an op without a flag.
    """
    backward = form is _backward

    def rule(call: Call) -> Rule:
        flag = next((a.name for a in schema_of(call.target).arguments if a.name in _FLAGS), None)
        training = bool(arg(call, flag) if flag else trains)
        kind = "sum" if backward and not training else "none"
        notes = f"n:local ...:local c:local n:{kind} ...:{kind} c:none {'{0}' if backward else ''}"
        flops = lambda call, _: (8 if backward else 5) * math.prod(call.operands[0].shape)
        local = partial(_batch_local, form, training)
        return pattern(f"{text.format(saved='c' if training else '_')} | {notes}", emit=local, flops=flops)(call)

    return rule


def _batch_local(form: Callable[..., tuple[Tensor, ...]], training: bool, local: LocalBuilder) -> Any:
    n, c, *space = local.rule.operands[0]
    batch = [f for d in (n, *space) for f in d]
    if not (training and sharded_factors(local, batch)) and not any(may_be_empty(local, f) for f in (*batch, *c)):
        return local.op(local.call.target, *local.args)  # kernels refuse empty inputs, or crash
    reduced = ReducedDims.over(local, [i for i in range(2 + len(space)) if i != 1])
    unused = [math.prod(map(local.size, d)) for labels in local.rule.results[1:3] for d in labels]
    all_results = partial(form, reduced if training else replace(reduced, factors=()), unused, training)
    run = in_accumulation_dtype(lambda *args: all_results(*args)[: len(local.call.results)], local.call)
    return local.run(run, *local.args)


_FLAGS = {"training", "train", "update"}


def _forward(
    reduced: ReducedDims, unused: Sequence[int], trains: bool, x: Tensor, w: Any, b: Any, *rest: Any
) -> tuple[Tensor, ...]:
    running = [_along(x, v) for v in rest if isinstance(v, Tensor)]
    momentum, eps = rest[-2:]
    if trains:
        mean, centered, var = reduced.moments(x)
        sample = var * (reduced.count / max(reduced.count - 1, 1))  # running variances are those of a sample
        running = [old.lerp(new, momentum) for old, new in zip(running, (mean, sample), strict=False)]
    else:
        mean, var = running
        centered = x - mean
    rstd = (var + eps).rsqrt()
    saved = [mean.reshape(-1), rstd.reshape(-1)] if trains else [x.new_empty(n) for n in unused]
    return affine(centered * rstd, _along(x, w), _along(x, b)), *saved, *(v.reshape(-1) for v in running)


def _with_reserve(reduced: ReducedDims, unused: Any, trains: bool, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    out, mean, rstd, *running = _forward(reduced, unused, trains, x, *args)
    return out, mean, rstd, x.new_empty(0), *running  # an empty scratch tensor for some kernels


def _backward(
    reduced: ReducedDims, _: Any, trains: bool, grad: Tensor, x: Tensor, w: Any, mean: Any, var: Any, saved: Any,
    rstd: Any, flag: bool, eps: float, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    mean, rstd = (_along(x, saved), _along(x, rstd)) if trains else (_along(x, mean), (_along(x, var) + eps).rsqrt())
    unit = (x - mean) * rstd
    totals = reduced.sum(grad * unit), reduced.sum(grad)
    if trains:
        along, mean = (total / reduced.count for total in totals)
        grad = grad - mean - unit * along
    w = _along(x, w)
    return affine(grad * rstd, w), *(total.reshape(-1) for total in totals)


def _along(x: Tensor, c: Any) -> Any:
    """Returns a value per channel, shaped to broadcast against the input."""
    return None if c is None else c.reshape([1, -1, *[1] * (x.dim() - 2)])


# Group normalization -------------------------------------------------------------------------------------------------


def _group_norm(text: str, form: Callable[..., tuple[Tensor, ...]], flops: int) -> RuleFn:
    """Each device sums its channels and space of a group."""

    def local(local: LocalBuilder) -> Any:
        call, summed = local.call, [f for f in local.rule.sizes if f == "c" or f.startswith("*")]
        if not sharded_factors(local, summed) and not any(
            may_be_empty(local, f) for f in "ng" if f in local.rule.sizes
        ):
            return local.op(call.target, *local.args)
        count = math.prod(call.operands[0].shape[1:]) // arg(call, "group")
        return local.run(in_accumulation_dtype(form, call), ReducedDims((2, 3), tuple(summed), count), *local.args)

    return pattern(text, emit=local, flops=flops)


def _group_forward(
    reduced: ReducedDims,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    n: int,
    c: int,
    space: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    each = c // max(groups, 1)
    w, b = (None if v is None else v.reshape(1, groups, each, 1) for v in (w, b))
    out, *saved = layer_norm(reduced, x.reshape(n, groups, each, space), None, w, b, eps)
    return out.reshape(x.shape), *(v.reshape(n, groups) for v in saved)


def _group_backward(
    reduced: ReducedDims, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, *sizes: Any
) -> tuple[Tensor, ...]:
    n, c, space, groups, _ = sizes
    shape, each = x.shape, c // max(groups, 1)
    grad, x = (v.reshape(n, groups, each, space) for v in (grad, x))
    mean, rstd = (v.reshape(n, groups, 1, 1) for v in (mean, rstd))
    dx, *terms = layer_norm_terms(reduced, grad, x, mean, rstd, None if w is None else w.reshape(1, groups, each, 1))
    return dx.reshape(shape), *(term.sum([0, 3]).reshape(c) for term in terms)


# Ops that write to the running statistics although their schemas do not declare it ------------------------------------


def _native_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    return _batch_norm_of(x, weight, bias, mean, var, training, momentum, eps)


def _batch_norm_of(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """`_native_batch_norm_legit`; the further results of an evaluation depend on the kind of device."""
    operands = (x, weight, bias, mean, var)
    if not training:
        out = aten._native_batch_norm_legit_no_training(*operands, momentum, eps)[0]
        return out, mean.new_empty(0), mean.new_empty(0)
    *results, new_mean, new_var = aten._native_batch_norm_legit_functional(*operands, True, momentum, eps)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(results)


def _batch_norm_no_update(*args: Any) -> tuple[Any, ...]:
    out = aten._native_batch_norm_legit_no_training(*args)[0]
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm(x: Any, *rest: Any) -> tuple[Any, ...]:
    return *_native_batch_norm(x, *rest), torch.empty_like(x, dtype=torch.uint8).flatten()[:0]


def _cudnn_batch_norm_backward(
    x: Any, grad: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_rstd: Any, eps: float, _: Any
) -> tuple[Any, Any, Any]:
    rest = (mean, var, saved_mean, saved_rstd, True, eps, [True, True, True])
    return aten.native_batch_norm_backward(grad, x, weight, *rest)  # type: ignore[no-any-return]


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "native_batch_norm": _native_batch_norm,
    "_native_batch_norm_legit": _batch_norm_of,
    "_batch_norm_no_update": _batch_norm_no_update,
    "cudnn_batch_norm": _cudnn_batch_norm,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
}

# The channels are (groups, channels of a group).
_GROUPS = (
    "n (g c) ..., (g c), (g c) -> n (g c) ..., n g, n g | n:size(N) (g c):size(C) ...:size(HxW) g:size(group) "
    "n:local g:local c:local ...:local c:none ...:none"
)
_TRAINED = "n c ..., c, c, c, c -> n c ..., {saved}, {saved}"
_TRAINED_BACKWARD = "n c ..., n c ..., c, c, c, {saved}, {saved}"

ROWS: dict[str, RuleFn | str] = {
    "_native_batch_norm_legit.no_stats": _batch_norm("n c ..., c, c -> n c ..., {saved}, {saved}", _forward),
    "_native_batch_norm_legit_functional": _batch_norm(f"{_TRAINED}, c, c", _forward),
    "_native_batch_norm_legit_no_training": _batch_norm(_TRAINED, _forward),
    "_batch_norm_with_update_functional": _batch_norm(f"{_TRAINED}, _, c, c", _with_reserve, trains=True),
    "native_batch_norm_backward": _batch_norm(f"{_TRAINED_BACKWARD} -> n c ..., c, c", _backward),
    "batch_norm_backward": _batch_norm(f"{_TRAINED_BACKWARD}, _ -> n c ..., c, c", _backward),
    "native_group_norm": _group_norm(_GROUPS, _group_forward, 5),
    "native_group_norm_backward": _group_norm(gradient_pattern(_GROUPS, "0 r1 r2 1", wrt="0 1 2"), _group_backward, 8),
}
