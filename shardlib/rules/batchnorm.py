"""Batch and group normalisation: statistics of the whole batch and space, also where these are cut.

A device adds up what it holds of every channel or group, and the sums travel. What reads no statistics of its own batch
(evaluation, and its backward) passes the batch and the space as pointwise ops do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import schema_of
from shardlib.rules.norm import affine
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import Rows, cut, may_be_empty, widely
from shardlib.rules.space import Dim, Space, numel

aten = torch.ops.aten

# Batch normalisation -------------------------------------------------------------------------------------------------

# Arguments of the ops: "x" is shaped like the input, "c" like its channels (or is empty, or missing), "t" says whether
# the statistics are those of this batch, "m" is the momentum, "e" epsilon, "k" which results are wanted, "r" a scratch
# tensor; then the same for the results. "T" and "E" stand for training and evaluation where the op takes no flag.
_BATCH = {
    "_native_batch_norm_legit.no_stats": ("xcctme", "xcc"),
    "_native_batch_norm_legit_functional": ("xcccctme", "xcccc"),
    "_native_batch_norm_legit_no_training": ("xccccme", "xcc"),
    "_batch_norm_with_update_functional": ("xccccme", "xccrcc"),
    "native_batch_norm_backward": ("xxccccctek", "xcc"),
    "batch_norm_backward": ("xxccccctekr", "xcc"),
}
_TRAINS = {"_batch_norm_with_update_functional": True}  # the rest without a flag evaluate


def _batch_norm(name: str) -> RuleFn:
    kinds, outs = _BATCH[name]

    def rule(call: Call) -> Rule:
        shape = call.operands[0].shape
        backward = "backward" in name
        trains = call.args[kinds.index("t")] if "t" in kinds else _TRAINS.get(name, False)
        space = Space()
        x = space.dims(shape)

        def labels(kind: str, m: Meta | None) -> list[Dim]:
            """The scratch tensor, and the statistics that an evaluation does not make, are empty."""
            if m is None:
                return []
            return x if kind == "x" else [x[1]] if kind == "c" and m.shape == shape[1:2] else space.dims(m.shape, "r")

        given = zip(kinds, call.args, strict=False)
        operands = [labels(kind, a) for kind, a in given if isinstance(a, Meta)]
        results = [labels(kind, m) for kind, m in zip(outs, call.results, strict=True)]
        batch = [f for i, d in enumerate(x) if i != 1 for f in d]

        def local(local: Local) -> Any:
            if (trains and cut(local, batch)) or any(may_be_empty(local, f) for f in (*batch, *x[1])):
                dims = [i for i in range(len(shape)) if i != 1]
                rows = Rows(dims, tuple(batch if trains else ()), numel(shape[:1]) * numel(shape[2:]))
                form = partial(_backward if backward else _forward, rows, kinds, outs, trains)
                unread = [math.prod(map(local.size, d)) for labels in local.rule.results[1:3] for d in labels]
                return local.run(widely(form, local.call), unread, *local.args)
            return local.op(call.target, *local.args)  # the kernels refuse empty inputs, or crash

        return space.rule(
            operands,
            results,
            reduce=dict.fromkeys(batch, "sum" if backward and not trains else "none") | dict.fromkeys(x[1], "none"),
            linear=[{0}] if backward else [],
            local=local,
            local_factors=[*batch, *x[1]],
            flops=(8 if backward else 5) * numel(shape),
        )

    return rule


def _by_kind(kinds: str, args: Sequence[Any], kind: str) -> list[Any]:
    """The arguments of a kind; those about channels are shaped to go with the input. None: nothing is said."""
    (x, *_), found = args, [a for k, a in zip(kinds, args, strict=True) if k == kind]
    if kind != "c":
        return found
    return [None if c is None else c.reshape([1, -1, *[1] * (x.dim() - 2)]) for c in found]


def _forward(rows: Rows, kinds: str, outs: str, trains: bool, unread: Sequence[int], *args: Any) -> tuple[Tensor, ...]:
    x, (w, b, *running) = args[0], _by_kind(kinds, args, "c")
    (momentum,), (eps,) = _by_kind(kinds, args, "m"), _by_kind(kinds, args, "e")
    if trains:
        mean, centred, var = rows.moments(x)
        sample = var * (rows.count / max(rows.count - 1, 1))  # running variances are those of a sample
        running = [old.lerp(new, momentum) for old, new in zip(running, (mean, sample), strict=False)]
    else:
        mean, var = running
        centred = x - mean
    rstd = (var + eps).rsqrt()
    saved = [mean.reshape(-1), rstd.reshape(-1)] if trains else [x.new_empty(n) for n in unread]
    rest = iter([*saved, *(c.reshape(-1) for c in running)])
    return affine(centred * rstd, w, b), *(next(rest) if kind == "c" else x.new_empty(0) for kind in outs[1:])


def _backward(rows: Rows, kinds: str, outs: str, trains: bool, unread: Any, *args: Any) -> tuple[Tensor, ...]:
    grad, x = args[:2]
    (w, mean, var, *saved), (eps,) = _by_kind(kinds, args, "c"), _by_kind(kinds, args, "e")
    mean, rstd = saved if trains else (mean, (var + eps).rsqrt())
    unit = (x - mean) * rstd
    totals = rows.sum(grad * unit), rows.sum(grad)
    if trains:
        along, mean = (total / rows.count for total in totals)
        grad = grad - mean - unit * along
    return affine(grad * rstd, w), *(total.reshape(-1) for total in totals)


# Group normalisation -------------------------------------------------------------------------------------------------


def _group_norm(call: Call) -> Rule:
    """The channels are (groups, channels of a group); of a group's statistics every device has its channels and space.

    The kernels take sizes as arguments and memory as it comes, so that slices are made contiguous first.
    """
    backward = "backward" in schema_of(call.target).name
    first = 5 if backward else 3  # of the integers N, C, HxW, groups
    shape = call.operands[0].shape
    groups = call.args[first + 3]
    space = Space()
    n, g, c = space.dim(shape[0], "n"), space.dim(groups, "g"), space.dim(shape[1] // groups, "c")
    rest = space.dims(shape[2:], "s")
    s = tuple(f for d in rest for f in d)
    x, w, statistics = [n, g + c, *rest], [g + c], [n, g]
    kinds = ("xxssw" if backward else "xww").ljust(len(call.args), "-")
    dims = {"x": x, "w": w, "s": statistics}
    within = [*c, *s]

    def local(local: Local) -> Any:
        if cut(local, within) or any(may_be_empty(local, f) for f in (*n, *g)):
            rows = Rows([2, 3], tuple(within), numel(shape[1:]) // groups)
            return local.run(
                widely(partial(_group_backward if backward else _group_forward, rows), local.call), *local.args
            )
        args = [
            local.op(aten.contiguous.default, a) if k != "-" and a is not None else a
            for k, a in zip(kinds, local.args, strict=True)
        ]
        return local.op(call.target, *args)

    rule = space.rule(
        [dims[k] for k, a in zip(kinds, call.args, strict=True) if isinstance(a, Meta)],
        [[] if m is None else dims[k] for k, m in zip("xww" if backward else "xss", call.results, strict=True)],
        reduce=dict.fromkeys((*n, *s), "sum") if backward else dict.fromkeys(within, "none"),
        linear=[{0}] if backward else [],
        ints={(first + i,): (1, dim) for i, dim in enumerate((n, g + c, s, g))},
        local=local,
        local_factors=[*n, *g, *within],
        flops=(8 if backward else 5) * numel(shape),
    )
    return replace(rule, dense=True)


def _group_forward(
    rows: Rows, x: Tensor, w: Tensor | None, b: Tensor | None, n: int, c: int, space: int, groups: int, eps: float
) -> tuple[Tensor, ...]:
    each = c // max(groups, 1)
    mean, centred, var = rows.moments(x.reshape(n, groups, each, space))
    rstd = (var + eps).rsqrt()
    w, b = (None if v is None else v.reshape(1, groups, each, 1) for v in (w, b))
    return affine(centred * rstd, w, b).reshape(x.shape), *(v.reshape(n, groups) for v in (mean, rstd))


def _group_backward(
    rows: Rows, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, *sizes: Any
) -> tuple[Tensor, ...]:
    n, c, space, groups, _ = sizes
    shape, each = x.shape, c // max(groups, 1)
    grad, x = (v.reshape(n, groups, each, space) for v in (grad, x))
    mean, rstd = (v.reshape(n, groups, 1, 1) for v in (mean, rstd))
    unit, pull = (x - mean) * rstd, affine(grad, None if w is None else w.reshape(1, groups, each, 1))
    dx = (pull - rows.mean(pull) - unit * rows.mean(pull * unit)) * rstd
    return dx.reshape(shape), *(v.sum([0, 3]).reshape(c) for v in (grad * unit, grad))


# Ops that write to the running statistics although their schemas do not say so ----------------------------------------


def native_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """The forms whose schemas admit it."""
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    return _batch_norm_of(x, weight, bias, mean, var, training, momentum, eps)


def _batch_norm_of(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """`_native_batch_norm_legit`; what an evaluation returns beside its result has another shape on every device."""
    given = (x, weight, bias, mean, var)
    if not training:
        out = aten._native_batch_norm_legit_no_training(*given, momentum, eps)[0]
        return out, mean.new_empty(0), mean.new_empty(0)
    *results, new_mean, new_var = aten._native_batch_norm_legit_functional(*given, True, momentum, eps)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(results)


def _batch_norm_no_update(*args: Any) -> tuple[Any, ...]:
    out = aten._native_batch_norm_legit_no_training(*args)[0]
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm(x: Any, *rest: Any) -> tuple[Any, ...]:
    return *native_batch_norm(x, *rest), torch.empty_like(x, dtype=torch.uint8).flatten()[:0]


def _cudnn_batch_norm_backward(
    x: Any, grad: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_rstd: Any, eps: float, _: Any
) -> tuple[Any, Any, Any]:
    rest = (mean, var, saved_mean, saved_rstd, True, eps, [True, True, True])
    return aten.native_batch_norm_backward(grad, x, weight, *rest)  # type: ignore[no-any-return]


def _into(op: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """The form that writes its results into given tensors."""

    def form(*args: Any, out: Any, save_mean: Any, save_invstd: Any) -> tuple[Any, Any, Any]:
        given = (out, save_mean, save_invstd)
        for buffer, value in zip(given, op(*args), strict=True):
            buffer.copy_(value)
        return given

    return form


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "native_batch_norm": native_batch_norm,
    "_native_batch_norm_legit": _batch_norm_of,
    "_batch_norm_no_update": _batch_norm_no_update,
    "_native_batch_norm_legit.out": _into(_batch_norm_of),
    "_native_batch_norm_legit.no_stats_out": _into(aten._native_batch_norm_legit.no_stats),
    "cudnn_batch_norm": _cudnn_batch_norm,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
}

ROWS: dict[str, RuleFn | str] = {
    **{name: _batch_norm(name) for name in _BATCH},
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm,
}
