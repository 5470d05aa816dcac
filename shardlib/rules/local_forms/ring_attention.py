"""Attention whose queries and keys are cut over the same devices: ring attention.

Every device keeps its queries. The pieces of k and v go round, one neighbor further at every step, and what a device
has seen so far is merged by its log-sum-exp. In the backward pass the gradients of a piece of k and v travel with it;
they start one place behind their home, so that they are complete when they come there. So each of k, v, dk and dv is
sent n - 1 times in pieces of 1/n, and no device ever holds more than two pieces of each.

The next piece is sent before the present one is worked on, so that the wire is busy under the arithmetic.

Causal attention gives the last device 2n - 1 times the work of the first. Where that costs more than avoiding it does,
the sequence is put in zigzag order first: cut in 2n chunks, of which device i works on chunks i and 2n - 1 - i, so that
all devices do the same at every step.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023); the
zigzag is the order of chunks in the context parallelism of Llama 3 (2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.ops.attention.variant import Variant
from shardlib.ops.backend_choice import wanted
from shardlib.rules.rule import Labels, Local

aten = torch.ops.aten
_TENSORS = ("grad_o", "grad_lse", "q", "k", "v", "o", "lse")
SEQUENCE = 2  # the dim of q, k, v, o and lse that is cut
Pieces = list[Any]  # a device's piece of a tensor, or its two chunks
Pairs = list[tuple[int, int]]


def forward(local: Local, tensors: Sequence[Any], variant: Variant) -> tuple[Any, Any]:
    """o and lse of this device's queries; `tensors` are q, k and v, `variant` the op's other arguments."""
    ring = Ring.over(local, variant, local.rule.operands[3:], moved=5)
    q_labels, k_labels, v_labels = local.rule.operands[:3]
    queries, keys, values = map(ring.order, tensors, (q_labels, k_labels, v_labels), ("q", "k", "v"))
    merge = torch.ops.shardlib.attention_merge.default
    done: list[Any] = [None] * ring.chunks
    for step in range(ring.n):
        here = list(zip(keys, values, strict=True))
        if step + 1 < ring.n:
            keys, values = ring.onward(keys, k_labels, step, "k"), ring.onward(values, v_labels, step, "v")
        for i, query in enumerate(queries):
            for j, (key, value) in enumerate(here):
                part = local.op(local.call.target, query, key, value, *ring.block(i, j, step))
                done[i] = part if done[i] is None else local.op(merge, *done[i], *part)
    o, lse = ([pair[i] for pair in done] for i in (0, 1))
    o_labels, lse_labels = local.rule.results
    return ring.restore(ring.narrow(o), o_labels, "o"), ring.restore(lse, lse_labels, "lse")


def backward(local: Local, tensors: Sequence[Any], variant: Variant, *after: Any) -> tuple[Any, Any, Any, Any]:
    """dq, dk, dv and the gradient of bias; `tensors` are grad_o, grad_lse (may be None), q, k, v, o and lse,
    `after` what follows the variant."""
    operands = iter(local.rule.operands)
    labels = [() if x is None else next(operands) for x in tensors]
    ring = Ring.over(local, variant, tuple(operands), moved=10)
    grad_o, grad_lse, queries, own_keys, own_values, o, lse = map(ring.order, tensors, labels, _TENSORS)
    dq, dk, dv = ring.nothing(), ring.nothing(), ring.nothing()
    dbias = None
    keys, values = ring.onward(own_keys, labels[3], 0, "k"), ring.onward(own_values, labels[4], 0, "v")
    for step in range(1, ring.n + 1):
        here = list(zip(keys, values, strict=True))
        if step + 1 < ring.n:
            keys, values = ring.onward(keys, labels[3], step, "k"), ring.onward(values, labels[4], step, "v")
        elif step + 1 == ring.n:
            keys, values = own_keys, own_values  # last, when their gradients have been everywhere else
        arrived: tuple[Pieces, ...] = ()
        if step > 1:
            arrived = ring.onward(dk, labels[3], step - 1, "dk"), ring.onward(dv, labels[4], step - 1, "dv")
        dk, dv = ring.nothing(), ring.nothing()
        for i in range(ring.chunks):
            given = grad_o[i], grad_lse[i], queries[i]
            for j, pair in enumerate(here):
                one = local.op(local.call.target, *given, *pair, o[i], lse[i], *ring.block(i, j, step), *after)
                dq[i] = ring.add(dq[i], one[0], wide=True)
                dk[j], dv[j] = ring.add(dk[j], one[1]), ring.add(dv[j], one[2])
                dbias = ring.add_bias(dbias, one[3], step)
        if arrived:
            dk, dv = (list(map(ring.add, *pair)) for pair in zip(arrived, (dk, dv), strict=True))
    results = zip((ring.narrow(dq), dk, dv), local.rule.results, ("dq", "dk", "dv"), strict=False)
    dq, dk, dv = (ring.restore(*result) for result in results)
    return dq, dk, dv, dbias


@dataclass(frozen=True)
class Ring:
    """Who holds what while things go round: `n` devices, `chunks` pieces of the sequence on each (two in a zigzag)."""

    local: Local
    variant: Variant
    others: tuple[Labels, ...]  # the labels of the variant's tensors
    n: int
    chunks: int

    @staticmethod
    def over(local: Local, variant: Variant, others: tuple[Labels, ...], moved: int) -> Ring:
        """The ring over the axes that cut the keys; a zigzag would move `moved` tensors of the size of q."""
        n = local.ways("t")
        return Ring(local, variant, others, n, 2 if _zigzag(local, variant, n, moved) else 1)

    def nothing(self) -> Pieces:
        return [None] * self.chunks

    # Order ----------------------------------------------------------------------------------------------------------

    def order(self, x: Any, labels: Labels, name: str) -> Pieces:
        """This device's pieces of a tensor that is cut along the sequence."""
        if x is None or self.chunks == 1:
            return [x] * self.chunks
        half = self.local.size("s") // 2
        chunks = [self.local.op(aten.narrow.default, x, SEQUENCE, half * i, half) for i in (0, 1)]
        return [
            self.local.ppermute(chunk, "t", pairs, labels, name=name, parts=2)
            for chunk, pairs in zip(chunks, self._pairs(), strict=True)
        ]

    def restore(self, pieces: Pieces, labels: Labels, name: str) -> Any:
        """The inverse of `order`."""
        if self.chunks == 1:
            return pieces[0]
        back = [
            self.local.ppermute(piece, "t", [(dst, src) for src, dst in pairs], labels, name=name, parts=2)
            for piece, pairs in zip(pieces, self._pairs(), strict=True)
        ]
        return self.local.op(aten.cat.default, back, SEQUENCE)

    def _pairs(self) -> list[Pairs]:
        """Where every device sends its first and its second chunk: chunk c belongs to device c, or 2n - 1 - c."""
        last = 2 * self.n - 1
        return [[(i, min(c, last - c)) for i, c in enumerate(range(first, last + 1, 2))] for first in (0, 1)]

    def onward(self, pieces: Pieces, labels: Labels, step: int, name: str) -> Pieces:
        """Pieces that are `step` places away from home, one place further."""
        pairs = [(i, (i + 1) % self.n) for i in range(self.n)]
        holds = lambda i: (i - step) % self.n
        return [self.local.ppermute(x, "t", pairs, labels, name=name, holds=holds, parts=self.chunks) for x in pieces]

    # Blocks ---------------------------------------------------------------------------------------------------------

    def block(self, i: int, j: int, step: int) -> Variant:
        """The variant for queries of chunk i and keys of chunk j that came `step` places."""
        start, size = self._of(self._chunk("t", j), step), self._of(self.local.size("t"), step) // self.chunks
        cut = {}
        for name in ("mask", "bias"):
            x = getattr(self.variant, name)
            if x is not None and self._along_keys(name):
                cut[name] = self.local.op(aten.narrow.default, x, -1, start, size)
        q_offset, k_offset = self.variant.q_offset + self._chunk("s", i), self.variant.k_offset + start
        return self.variant._replace(**cut, q_offset=q_offset, k_offset=k_offset)

    def _of(self, value: Any, step: int) -> Any:
        """A number as it is on the device from which keys came `step` places."""
        return self.local.of(value, "t", lambda at: (at - step) % self.n)

    def _chunk(self, factor: str, j: int) -> Any:
        """The global index at which this device's chunk j of a factor starts.

        In a zigzag the first of the two is the one of even number, as only such chunks were sent there: device i works
        on chunks i and 2n - 1 - i, of which one is even.
        """
        start = self.local.offset(factor)
        if self.chunks == 1:
            return start
        size, last = self.local.rule.sizes[factor] // (2 * self.n), 2 * self.n - 1
        i = start // (2 * size)
        odd = i - i // 2 * 2
        even = i + odd * (last - 2 * i)
        return (even if j == 0 else last - even) * size

    # Sums -----------------------------------------------------------------------------------------------------------

    def add(self, total: Any, x: Any, *, wide: bool = False) -> Any:
        """`total + x`; with `wide` kept in float32 at least."""
        if wide and self._narrow:
            x = self.local.op(aten._to_copy.default, x, dtype=torch.float32)
        return x if total is None else self.local.op(aten.add.Tensor, total, x)

    def narrow(self, pieces: Pieces) -> Pieces:
        """Sums that were kept in float32, in the dtype of the operands."""
        dtype = self.local.call.operands[0].dtype
        return [self.local.op(aten._to_copy.default, x, dtype=dtype) for x in pieces] if self._narrow else pieces

    @property
    def _narrow(self) -> bool:
        return self.local.call.operands[0].dtype.itemsize < 4

    def add_bias(self, total: Any, block: Any, step: int) -> Any:
        """The gradient of the bias with one more block's; a bias with a column a key gets it in its columns."""
        if self.local.call.results[3] is None:
            return None
        if not self._along_keys("bias"):
            return self.add(total, block)
        if total is None:
            total = self.local.op(aten.zeros_like.default, self.variant.bias)
        start = self._of(self.local.offset("t"), step)
        stop = start + self._of(self.local.size("t"), step)
        return self.local.op(aten.slice_scatter.default, total, block, -1, start, stop)

    def _along_keys(self, name: str) -> bool:
        """Whether the mask or the bias differs by key."""
        there = [x for x in ("mask", "bias") if getattr(self.variant, x) is not None]
        labels = self.others[there.index(name)]
        return bool(labels) and "keys" in labels[-1]


def _zigzag(local: Local, variant: Variant, n: int, moved: int) -> bool:
    """Whether balancing a causal ring saves more than it costs: `moved` tensors of the size of q are sent."""
    s, t = (local.rule.sizes.get(x, 1) for x in ("s", "t"))
    if not variant.causal or variant.window or variant.mask is not None or variant.bias is not None:
        return False
    if s != t or s % (2 * n) or any(len(set().union(*local.values(local.size(x), x))) > 1 for x in "st"):
        return False
    if local.axes("s") != local.axes("t") or variant.q_offset != variant.k_offset:
        return False
    if (told := wanted("sequence")) in ("ring", "zigzag"):
        return told == "zigzag"
    ways = math.prod(local.ways(x) for x in local.rule.sizes if x not in local.rule.rounds)
    q = local.call.operands[0]
    saved = local.rule.flops / ways * (n - 1) / n / local.prices.flops(q.dtype.itemsize)
    return saved > moved * math.prod(q.shape) / ways * q.dtype.itemsize / local.prices.rate(local.axes("t"))
