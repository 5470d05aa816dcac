"""What kind of attention: the arguments that the op and its backward share, and what follows from them.

    logits[b, h, i, j] = scale * q_i . k_j + bias - slope_h * |qpos - kpos|,  qpos = q_offset + i, kpos = k_offset + j

A query sees a key where `mask` is true, `kpos <= qpos` when causal, and `|qpos - kpos| < window` when window is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlib.ops.random import philox
from shardlib.ops.random.philox import Range


class Variant(NamedTuple):
    """The arguments of the ops behind their tensors, in the order of the schema.

    * mask: bool, bias: floating; both broadcast to `[B, H, S, T]`. alibi: slopes, float32 `[H]`.
    * key: int64 `[2]`, seed and counter of dropout; dropout: the probability to drop a probability.
    * part: `[first batch, first head, H, S, T]` of the whole that these tensors are a part of; None: they are all.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    key: Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    window: int = 0
    dropout: float = 0.0
    q_offset: int = 0
    k_offset: int = 0
    part: Sequence[int] | None = None

    @property
    def shift(self) -> int:
        """Query i and key j are `i - j + shift` apart."""
        return self.q_offset - self.k_offset

    def explicit(self, q: Tensor, k: Tensor) -> Variant:
        """The same, as backends want it: mask and bias have four dims, and for dropout `part` is written out."""
        how = self
        if self.mask is not None and self.mask.dim() < 4:
            how = how._replace(mask=self.mask[(None,) * (4 - self.mask.dim())])
        if self.bias is not None and self.bias.dim() < 4:
            how = how._replace(bias=self.bias[(None,) * (4 - self.bias.dim())])
        if self.dropout and not self.part:
            how = how._replace(part=whole_part(q.shape, k.shape, self))
        return how

    def block(self, rows: slice, keys: slice) -> Variant:
        """The variant of some queries and keys; it must be explicit."""
        mask, bias = (None if x is None else x[block_of(x, rows, keys)] for x in (self.mask, self.bias))
        return self._replace(
            mask=mask, bias=bias, q_offset=self.q_offset + rows.start, k_offset=self.k_offset + keys.start
        )

    def rows(self, s: int, t: int) -> tuple[int, int]:
        """The queries that may see a key, by their places."""
        first = max(0, -self.shift) if self.causal else max(0, 1 - self.window - self.shift) if self.window else 0
        last = min(s, t - 1 + self.window - self.shift) if self.window else s
        return (first, last) if t and first < last else (0, 0)

    def keys(self, rows: slice, t: int) -> tuple[int, int]:
        """The keys that some of the queries `rows` may see, by their places."""
        low, high = rows.start + self.shift, rows.stop - 1 + self.shift
        first = max(0, low - self.window + 1) if self.window else 0
        last = min(t, high + (1 if self.causal else self.window)) if self.causal or self.window else t
        return first, max(first, last)

    def hides(self, s: int, t: int) -> bool:
        """Whether the places alone hide any of `t` keys from any of `s` queries."""
        low, high = self.shift - (t - 1), self.shift + s - 1  # the least and the greatest distance
        return (self.causal and low < 0) or (self.window > 0 and max(-low, high) >= self.window)

    def visible(self, s: int, t: int, device: torch.device) -> Tensor:
        """Bool `[s, t]`: what causal and window leave to see."""
        apart = self.apart(s, t, device)
        seen = apart >= 0 if self.causal else apart.new_ones(s, t, dtype=torch.bool)
        return seen & (apart.abs() < self.window) if self.window else seen

    def apart(self, s: int, t: int, device: torch.device) -> Tensor:
        """`qpos - kpos`, int64 `[s, t]`."""
        return torch.arange(self.shift, self.shift + s, device=device)[:, None] - torch.arange(t, device=device)

    def logits(self, scores: Tensor) -> Tensor:
        """The scaled scores `[B, H, S, T]` with bias and ALiBi added, -inf where a query must not look."""
        s, t = scores.shape[-2:]
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if self.alibi is not None:
            away = self.apart(s, t, scores.device).abs()
            scores = scores - self.alibi.to(scores.dtype)[:, None, None] * away
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        if self.hides(s, t):
            scores = scores.masked_fill(~self.visible(s, t, scores.device), -math.inf)
        return scores

    def keep(self, b: int, h: int, s: int, t: int, device: torch.device) -> Tensor:
        """Which probabilities dropout keeps, bool `[b, h, s, t]`."""
        assert self.key is not None
        assert self.part is not None
        batch, head, heads, queries, keys = self.part
        return philox.keep_mask(
            self.key,
            self.dropout,
            Range(batch, b, batch + b),
            Range(head, h, heads),
            Range(self.q_offset, s, queries),
            Range(self.k_offset, t, keys),
            device=device,
        )


def blocks(variant: Variant, s: int, t: int, rows: int) -> Iterator[tuple[slice, slice, Variant]]:
    """Blocks of at most `rows` queries with the keys that they may see; queries and keys that see nothing are left out.

    Example:
        >>> for rows, keys, _ in blocks(Variant(causal=True, window=3), 8, 8, rows=4):
        ...     print(rows.start, rows.stop, "see", keys.start, keys.stop)
        0 4 see 0 4
        4 8 see 2 8
    """
    first, last = variant.rows(s, t)
    for start in range(first, last, max(rows, 1)):
        part = slice(start, min(start + max(rows, 1), last))
        keys = slice(*variant.keys(part, t))
        yield part, keys, variant.block(part, keys)


def whole_part(q: Sequence[int], k: Sequence[int], variant: Variant) -> list[int]:
    """The `part` of tensors that are the whole: offsets count what lies before them."""
    return [0, 0, q[1], q[2] + variant.q_offset, k[2] + variant.k_offset]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which dtype products of `dtype` add up; the dtype of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_last(x: Tensor) -> Tensor:
    """`[B, H, S, D]` in memory as `[B, S, H, D]`: how dq, dk and dv are laid out; o is laid out as q is."""
    swapped = x.transpose(1, 2)
    return x if swapped.is_contiguous() else swapped.contiguous().transpose(1, 2)


def sum_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` summed over what a tensor of `shape` was broadcast along."""
    return x.sum_to_size(*shape) if tuple(x.shape) != tuple(shape) else x


def block_of(x: Tensor, rows: slice, keys: slice) -> tuple[slice, ...]:
    """Where a mask or bias `[B or 1, H or 1, S or 1, T or 1]` holds what belongs to these queries and keys."""
    whole = slice(None)
    return whole, whole, rows if x.shape[2] != 1 else whole, keys if x.shape[3] != 1 else whole
