"""Random bits that depend only on the seed, a counter and the element's index in the whole tensor.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds turn
four counter words and two key words of 32 bits into four random words. `seed` and `counter` name a draw, `index` an
element of it, all of 64 bits:

    key words      (seed low, seed high)
    counter words  (i low, i high, counter low, counter high)    with i = index >> 2
    element        word number index & 3 of the four

Four neighbors share one evaluation, any part of a tensor can be drawn alone, and devices that hold the same element
draw the same bits. The index is row-major in the whole tensor; rows of attention are padded to a multiple of four.

Known answers for other implementations (the first is from Random123; the tests check its third, too):

    seed 0, counter 0, indices 0 to 3                       6627e8d5 e169c58d bc57ac4c 9b00dbd8
    seed 0x299f31d0a4093822, counter 0x0370734413198a2e,
    indices 0x168c234c90fdaa20 to 0x168c234c90fdaa23        2fe11a02 572a2f27 2f88763b 78d5e325
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key words after every round
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_CHUNK = 1 << 14  # counters at once on the CPU: the eight tensors in use stay in the cache


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words and two key words, all int64 tensors that hold 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for step in range(_ROUNDS):
        if step:
            k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
        # The product of two 32-bit words fills 64 bits. Shift and mask work although the top bit is the sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high_word(p1) ^ c1 ^ k0, _high_word(p0) ^ c3 ^ k1
        c1, c3 = p1 & _WORD, p0 & _WORD
    return c0, c1, c2, c3


def words(seed: Tensor | int, counter: Tensor | int, i: Tensor) -> Tensor:
    """Computes the words `[..., 4]` (int64, 0 to 2^32 - 1) of the elements 4 i to 4 i + 3, for every `i` `[...]`."""
    key, tail = _split_words(seed, i.device), _split_words(counter, i.device)
    flat = i.reshape(-1)
    out = flat.new_empty(len(flat), 4)
    step = _CHUNK if i.device.type == "cpu" else max(1, len(flat))
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        drawn = philox((part & _WORD, _high_word(part), *tail), key)
        torch.stack(drawn, -1, out=out[start : start + step])
    return out.view(*i.shape, 4)


def bits(seed: Tensor | int, counter: Tensor | int, index: Tensor) -> Tensor:
    """Computes the 32 random bits of every element, as int64 from 0 to 2^32 - 1; `index` is int64 and not negative."""
    return words(seed, counter, index >> 2).gather(-1, (index & 3)[..., None]).squeeze(-1)


def threshold(dropout: float) -> int:
    """Returns the least 32-bit word that keeps its element if a share `dropout` is dropped: `ceil(dropout * 2^32)`."""
    return math.ceil(dropout * 2**32)


class Range(NamedTuple):
    """The elements `first` to `first + size - 1` of a dim that has `total` elements in the whole."""

    first: int
    size: int
    total: int


def keep_mask(
    key: Tensor, dropout: float, batch: Range, heads: Range, queries: Range, keys: Range, *, device: torch.device
) -> Tensor:
    """Returns bool `[batch, heads, queries, keys]`, true for the probabilities that dropout keeps, of one part.

    `key` is int64 `[2]`: seed and counter. The element `(b, h, q, t)` has the index `((b * H + h) * S + q) * T4 + t` in
    sizes of the whole. T4 is T rounded up to a multiple of four. `batch.total` is not needed.
    """
    row = _indices(batch, device)[:, None] * heads.total + _indices(heads, device)
    row = row[..., None] * queries.total + _indices(queries, device)
    start, stop = keys.first // 4, -(-(keys.first + keys.size) // 4)
    i = row[..., None] * -(-keys.total // 4) + torch.arange(start, stop, device=device)
    seed, counter = key.to(device).unbind()
    drawn = words(seed, counter, i) >= threshold(dropout)
    return drawn.flatten(-2).narrow(-1, keys.first - 4 * start, keys.size)


def _indices(r: Range, device: torch.device) -> Tensor:
    return torch.arange(r.first, r.first + r.size, device=device)


def _high_word(x: Tensor) -> Tensor:
    return (x >> 32) & _WORD


def _split_words(x: Tensor | int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Splits 64 bits into low and high word; an int from 2^63 on becomes the negative number of the same bits."""
    if isinstance(x, int):
        x = torch.full((), x - (1 << 64) if x >= 1 << 63 else x, dtype=torch.int64, device=device)
    return x & _WORD, _high_word(x)
