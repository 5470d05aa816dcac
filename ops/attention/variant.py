"""The arguments that attention and its backward share: masks, bias, positions, dropout.

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
    * key: int64 `[2]`, seed and counter of dropout; dropout: the share of probabilities to drop.
    * part: `[first batch, first head, H, S, T]`, the tensors' place in the whole and its sizes; None: they are whole.
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
        """The distance of query 0 from key 0; query i is `i - j + shift` from key j."""
        return self.q_offset - self.k_offset

    def explicit(self, q: Tensor, k: Tensor) -> Variant:
        """Returns the form for backends: mask and bias have four dims, and `part` is set for dropout."""
        how = self
        if self.mask is not None and self.mask.dim() < 4:
            how = how._replace(mask=self.mask[(None,) * (4 - self.mask.dim())])
        if self.bias is not None and self.bias.dim() < 4:
            how = how._replace(bias=self.bias[(None,) * (4 - self.bias.dim())])
        if self.dropout and not self.part:
            how = how._replace(part=whole_part(q.shape, k.shape, self))
        return how

    def block(self, rows: slice, keys: slice) -> Variant:
        """Returns the variant of some queries and keys; `self` must be explicit."""
        mask, bias = (None if x is None else x[block_slices(x, rows, keys)] for x in (self.mask, self.bias))
        return self._replace(
            mask=mask, bias=bias, q_offset=self.q_offset + rows.start, k_offset=self.k_offset + keys.start
        )

    def rows(self, s: int, t: int) -> tuple[int, int]:
        """Returns the range of queries that see some key by their positions."""
        first = max(0, -self.shift) if self.causal else max(0, 1 - self.window - self.shift) if self.window else 0
        last = min(s, t - 1 + self.window - self.shift) if self.window else s
        return (first, last) if t and first < last else (0, 0)

    def keys(self, rows: slice, t: int) -> tuple[int, int]:
        """Returns the range of keys that some of the queries `rows` see by their positions."""
        low, high = rows.start + self.shift, rows.stop - 1 + self.shift
        first = max(0, low - self.window + 1) if self.window else 0
        last = min(t, high + (1 if self.causal else self.window)) if self.causal or self.window else t
        return first, max(first, last)

    def hides(self, s: int, t: int) -> bool:
        """True if positions alone hide any of `t` keys from any of `s` queries."""
        low, high = self.shift - (t - 1), self.shift + s - 1  # the least and the greatest distance
        return (self.causal and low < 0) or (self.window > 0 and max(-low, high) >= self.window)

    def visible(self, s: int, t: int, device: torch.device) -> Tensor:
        """Returns bool `[s, t]`: the keys that `causal` and `window` let each query see."""
        distances = self.distances(s, t, device)
        seen = distances >= 0 if self.causal else distances.new_ones(s, t, dtype=torch.bool)
        return seen & (distances.abs() < self.window) if self.window else seen

    def distances(self, s: int, t: int, device: torch.device) -> Tensor:
        """Returns `qpos - kpos`, int64 `[s, t]`."""
        return torch.arange(self.shift, self.shift + s, device=device)[:, None] - torch.arange(t, device=device)

    def logits(self, scores: Tensor) -> Tensor:
        """Adds bias and ALiBi to the scaled scores `[B, H, S, T]`, and -inf where a query must not see a key."""
        s, t = scores.shape[-2:]
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if self.alibi is not None:
            away = self.distances(s, t, scores.device).abs()
            scores = scores - self.alibi.to(scores.dtype)[:, None, None] * away
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        if self.hides(s, t):
            scores = scores.masked_fill(~self.visible(s, t, scores.device), -math.inf)
        return scores

    def keep(self, b: int, h: int, s: int, t: int, device: torch.device) -> Tensor:
        """Returns bool `[b, h, s, t]`, true for the probabilities that dropout keeps."""
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


def split_blocks(variant: Variant, s: int, t: int, rows: int) -> Iterator[tuple[slice, slice, Variant]]:
    """Yields blocks of at most `rows` queries with the keys that they see; omits queries that see no key."""
    first, last = variant.rows(s, t)
    for start in range(first, last, max(rows, 1)):
        part = slice(start, min(start + max(rows, 1), last))
        keys = slice(*variant.keys(part, t))
        yield part, keys, variant.block(part, keys)


def whole_part(q: Sequence[int], k: Sequence[int], variant: Variant) -> list[int]:
    """Returns `part` for tensors without one: the offsets count the elements before them."""
    return [0, 0, q[1], q[2] + variant.q_offset, k[2] + variant.k_offset]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which products of `dtype` are summed; the dtype of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_last(x: Tensor) -> Tensor:
    """Lays `[B, H, S, D]` out in memory as `[B, S, H, D]`, as dq, dk and dv are; o has q's strides."""
    swapped = x.transpose(1, 2)
    return x if swapped.is_contiguous() else swapped.contiguous().transpose(1, 2)


def sum_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums `x` over the dims along which a tensor of `shape` was broadcast to x's shape."""
    return x.sum_to_size(*shape) if tuple(x.shape) != tuple(shape) else x


def block_slices(x: Tensor, rows: slice, keys: slice) -> tuple[slice, ...]:
    """Returns the slices of a mask or bias `[B or 1, H or 1, S or 1, T or 1]` for these queries and keys."""
    whole = slice(None)
    return whole, whole, rows if x.shape[2] != 1 else whole, keys if x.shape[3] != 1 else whole
