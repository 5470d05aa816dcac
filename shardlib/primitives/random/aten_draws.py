"""ATen's random ops, as draws by element index and arithmetic on them.

`FORMS` has a function for every overload: functional, `_like`, in place and `out=`. A form reads its arguments by their
names in the schema, so that one function serves all overloads of an op.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.ops.checks import WITHIN
from shardlib.ops.random.philox import threshold
from shardlib.primitives.random.keys import draw, fresh_key

aten = torch.ops.aten

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a uniform number
_ONE_WORD = 1 << 20  # ranges up to this size use 32 bits: a number's probability is off by 2^-12 of itself at most


@dataclass(frozen=True)
class DrawCall:
    """One call of a random op: its arguments by name, and shape, dtype and device of the numbers."""

    op: Any
    arguments: dict[str, Any]
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    like: Tensor | None

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def draw(self, kind: str, dtype: torch.dtype, p: int = 0, size: tuple[int, ...] | None = None) -> Tensor:
        like = self.like if size is None or size == self.size else None
        shape = self.size if size is None else size
        return draw(kind, shape, dtype=dtype, device=self.device, generator=self["generator"], like=like, p=p)

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which numbers of this dtype are computed."""
        return torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32

    def require(self, holds: bool, rule: str) -> None:
        """Raises ShardingError with the rule unless it holds."""
        if not holds:
            numbers = {k: x for k, x in self.arguments.items() if isinstance(x, int | float)}
            raise ShardingError(
                f"{self.op} cannot draw {_dtype_name(self.dtype)}{list(self.size)}",
                [", ".join(f"{k}={x}" for k, x in numbers.items())] if numbers else [],
                rule=rule,
            )

    def require_floating(self) -> None:
        self.require(self.dtype in _DIGITS, "it draws float64, float32, float16 or bfloat16 numbers")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _scale_and_shift(x: Tensor, scale: Any, shift: Any) -> Tensor:
    """Computes `x * scale + shift`; skips a scale of 1 and a shift of 0."""
    x = x if not isinstance(scale, Tensor) and scale == 1 else x * scale
    return x if not isinstance(shift, Tensor) and shift == 0 else x + shift


# --- distributions: the numbers of a call -----------------------------------------------------------------------------


def _unit(a: DrawCall) -> Tensor:
    """Draws uniform numbers from 0 to below 1; a complex number has two of them."""
    if a.dtype.is_complex:
        return _cast(torch.view_as_complex(a.draw("uniform", a.wide, _DIGITS[a.wide], (*a.size, 2))), a.dtype)
    a.require_floating()
    return _cast(a.draw("uniform", a.wide, _DIGITS[a.dtype]), a.dtype)


def _uniform(a: DrawCall) -> Tensor:
    low, high = (float(x) for x in (a["from"] or 0.0, 1.0 if a["to"] is None else a["to"]))
    a.require(low <= high, "a range ends where it begins, or later")
    return _scale_and_shift(_unit(a), high - low, low)


def _standard_normal(a: DrawCall) -> Tensor:
    """Draws standard normal numbers; real and imaginary parts of complex ones have variance 1/2 each."""
    if a.dtype.is_complex:
        parts = a.draw("normal", a.wide, 0, (*a.size, 2))
        return _cast(torch.view_as_complex(parts * math.sqrt(0.5)), a.dtype)
    a.require_floating()
    return _cast(a.draw("normal", a.wide), a.dtype)


def _normal(a: DrawCall) -> Tensor:
    mean, std = a["mean"] or 0.0 if not isinstance(a["mean"], Tensor) else a["mean"], a["std"]
    std = 1.0 if std is None else std
    a.require(isinstance(std, Tensor) or std >= 0, "a standard deviation is not negative")
    if isinstance(std, Tensor):
        std = WITHIN(std, 0, math.inf, "a standard deviation is not negative")
    return _scale_and_shift(_standard_normal(a), std, mean)


def _log_normal(a: DrawCall) -> Tensor:
    a.require_floating()
    a.require(a["std"] is None or a["std"] > 0, "the standard deviation is above 0")
    mean, std = a["mean"], a["std"]
    return (
        (a.draw("normal", a.wide) * (2.0 if std is None else std) + (1.0 if mean is None else mean)).exp().to(a.dtype)
    )


def _exponential(a: DrawCall) -> Tensor:
    a.require_floating()
    rate = 1.0 if a["lambd"] is None else a["lambd"]
    a.require(rate > 0, "a rate is above 0")
    return _cast(a.draw("exponential", a.wide) / rate, a.dtype)


def _cauchy(a: DrawCall) -> Tensor:
    a.require_floating()
    median, sigma = a["median"] or 0.0, 1.0 if a["sigma"] is None else a["sigma"]
    a.require(sigma > 0, "sigma is above 0")
    return _cast(a.draw("cauchy", a.wide) * sigma + median, a.dtype)


def _geometric(a: DrawCall) -> Tensor:
    """Draws the number of trials until one succeeds: an exponential number, rounded up."""
    a.require(0 < a["p"] < 1, "a probability of success is above 0 and below 1")
    a.require(not a.dtype.is_complex and a.dtype != torch.bool, "it draws numbers of trials")
    return _cast((a.draw("exponential", torch.float64) / -math.log1p(-a["p"])).ceil().clamp(min=1.0), a.dtype)


def _bernoulli(a: DrawCall) -> Tensor:
    p = a["p"] if a["p"] is not None else a["self"]
    if isinstance(p, Tensor):
        p = WITHIN(p, 0, 1, "a probability lies between 0 and 1")
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        return _cast(a.draw("uniform", wide, _DIGITS[wide]) < p, a.dtype)
    return _draw_with_probability(a, p, a.dtype)


def _draw_with_probability(a: DrawCall, p: float, dtype: torch.dtype) -> Tensor:
    """Draws 1 with probability p, else 0, of any dtype."""
    a.require(0 <= p <= 1, "a probability lies between 0 and 1")
    draw_dtype = dtype if dtype in (torch.float32, torch.float64, torch.bool) else torch.bool
    return _cast(a.draw("bernoulli", draw_dtype, threshold(p)), dtype)


def _integers(a: DrawCall, low: int, high: int | Tensor) -> Tensor:
    """Draws uniform integers from low to below high, of the call's dtype."""
    if isinstance(high, Tensor):
        return _cast(a.draw("long", torch.int64) % (high.to(torch.int64) - low) + low, a.dtype)
    a.require(low < high, "a range of integers is not empty")
    n = high - low
    if n <= _ONE_WORD:
        whole = a.draw("word", torch.int64) * n >> 32
    else:
        a.require(n < 1 << 63, "a range of integers has fewer than 2^63")
        whole = a.draw("long", torch.int64) % n
    return _cast(whole + low if low else whole, a.dtype)


def _randint(a: DrawCall) -> Tensor:
    return _integers(a, a["low"] or 0, a["high"])


def _random(a: DrawCall) -> Tensor:
    """Draws integers from 0 (or `from`) to the largest of the dtype; for floats, the largest without gaps below it."""
    low, high = a["from"] or 0, a["to"]
    if high is None:
        high = 2 if a.dtype == torch.bool else _max_integer(a.dtype) + (a["from"] is not None or a.dtype != torch.int64)
    return _integers(a, low, min(high, low + (1 << 63) - 1))


def _max_integer(dtype: torch.dtype) -> int:
    return 1 << _DIGITS[dtype] if dtype.is_floating_point else int(torch.iinfo(dtype).max)


def _randperm(a: DrawCall) -> Tensor:
    """Sorts random numbers of 63 bits; equal ones stay in order."""
    return _cast(torch.sort(a.draw("long", torch.int64), stable=True).indices, a.dtype)


def _multinomial(a: DrawCall) -> Tensor:
    """Draws classes by their weights `[rows, classes]` or `[classes]`.

    Each class gets an exponential arrival time at the rate of its weight; the first arrivals are drawn (Efraimidis and
    Spirakis, 2006). Draws with replacement search uniform numbers in the cumulative weights. The devices check that
    weights are finite, not negative, and not all 0.
    """
    weights, n = a["self"], a["num_samples"]
    classes = weights.shape[-1]
    a.require(weights.is_floating_point() and weights.dim() in (1, 2), "weights are floating, of one or two dims")
    a.require(n > 0, "at least one sample is drawn")
    a.require(a["replacement"] or n <= classes, "without replacement there are as many samples as classes, at most")
    lead = tuple(weights.shape[:-1])
    weights = WITHIN(weights, 0, torch.finfo(weights.dtype).max, "a weight is a number, and not negative").double()
    if n == 1 or not a["replacement"]:
        race = weights / a.draw("exponential", torch.float64, 0, tuple(weights.shape))
        race = torch.where(_check_positive_total(race.amax(-1, keepdim=True)) > 0, race, 0)
        first: Tensor = race.argmax(-1, keepdim=True) if n == 1 else race.topk(n).indices
        return first
    total = weights.cumsum(-1)
    at = a.draw("uniform", torch.float64, 53, (*lead, n)) * _check_positive_total(total[..., -1:])
    index = torch.searchsorted(total, at, right=True)
    last = (total >= total[..., -1:]).to(torch.int64).argmax(-1, keepdim=True)  # rounding may exceed it
    return torch.minimum(index, last)


def _check_positive_total(total: Tensor) -> Tensor:
    checked: Tensor = WITHIN(total, torch.finfo(total.dtype).tiny, math.inf, "not all weights are 0")
    return checked


def _native_dropout(a: DrawCall) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    if a["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    a.require(0 <= p <= 1, "a probability lies between 0 and 1")
    mask = _draw_with_probability(a, 1 - p, torch.bool)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


# --- overloads --------------------------------------------------------------------------------------------------------

_SINGLE: dict[str, Callable[[DrawCall], Tensor]] = {
    "rand": _unit,
    "rand_like": _unit,
    "randn": _standard_normal,
    "randn_like": _standard_normal,
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
    "normal": _normal,
    "normal_": _normal,
    "normal_functional": _normal,
    "uniform": _uniform,
    "uniform_": _uniform,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "exponential": _exponential,
    "exponential_": _exponential,
    "cauchy": _cauchy,
    "cauchy_": _cauchy,
    "geometric": _geometric,
    "geometric_": _geometric,
    "log_normal": _log_normal,
    "log_normal_": _log_normal,
    "random": _random,
    "random_": _random,
    "multinomial": _multinomial,
}
_DEFAULT_DTYPE = {"randint": torch.int64, "randperm": torch.int64, "multinomial": torch.int64}


def _parse_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DrawCall:
    """Binds a call's arguments to the names of its schema; determines the numbers' shape, dtype and device."""
    schema = schema_of(op).arguments
    arguments = {a.name: a.default_value for a in schema if a.has_default_value() and a.name != "dtype"}
    arguments |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    name = schema_of(op).name.removeprefix("aten::")
    tensors = [x for x in (arguments.get(k) for k in ("self", "input", "mean", "std", "p")) if isinstance(x, Tensor)]
    first = tensors[0] if tensors else None
    like = first
    out = arguments.get("out")
    if arguments.get("size") is not None:
        size: tuple[int, ...] = tuple(arguments["size"])
    elif name == "randperm":
        size = (arguments["n"],)
    elif name == "normal":
        size = tuple(torch.broadcast_shapes(*(x.shape for x in tensors)))  # type: ignore[no-untyped-call]
        like = next((x for x in tensors if x.shape == size), None)
    else:
        assert first is not None, f"{op} draws for a tensor or of a size"
        size = tuple(first.shape)
    dtype = arguments.get("dtype") or (out.dtype if out is not None else None) or _DEFAULT_DTYPE.get(name)
    if dtype is None:
        dtype = first.dtype if first is not None else torch.get_default_dtype()
    device = arguments.get("device") or (out.device if out is not None else None)
    if device is None:
        device = first.device if first is not None else torch.get_default_device()
    return DrawCall(op, arguments, size, dtype, torch.device(device), like)


def _make_form(op: Any, make: Callable[[DrawCall], Tensor]) -> Callable[..., Tensor]:
    """Makes the form of an op with one result, which the overload may write to its first argument or to `out`."""
    written = next(
        (a.name for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write), None
    )

    @functools.wraps(make)
    def form(*args: Any, **kwargs: Any) -> Tensor:
        call = _parse_call(op, args, kwargs)
        value = make(call)
        if written is None:
            return value
        target: Tensor = call[written]
        call.require(target.shape == value.shape, f"{written} has the shape of what is drawn: {list(value.shape)}")
        return target.copy_(value)

    return form


def _dropout(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _native_dropout(_parse_call(aten.native_dropout.default, args, kwargs))


def _overloads(name: str) -> Iterator[tuple[str, Any]]:
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        yield (name if overload == "default" else f"{name}.{overload}"), getattr(packet, overload)


def _make_forms() -> dict[str, Callable[..., Any]]:
    forms: dict[str, Callable[..., Any]] = {
        spelled: _make_form(op, make)
        for name, make in _SINGLE.items()
        for spelled, op in _overloads(name)
        if torch.Tag.nondeterministic_seeded in op.tags
    }
    forms["native_dropout"] = _dropout
    forms["shardlib::fresh_key"] = fresh_key
    return forms


FORMS = _make_forms()
