"""Batch and group normalisation: statistics of the whole batch and space, also where these are cut.

A device adds up what it holds of every channel or group, and the sums travel. What reads no statistics of its own batch
(evaluation, and its backward) passes the batch and the space as pointwise ops do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.norm import Rows, narrowed, rsqrt, scaled, widened
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import cut, may_be_empty, wide
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
                acc = wide(call.operands[0].dtype)
                dims = [i for i in range(len(shape)) if i != 1]
                sums = Rows(local, dims, batch if trains else (), (x[1],) if x[1] else (), _count(shape))
                form = _backward if backward else _forward
                return narrowed(local, form(local, kinds, outs, sums, acc, trains), acc)
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


def _count(shape: Sequence[int]) -> int:
    """Values in a channel."""
    return numel(shape[:1]) * numel(shape[2:])


def _channels(local: Local, kinds: str, acc: torch.dtype) -> list[Any]:
    """What the call says about channels, in the order of its arguments, shaped to go with the input; None: nothing."""
    rank = len(local.call.operands[0].shape)
    shape = [1, -1, *[1] * (rank - 2)]
    found = [widened(local, local.args[i], i, acc) for i, kind in enumerate(kinds) if kind == "c"]
    return [None if x is None else local.op(aten.reshape.default, x, shape) for x in found]


def _flat(local: Local, x: Any) -> Any:
    return local.op(aten.reshape.default, x, [-1])


def _forward(local: Local, kinds: str, outs: str, sums: Rows, acc: torch.dtype, trains: bool) -> tuple[Any, ...]:
    w, b, *running = _channels(local, kinds, acc)
    momentum, eps = (local.args[kinds.index(kind)] for kind in "me")
    x = widened(local, local.args[0], 0, acc)
    if trains:
        mean, centred, var = sums.moments(x)
        # Running variances are those of a sample.
        sample = local.op(aten.mul.Scalar, var, sums.count / max(sums.count - 1, 1))
        running = [
            local.op(aten.lerp.Scalar, old, new, momentum) for old, new in zip(running, (mean, sample), strict=False)
        ]
    else:
        mean, var = running
        centred = local.op(aten.sub.Tensor, x, mean)
    rstd = rsqrt(local, var, eps)
    out = scaled(local, centred, rstd, w)
    out = out if b is None else local.op(aten.add.Tensor, out, b)
    nothing, scratch = (local.op(aten.new_empty.default, x, [0], dtype=dtype) for dtype in (acc, torch.uint8))
    saved = [_flat(local, mean), _flat(local, rstd)] if trains else [nothing, nothing]
    rest = iter([*saved, *(_flat(local, x) for x in running)])
    return out, *(next(rest) if kind == "c" else scratch for kind in outs[1:])


def _backward(local: Local, kinds: str, outs: str, sums: Rows, acc: torch.dtype, trains: bool) -> tuple[Any, ...]:
    w, mean, var, *saved = _channels(local, kinds, acc)
    mean, rstd = saved if trains else (mean, rsqrt(local, var, local.args[kinds.index("e")]))
    grad, x = (widened(local, local.args[i], i, acc) for i in (0, 1))
    unit = scaled(local, local.op(aten.sub.Tensor, x, mean), rstd)
    totals = [sums.sum(scaled(local, grad, unit)), sums.sum(grad)]
    if trains:
        along, mean = (local.op(aten.div.Scalar, total, sums.count) for total in totals)
        grad = local.op(aten.sub.Tensor, local.op(aten.sub.Tensor, grad, mean), scaled(local, unit, along))
    return scaled(local, grad, rstd, w), *(_flat(local, total) for total in totals)


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
            acc = wide(call.operands[0].dtype)
            sums = Rows(local, [2, 3], within, tuple(d for d in statistics if d), numel(shape[1:]) // groups)
            by = _Groups(local, first, math.prod(local.size(f) for f in c), acc)
            there = [math.prod(local.size(f) for f in d) for d in x]
            return narrowed(local, (_group_backward if backward else _group_forward)(local, by, sums, there), acc)
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


class _Groups:
    """The call's tensors as [batch, groups, channels of a group, space], in the dtype to compute in."""

    def __init__(self, local: Local, first: int, channels: Any, acc: torch.dtype) -> None:
        self.local, self.acc = local, acc
        self.n, self.channels, self.space, self.groups = local.args[first : first + 4]
        self.per_group = channels

    def x(self, position: int) -> Any:
        return self._shaped(position, [self.n, self.groups, self.per_group, self.space])

    def weight(self, position: int) -> Any:
        return self._shaped(position, [1, self.groups, self.per_group, 1])

    def statistics(self, position: int) -> Any:
        return self._shaped(position, [self.n, self.groups, 1, 1])

    def _shaped(self, position: int, shape: list[Any]) -> Any:
        x = widened(self.local, self.local.args[position], position, self.acc)
        return None if x is None else self.local.op(aten.reshape.default, x, shape)


def _group_forward(local: Local, by: _Groups, sums: Rows, shape: list[Any]) -> tuple[Any, ...]:
    w, b = by.weight(1), by.weight(2)
    mean, centred, var = sums.moments(by.x(0))
    rstd = rsqrt(local, var, local.args[7])
    out = scaled(local, centred, rstd, w)
    out = out if b is None else local.op(aten.add.Tensor, out, b)
    each = [by.n, by.groups]
    return tuple(local.op(aten.reshape.default, v, to) for v, to in ((out, shape), (mean, each), (rstd, each)))


def _group_backward(local: Local, by: _Groups, sums: Rows, shape: list[Any]) -> tuple[Any, ...]:
    grad, x, w = by.x(0), by.x(1), by.weight(4)
    mean, rstd = by.statistics(2), by.statistics(3)
    unit = scaled(local, local.op(aten.sub.Tensor, x, mean), rstd)
    pull = scaled(local, grad, w)
    along = scaled(local, unit, sums.mean(scaled(local, pull, unit)))
    dx = local.op(aten.sub.Tensor, local.op(aten.sub.Tensor, pull, sums.mean(pull)), along)
    dx = local.op(aten.reshape.default, scaled(local, dx, rstd), shape)
    weights = (local.op(aten.sum.dim_IntList, v, [0, 3]) for v in (scaled(local, grad, unit), grad))
    return dx, *(local.op(aten.reshape.default, v, [by.channels]) for v in weights)


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
        return aten._native_batch_norm_legit_no_training(*given, momentum, eps)[0], x.new_empty(0), x.new_empty(0)
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
