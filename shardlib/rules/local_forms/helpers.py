"""What `local` forms share: indices into a cut dim, shards that may be empty, and half precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import schema_of
from shardlib.ops.checks import CHECK_INDEX
from shardlib.primitives.body import group
from shardlib.primitives.collectives import axis_index, piece, pmax, psum
from shardlib.primitives.form_dims import FormDims
from shardlib.rules.dtype_sums import MUTE
from shardlib.rules.iteration_space import arg, axes, result_shape
from shardlib.rules.rule import Call, Local

aten = torch.ops.aten


def cut(local: Local, factors: Iterable[str]) -> list[str]:
    """Those of `factors` that are cut here."""
    return [f for f in factors if local.axes(f)]


def located(index: Tensor, factor: str, padding: int = -1) -> tuple[Tensor, Tensor]:
    """An index into the cut dim `factor`, as this device's piece counts: `(index, outside)`.

    `index` is 0 where the element lies on another device, or is that of the padding, and `outside` is True there.
    """
    offset, size, _ = piece(factor)
    mine = index - offset
    outside = (mine < 0) | (mine >= size)
    outside = outside | (index == padding) if padding >= 0 else outside
    return mine.masked_fill(outside, 0), outside


def shares(factor: str) -> list[int]:
    """How many elements each of the devices along a factor has."""
    return _dims("shares", factor).shares(factor)


def share(factor: str) -> int:
    """How many elements this device has, where it does not matter which."""
    return _dims("share", factor).share(factor)


def place(factor: str) -> int:
    """Which of the devices along a factor this one is."""
    return _dims("place", factor).place(factor)


def _dims(what: str, factor: str) -> FormDims:
    form = group(what, factor)[0].form
    assert form is not None, "outside any local form"
    return form


def torch_code(form: Callable[..., Any]) -> Callable[[Local], Any]:
    """A local form that is torch code: `form(local, ...)` of the op's arguments, with pieces in place of tensors."""

    def run(local: Local) -> Any:
        alone = {a.name for a in schema_of(local.call.target).arguments if a.kwarg_only}
        named = {name: x for name, x in local.kwargs.items() if name in alone}
        return local.run(partial(form, local), *positional(local), **named)

    return run


def gathered(x: Tensor, factor: str, dim: int, total: int) -> Tensor:
    """What all devices have, which may differ in size, next to each other along `dim`: `total` in all."""
    whole: Tensor = torch.ops.shardlib.manual_gather(x, [factor], dim, total)
    return whole


def checked(index: Tensor, n: int, low: int = 0, ignore: int | None = None) -> Tensor:
    """An index into a dim of `n` elements; one that lies outside is an error when the program runs, as in torch."""
    CHECK_INDEX(index, low, n, ignore)
    return index


def once(x: Tensor, factors: Iterable[str]) -> Tensor:
    """x on the first of the devices that share `factors` and nothing on the others, so that it is counted once."""
    for factor in factors:
        x = x.masked_fill(axis_index(factor) != 0, nothing(x.dtype))
    return x


def may_be_empty(local: Local, factor: str) -> bool:
    """Whether some device of the mesh holds nothing of `factor`."""
    size = local.size(factor)
    if isinstance(size, int):
        return size == 0
    lengths = {a.name: a.axis_size for a in local.axes(factor)}
    devices = itertools.product(*map(range, lengths.values()))  # 7 over (2 3) is 2 2 0 1 1 1
    return any(size.at(dict(zip(lengths, at, strict=True))) == 0 for at in devices)


@dataclass(frozen=True)
class Rows:
    """What code sums up, or compares, over dims that may be cut: the dims stay, with size 1.

    `factors` are what the dims are made of, `count` is how many elements the whole has in them; of the dims `risky` a
    device may have nothing.
    """

    dims: list[int]
    factors: tuple[str, ...]
    count: int
    risky: tuple[int, ...] = ()
    kept: bool = True

    @staticmethod
    def of(local: Local, dims: Iterable[int], operand: int = 0) -> Rows:
        """Over these dims of an operand."""
        labels = local.rule.operands[operand]
        dims = [d for d in dims if labels]  # a scalar has none
        factors = tuple(f for d in dims for f in labels[d])
        count = math.prod(local.call.operands[operand].shape[d] for d in dims)
        return Rows(dims, factors, count, tuple(d for d in dims if any(may_be_empty(local, f) for f in labels[d])))

    @staticmethod
    def over(local: Local) -> Rows:
        """Over the dims of operand 0 that `dim` names, or over all; the result has them with size 1, or not at all."""
        rank = local.call.operands[0].rank
        dims = axes(arg(local.call, "dim", None), rank)
        return replace(Rows.of(local, dims), kept=len(result_shape(local.call)) == rank)

    def left(self, x: Tensor) -> Tensor:
        """x as the result has it: the dims may go."""
        return x if self.kept else x.squeeze(self.dims)

    def sum(self, x: Tensor) -> Tensor:
        return psum(x.sum(self.dims, keepdim=True) if self.dims else x, self.factors)  # type: ignore[no-any-return]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.count

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, x without it, and the mean square of that."""
        mean = self.mean(x)
        centered = x - mean
        return mean, centered, self.mean(centered * centered)

    def max(self, x: Tensor) -> Tensor:
        return pmax(self.held(x, worst(x.dtype, lowest=True)).amax(self.dims, keepdim=True), self.factors)  # type: ignore[no-any-return]

    def held(self, x: Tensor, value: float) -> Tensor:
        """x with one element of `value` in every dim of which this device has nothing."""
        pads = [n for d in reversed(range(x.dim())) for n in (0, int(d in self.risky and x.shape[d] == 0))]
        return aten.constant_pad_nd.default(x, pads, value) if self.risky else x  # F.pad makes a float of `value`


def nothing(dtype: torch.dtype) -> complex:
    """What changes no number of this dtype that it is added to: of floats it is -0.0, since -0.0 + 0.0 is 0.0."""
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else 0


def adds_up(dtype: torch.dtype) -> bool:
    """Whether torch adds values of this dtype, on all devices, to one of the same."""
    return dtype not in MUTE and dtype != torch.bool


def worst(dtype: torch.dtype, *, lowest: bool) -> float:
    """The neutral element of a maximum (`lowest`) or a minimum."""
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype == torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels add up values of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def widely(form: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """`form` in the dtype in which torch's kernels add up: tensors are cast to it, results to their own."""
    dtypes = [None if m is None else m.dtype for m in call.results]
    acc = wide(next(filter(None, dtypes), torch.float32))

    def run(*args: Any) -> Any:
        found = form(*(x.to(acc) if isinstance(x, Tensor) else x for x in args))
        if isinstance(found, Tensor):
            return found.to(dtypes[0])
        return tuple(None if dtype is None else x.to(dtype) for x, dtype in zip(found, dtypes, strict=True))

    return run


def positional(local: Local) -> list[Any]:
    """The arguments of the call by position, with the schema's defaults; without those that are keyword-only."""
    behind = schema_of(local.call.target).arguments[len(local.args) :]
    return [*local.args, *(local.kwargs.get(a.name, a.default_value) for a in behind if not a.kwarg_only)]
