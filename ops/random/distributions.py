"""Converts random words to numbers of a distribution, by torch's elementary arithmetic.

Every value results from additions, multiplications, divisions and square roots, which every device rounds to nearest.
So every device, and `cuda/random.cpp` with the same steps, computes the same bits. Change both files together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("word", "long", "bernoulli", "uniform", "normal", "exponential", "cauchy")


@dataclass(frozen=True)
class FloatFormat:
    """A floating dtype, the integer dtype of its size, and the precision of computations in it."""

    dtype: torch.dtype
    integer: torch.dtype
    bits: int
    digits: int
    root_half: int  # the bits of sqrt(1/2)
    log_terms: int
    sine_terms: int
    angle: int  # bits of a random word that make an angle
    open: int  # bits of a random word that make a number between 0 and 1, both excluded


SINGLE = FloatFormat(torch.float32, torch.int32, 32, 24, 0x3F3504F3, 4, 4, 32, 31)
DOUBLE = FloatFormat(torch.float64, torch.int64, 64, 53, 0x3FE6A09E667F3BCD, 10, 8, 55, 53)


def elements_per_block(kind: str, dtype: torch.dtype) -> int:
    """Returns how many elements share an evaluation of Philox: two of 64 bits, or four of 32."""
    return 2 if kind == "long" or (dtype == torch.float64 and kind != "bernoulli") else 4


def compute_values(kind: str, dtype: torch.dtype, words: Tensor, p: int) -> Tensor:
    """Computes the elements `[n, 4 or 2]` of the blocks whose words are `[n, 4]` (int64, from 0 to 2^32 - 1).

    * `word`, `long`: int64 of 32 and of 63 bits. `bernoulli`: 1 where the word is below p, of any dtype.
    * `uniform`: from 0 to below 1, of p binary digits. `normal`, `exponential`, `cauchy`: of their standard form.
    """
    if kind == "word":
        return words
    if kind == "bernoulli":
        return (words < p).to(dtype)
    number = DOUBLE if elements_per_block(kind, dtype) == 2 else SINGLE
    w = words if number is SINGLE else words[:, 1::2] << 32 | words[:, ::2]
    if kind == "long":
        return _high_bits(w, 63, number)
    if kind == "uniform":
        return _high_bits(w, p, number).to(dtype) * 2.0**-p
    if kind == "exponential":
        return _exponential(w, number)
    if kind == "cauchy":  # the tangent of a uniform angle; its period is half a turn, so one bit less will do
        sine, cosine = _sine_cosine(_high_bits(w, number.bits - 1, number), number)
        return sine / cosine
    e = _exponential(w[:, ::2], number)  # Box and Muller (1958): neighbors share a radius
    radius = _sqrt(e + e)
    sine, cosine = _sine_cosine(w[:, 1::2], number)
    return torch.stack([radius * cosine, radius * sine], -1).flatten(1)


def _high_bits(w: Tensor, n: int, number: FloatFormat) -> Tensor:
    """Returns the n highest bits of unsigned words, which int64 may show as negative numbers."""
    return (w >> (number.bits - n)) & ((1 << n) - 1)


def _exponential(w: Tensor, number: FloatFormat) -> Tensor:
    """Computes -log(u) for u uniform between 0 and 1.

    With u = 2^e m, m from sqrt(1/2) to sqrt(2), log m is 2 artanh(s) by its series in s = (m - 1) / (m + 1). It is
    never 0: for a u that rounds to 1 the result is the middle of the interval that 1 stands for.
    """
    u = (_high_bits(w, number.open, number).to(number.dtype) + 0.5) * 2.0**-number.open
    i = u.view(number.integer)
    e = (i - number.root_half) >> (number.digits - 1)
    m = (i - e * (1 << (number.digits - 1))).view(number.dtype)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = torch.full_like(z, 1.0 / (2 * number.log_terms + 1))
    for k in reversed(range(number.log_terms)):
        total = total * z + 1.0 / (2 * k + 1)
    minus_log = e.to(number.dtype) * -math.log(2) - (s + s) * total
    return minus_log.clamp(min=2.0 ** (-1 - number.digits))


def _sqrt(x: Tensor) -> Tensor:
    """Computes the square root, rounded to nearest; torch's kernels for the CPU may be off by one bit.

    In double precision, a Newton step corrects it by an exact remainder (the error of the square by Dekker, 1971).
    """
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    y = x.sqrt()
    square, high = y * y, y * 134217729.0
    high = high - (high - y)
    low = y - high
    lost = ((high * high - square) + 2.0 * high * low) + low * low
    return y + ((x - square) - lost) / (2.0 * y)


def _sine_cosine(w: Tensor, number: FloatFormat) -> tuple[Tensor, Tensor]:
    """Computes sine and cosine of the angle 2 pi w / 2^bits: quarter turns, and a rest of at most an eighth turn."""
    quarters = ((w + (1 << (number.bits - 3))) >> (number.bits - 2)) & 3
    rest = w - (quarters << (number.bits - 2))
    if number is SINGLE:  # as a signed number of 32 bits
        rest = ((rest + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
    x = ((rest >> (number.bits - number.angle)).to(number.dtype) + 0.5) * (2 * math.pi * 2.0**-number.angle)
    z = x * x
    sine, cosine = torch.ones_like(z), torch.ones_like(z)  # 1 - z / 6 (1 - z / 20 (...)), 1 - z / 2 (1 - z / 12 (...))
    for k in range(number.sine_terms, 0, -1):
        sine = 1.0 - z * (1.0 / (2 * k * (2 * k + 1))) * sine
        cosine = 1.0 - z * (1.0 / (2 * k * (2 * k - 1))) * cosine
    sine = sine * x
    odd = (quarters & 1).bool()
    a, b = torch.where(odd, cosine, sine), torch.where(odd, sine, cosine)
    return torch.where(quarters >= 2, -a, a), torch.where(((quarters + 1) & 2).bool(), -b, b)
