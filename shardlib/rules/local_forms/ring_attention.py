"""Ring attention: queries and keys are sharded over the same devices.

Every device keeps its queries. The shards of k and v travel around the ring, one device per step, and each device
merges partial results by their log-sum-exp. In the backward pass the gradients of a shard of k and v travel with it.
They start one device behind the shard's owner, so that they are complete when they arrive there. So each of k, v, dk
and dv is sent n - 1 times in shards of 1/n, and no device holds more than two shards of each.

A device sends the next shard before it works on the current one, so that communication overlaps with arithmetic.

Causal attention gives the last device 2n - 1 times the work of the first. Where this imbalance costs more than a
reordering, the form first brings the sequence into zigzag order: it splits the sequence into 2n chunks, and device i
works on chunks i and 2n - 1 - i. Then all devices do the same work at every step.

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
from shardlib.ops.backend_choice import requested_backend
from shardlib.rules.rule import Labels, LocalBuilder

aten = torch.ops.aten
_TENSORS = ("grad_o", "grad_lse", "q", "k", "v", "o", "lse")
SEQUENCE = 2  # the sharded dim of q, k, v, o and lse
Chunks = list[Any]  # a device's shard of a tensor, or its two chunks in a zigzag
Pairs = list[tuple[int, int]]


def forward(local: LocalBuilder, tensors: Sequence[Any], variant: Variant) -> tuple[Any, Any]:
    """Returns o and lse of this device's queries. `tensors` are q, k and v, `variant` the op's other arguments."""
    ring = Ring.over(local, variant, local.rule.operands[3:], moved=5)
    q_labels, k_labels, v_labels = local.rule.operands[:3]
    queries, keys, values = map(ring.order, tensors, (q_labels, k_labels, v_labels), ("q", "k", "v"))
    merge = torch.ops.shardlib.attention_merge.default
    merged: list[Any] = [None] * ring.chunks
    for step in range(ring.n):
        current = list(zip(keys, values, strict=True))
        if step + 1 < ring.n:
            keys, values = ring.send_on(keys, k_labels, step, "k"), ring.send_on(values, v_labels, step, "v")
        for i, query in enumerate(queries):
            for j, (key, value) in enumerate(current):
                part = local.op(local.call.target, query, key, value, *ring.block(i, j, step))
                merged[i] = part if merged[i] is None else local.op(merge, *merged[i], *part)
    o, lse = ([pair[i] for pair in merged] for i in (0, 1))
    o_labels, lse_labels = local.rule.results
    return ring.restore(ring.narrow(o), o_labels, "o"), ring.restore(lse, lse_labels, "lse")


def backward(local: LocalBuilder, tensors: Sequence[Any], variant: Variant, *after: Any) -> tuple[Any, Any, Any, Any]:
    """Returns dq, dk, dv and the gradient of the bias.

    `tensors` are grad_o, grad_lse (may be None), q, k, v, o and lse; `after` are the arguments after the variant.
    """
    operands = iter(local.rule.operands)
    labels = [() if x is None else next(operands) for x in tensors]
    ring = Ring.over(local, variant, tuple(operands), moved=10)
    grad_o, grad_lse, queries, own_keys, own_values, o, lse = map(ring.order, tensors, labels, _TENSORS)
    dq, dk, dv = ring.no_chunks(), ring.no_chunks(), ring.no_chunks()
    dbias = None
    keys, values = ring.send_on(own_keys, labels[3], 0, "k"), ring.send_on(own_values, labels[4], 0, "v")
    for step in range(1, ring.n + 1):
        current = list(zip(keys, values, strict=True))
        if step + 1 < ring.n:
            keys, values = ring.send_on(keys, labels[3], step, "k"), ring.send_on(values, labels[4], step, "v")
        elif step + 1 == ring.n:
            keys, values = own_keys, own_values  # last, when their gradients have visited all other devices
        arrived: tuple[Chunks, ...] = ()
        if step > 1:
            arrived = ring.send_on(dk, labels[3], step - 1, "dk"), ring.send_on(dv, labels[4], step - 1, "dv")
        dk, dv = ring.no_chunks(), ring.no_chunks()
        for i in range(ring.chunks):
            first = grad_o[i], grad_lse[i], queries[i]
            for j, pair in enumerate(current):
                grads = local.op(local.call.target, *first, *pair, o[i], lse[i], *ring.block(i, j, step), *after)
                dq[i] = ring.add(dq[i], grads[0], wide=True)
                dk[j], dv[j] = ring.add(dk[j], grads[1]), ring.add(dv[j], grads[2])
                dbias = ring.add_bias(dbias, grads[3], step)
        if arrived:
            dk, dv = (list(map(ring.add, *pair)) for pair in zip(arrived, (dk, dv), strict=True))
    results = zip((ring.narrow(dq), dk, dv), local.rule.results, ("dq", "dk", "dv"), strict=False)
    dq, dk, dv = (ring.restore(*result) for result in results)
    return dq, dk, dv, dbias


@dataclass(frozen=True)
class Ring:
    """The ring of `n` devices, each with `chunks` chunks of the sequence (two in a zigzag)."""

    local: LocalBuilder
    variant: Variant
    others: tuple[Labels, ...]  # the labels of the variant's tensors
    n: int
    chunks: int

    @staticmethod
    def over(local: LocalBuilder, variant: Variant, others: tuple[Labels, ...], moved: int) -> Ring:
        """Returns the ring over the axes that shard the keys; a zigzag would send `moved` tensors of the size of q."""
        n = local.ways("t")
        return Ring(local, variant, others, n, 2 if _zigzag(local, variant, n, moved) else 1)

    def no_chunks(self) -> Chunks:
        return [None] * self.chunks

    # Order ----------------------------------------------------------------------------------------------------------

    def order(self, x: Any, labels: Labels, name: str) -> Chunks:
        """This device's chunks of a tensor, in the order of the ring."""
        if x is None or self.chunks == 1:
            return [x] * self.chunks
        half = self.local.size("s") // 2
        chunks = [self.local.op(aten.narrow.default, x, SEQUENCE, half * i, half) for i in (0, 1)]
        return [
            self.local.ppermute(chunk, "t", pairs, labels, name=name, parts=2)
            for chunk, pairs in zip(chunks, self._pairs(), strict=True)
        ]

    def restore(self, chunks: Chunks, labels: Labels, name: str) -> Any:
        """Returns the inverse of `order`."""
        if self.chunks == 1:
            return chunks[0]
        back = [
            self.local.ppermute(chunk, "t", [(dst, src) for src, dst in pairs], labels, name=name, parts=2)
            for chunk, pairs in zip(chunks, self._pairs(), strict=True)
        ]
        return self.local.op(aten.cat.default, back, SEQUENCE)

    def _pairs(self) -> list[Pairs]:
        """Returns the (source, destination) pairs of the devices' first chunks, and of their second chunks.

        Chunk c belongs to device c, or 2n - 1 - c.
        """
        last = 2 * self.n - 1
        return [[(i, min(c, last - c)) for i, c in enumerate(range(first, last + 1, 2))] for first in (0, 1)]

    def send_on(self, chunks: Chunks, labels: Labels, step: int, name: str) -> Chunks:
        """Sends chunks that are `step` devices away from their owners to the next device."""
        pairs = [(i, (i + 1) % self.n) for i in range(self.n)]
        holds = lambda i: (i - step) % self.n
        return [self.local.ppermute(x, "t", pairs, labels, name=name, holds=holds, parts=self.chunks) for x in chunks]

    # Blocks ---------------------------------------------------------------------------------------------------------

    def block(self, i: int, j: int, step: int) -> Variant:
        """Returns the variant for queries of chunk i and keys of chunk j, `step` devices away from their owner."""
        start = self._at_owner(self._chunk_offset("t", j), step)
        size = self._at_owner(self.local.size("t"), step) // self.chunks
        masks = {}
        for name in ("mask", "bias"):
            x = getattr(self.variant, name)
            if x is not None and self._differs_by_key(name):
                masks[name] = self.local.op(aten.narrow.default, x, -1, start, size)
        q_offset, k_offset = self.variant.q_offset + self._chunk_offset("s", i), self.variant.k_offset + start
        return self.variant._replace(**masks, q_offset=q_offset, k_offset=k_offset)

    def _at_owner(self, value: Any, step: int) -> Any:
        """Returns a number as the owner of keys has it that are `step` devices away."""
        return self.local.on_member(value, "t", lambda at: (at - step) % self.n)

    def _chunk_offset(self, factor: str, j: int) -> Any:
        """Returns the global index at which this device's chunk j of a factor starts.

        In a zigzag, device i works on chunks i and 2n - 1 - i. Its chunk 0 is the one with the even number.
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
        """`total + x`, with `wide` in float32 at least."""
        if wide and self._is_narrow:
            x = self.local.op(aten._to_copy.default, x, dtype=torch.float32)
        return x if total is None else self.local.op(aten.add.Tensor, total, x)

    def narrow(self, chunks: Chunks) -> Chunks:
        """Casts sums in float32 to the dtype of the operands."""
        dtype = self.local.call.operands[0].dtype
        return [self.local.op(aten._to_copy.default, x, dtype=dtype) for x in chunks] if self._is_narrow else chunks

    @property
    def _is_narrow(self) -> bool:
        return self.local.call.operands[0].dtype.itemsize < 4

    def add_bias(self, total: Any, block: Any, step: int) -> Any:
        """Adds a block's gradient to the bias's gradient, in the columns of its keys if the bias differs by key."""
        if self.local.call.results[3] is None:
            return None
        if not self._differs_by_key("bias"):
            return self.add(total, block)
        if total is None:
            total = self.local.op(aten.zeros_like.default, self.variant.bias)
        start = self._at_owner(self.local.offset("t"), step)
        stop = start + self._at_owner(self.local.size("t"), step)
        return self.local.op(aten.slice_scatter.default, total, block, -1, start, stop)

    def _differs_by_key(self, name: str) -> bool:
        """Returns whether the mask or the bias has a dim of keys."""
        present = [x for x in ("mask", "bias") if getattr(self.variant, x) is not None]
        labels = self.others[present.index(name)]
        return bool(labels) and "keys" in labels[-1]


def _zigzag(local: LocalBuilder, variant: Variant, n: int, moved: int) -> bool:
    """Returns whether balancing a causal ring saves more time than sending `moved` tensors of the size of q takes."""
    s, t = (local.rule.sizes.get(x, 1) for x in ("s", "t"))
    if not variant.causal or variant.window or variant.mask is not None or variant.bias is not None:
        return False
    if s != t or s % (2 * n) or any(len(set().union(*local.values(local.size(x), x))) > 1 for x in "st"):
        return False
    if local.axes("s") != local.axes("t") or variant.q_offset != variant.k_offset:
        return False
    if (choice := requested_backend("sequence")) in ("ring", "zigzag"):
        return choice == "zigzag"
    ways = math.prod(local.ways(x) for x in local.rule.sizes if x not in local.rule.ties.ring)
    q = local.call.operands[0]
    saved = local.rule.flops / ways * (n - 1) / n / local.prices.flops(q.dtype.itemsize)
    return saved > moved * math.prod(q.shape) / ways * q.dtype.itemsize / local.prices.rate(local.axes("t"))
