"""Helpers of local forms: indices into a sharded dim, shards that may be empty, and half precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.ops.checks import CHECK_INDEX
from shardlib.primitives.body import resolve_group
from shardlib.primitives.collectives import axis_index, piece, pmax, psum
from shardlib.primitives.form_dims import FormDims
from shardlib.rules.dtype_sums import NO_ARITHMETIC
from shardlib.rules.iteration_space import arg, normalize_dims, result_shape
from shardlib.rules.rule import Call, LocalBuilder

aten = torch.ops.aten


def sharded_factors(local: LocalBuilder, factors: Iterable[str]) -> list[str]:
    """Returns the factors among these that are sharded in this program."""
    return [f for f in factors if local.axes(f)]


def locate_index(index: Tensor, factor: str, padding: int = -1) -> tuple[Tensor, Tensor]:
    """Converts an index into the sharded dim `factor` to one into this device's shard: returns `(index, outside)`.

    Where the element lies on another device, or the index is `padding`, `index` is 0 and `outside` is True.
    """
    offset, size, _ = piece(factor)
    mine = index - offset
    outside = (mine < 0) | (mine >= size)
    outside = outside | (index == padding) if padding >= 0 else outside
    return mine.masked_fill(outside, 0), outside


def shard_sizes(factor: str) -> list[int]:
    """Returns the number of elements that each of the devices along a factor holds."""
    return _form_dims("shares", factor).shares(factor)


def shard_size(factor: str) -> int:
    """Returns the number of elements that this device holds, for code that does not depend on their offset."""
    return _form_dims("share", factor).share(factor)


def shard_index(factor: str) -> int:
    """This device's position among the devices along a factor."""
    return _form_dims("place", factor).place(factor)


def _form_dims(caller: str, factor: str) -> FormDims:
    form = resolve_group(caller, factor)[0].form
    assert form is not None, "outside any local form"
    return form


def from_torch_code(form: Callable[..., Any]) -> Callable[[LocalBuilder], Any]:
    """Makes a local form of torch code: `form(local, ...)` takes the op's arguments, with shards for tensors."""

    def run(local: LocalBuilder) -> Any:
        keyword_only = {a.name for a in schema_of(local.call.target).arguments if a.kwarg_only}
        named = {name: x for name, x in local.kwargs.items() if name in keyword_only}
        return local.run(partial(form, local), *positional_args(local), **named)

    return run


def gather_shards(x: Tensor, factor: str, dim: int, total: int) -> Tensor:
    """Gathers the shards of all devices along `dim`; they may differ in size, and have `total` elements together."""
    whole: Tensor = torch.ops.shardlib.manual_gather(x, [factor], dim, total)
    return whole


def check_index(index: Tensor, n: int, low: int = 0, ignore: int | None = None) -> Tensor:
    """Returns the index; the program raises torch's error for one outside of a dim of `n` elements."""
    CHECK_INDEX(index, low, n, ignore)
    return index


def keep_on_first(x: Tensor, factors: Iterable[str]) -> Tensor:
    """Returns `x` on the first of the devices along `factors`, and zeros on the others, so that their sum is `x`."""
    for factor in factors:
        x = x.masked_fill(axis_index(factor) != 0, neutral_addend(x.dtype))
    return x


def may_be_empty(local: LocalBuilder, factor: str) -> bool:
    """Returns whether some device of the mesh has an empty shard of `factor`."""
    size = local.size(factor)
    if isinstance(size, int):
        return size == 0
    lengths = {a.name: a.axis_size for a in local.axes(factor)}
    devices = itertools.product(*map(range, lengths.values()))  # 7 over (2 3) is 2 2 0 1 1 1
    return any(size.at(dict(zip(lengths, coords, strict=True))) == 0 for coords in devices)


@dataclass(frozen=True)
class ReducedDims:
    """Reductions over dims that may be sharded. The dims stay, with size 1.

    `factors` are the factors of the dims, and `count` is the global number of elements in them. A device's shard may be
    empty along the dims `maybe_empty`. With `keepdim` False, `drop_dims` removes the dims.
    """

    dims: tuple[int, ...]
    factors: tuple[str, ...]
    count: int
    maybe_empty: tuple[int, ...] = ()
    keepdim: bool = True

    @staticmethod
    def over(local: LocalBuilder, dims: Iterable[int], operand: int = 0) -> ReducedDims:
        """Creates the reductions over dims of an operand."""
        labels = local.rule.operands[operand]
        dims = tuple(d for d in dims if labels)  # a scalar has none
        factors = tuple(f for d in dims for f in labels[d])
        count = math.prod(local.call.operands[operand].shape[d] for d in dims)
        return ReducedDims(
            dims, factors, count, tuple(d for d in dims if any(may_be_empty(local, f) for f in labels[d]))
        )

    @staticmethod
    def over_dim_argument(local: LocalBuilder) -> ReducedDims:
        """Creates the reductions over the dims of operand 0 that the argument `dim` names, or over all dims."""
        rank = local.call.operands[0].rank
        dims = normalize_dims(arg(local.call, "dim", None), rank)
        return replace(ReducedDims.over(local, dims), keepdim=len(result_shape(local.call)) == rank)

    def drop_dims(self, x: Tensor) -> Tensor:
        return x if self.keepdim else x.squeeze(self.dims)

    def sum(self, x: Tensor) -> Tensor:
        return psum(x.sum(self.dims, keepdim=True) if self.dims else x, self.factors)  # type: ignore[no-any-return]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.count

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean, `x` minus the mean, and the variance."""
        mean = self.mean(x)
        centered = x - mean
        return mean, centered, self.mean(centered * centered)

    def max(self, x: Tensor) -> Tensor:
        filled = self.fill_empty(x, neutral_extreme(x.dtype, lowest=True))
        return pmax(filled.amax(self.dims, keepdim=True), self.factors)  # type: ignore[no-any-return]

    def fill_empty(self, x: Tensor, value: float) -> Tensor:
        """Returns `x` with one element of `value` along each dim in which this device's shard is empty."""
        pads = [n for d in reversed(range(x.dim())) for n in (0, int(d in self.maybe_empty and x.shape[d] == 0))]
        return pad_constant(x, pads, value) if self.maybe_empty else x


def pad_constant(x: Tensor, pads: Sequence[int], fill: complex = 0) -> Tensor:
    """Pads like `F.pad`, which makes a float of `fill`, and so pads no integers."""
    out: Tensor = aten.constant_pad_nd.default(x, pads, fill)
    return out


def neutral_addend(dtype: torch.dtype) -> complex:
    """Returns the number that changes no sum of this dtype: -0.0 for floats, since -0.0 + 0.0 is 0.0."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else 0


def can_add(dtype: torch.dtype) -> bool:
    """Returns whether torch adds values of this dtype on all kinds of devices, and the sum has the same dtype."""
    return dtype not in NO_ARITHMETIC and dtype != torch.bool


def neutral_extreme(dtype: torch.dtype, *, lowest: bool) -> float:
    """Returns the neutral element of a maximum (`lowest`) or of a minimum."""
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype == torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which torch's kernels sum values of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def in_accumulation_dtype(form: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """Wraps `form`: casts tensors to the dtype in which torch's kernels sum, and results back to their own dtypes."""
    dtypes = [None if m is None else m.dtype for m in call.results]
    acc = accumulation_dtype(next(filter(None, dtypes), torch.float32))

    def run(*args: Any) -> Any:
        results = form(*(x.to(acc) if isinstance(x, Tensor) else x for x in args))
        if isinstance(results, Tensor):
            return results.to(dtypes[0])
        return tuple(None if dtype is None else x.to(dtype) for x, dtype in zip(results, dtypes, strict=True))

    return run


def positional_args(local: LocalBuilder) -> list[Any]:
    """Returns the arguments of the call by position, with the schema's defaults, without keyword-only arguments."""
    others = schema_of(local.call.target).arguments[len(local.args) :]
    return [*local.args, *(local.kwargs.get(a.name, a.default_value) for a in others if not a.kwarg_only)]
